"""How a job comes in: written by one script and, where the client is strict, known to be on disk."""

from __future__ import annotations

from typing import Any

from redis.exceptions import NoScriptError

from jitney import replies, scripts
from jitney.calls import ScriptedQueue, milliseconds, or_unavailable
from jitney.durability import Proof, add_proof, check_proof
from jitney.errors import InvalidJob
from jitney.keys import BANDS, check_tenant, queue_of
from jitney.records import Enqueued, Entry, Limits


class Entrance(ScriptedQueue):
    """The part of `Queue` that takes jobs in."""

    async def enqueue(self, entry: Entry, limits: Limits = Limits()) -> Enqueued:  # noqa: B008 (frozen)
        """Write a job, once. The same id or idempotency key with the same digest answers the job that exists.

        Raises IdempotencyConflict, Overloaded (nothing was written), QueueUnavailable; InvalidJob for an id,
        tenant or band that must not become part of a key's name.
        """
        call = self._enqueue_call(entry, limits)
        with or_unavailable():
            return replies.enqueued(await scripts.run(self.redis, scripts.load("enqueue"), call))

    async def enqueue_synced(self, entry: Entry, limits: Limits, proof: Proof) -> Enqueued:
        """As `enqueue`, and on disk when this returns. proof: from `durability.find_proof`.

        Raises NotDurable for a job that was written but is not known to be on disk.
        """
        call = self._enqueue_call(entry, limits)
        with or_unavailable():
            try:
                reply, *proofs = await self._run_with_proof(call, proof)
            except NoScriptError:
                await self.redis.script_load(scripts.load("enqueue").source)
                reply, *proofs = await self._run_with_proof(call, proof)
        enqueued = replies.enqueued(reply)
        check_proof(proof, proofs, enqueued.id)
        return enqueued

    async def _run_with_proof(self, call: scripts.Call, proof: Proof) -> list[Any]:
        """One round trip on one connection: WAITAOF speaks of the writes of its own connection alone."""
        pipeline = self.redis.pipeline(transaction=False)
        pipeline.execute_command("EVALSHA", scripts.load("enqueue").sha, len(call.keys), *call.keys, *call.args)
        add_proof(pipeline, self.keys, proof)
        answers: list[Any] = await pipeline.execute(raise_on_error=False)
        if isinstance(answers[0], Exception):
            raise answers[0]
        return answers

    def _enqueue_call(self, entry: Entry, limits: Limits) -> scripts.Call:
        self._check(entry)
        keys = [self.keys.counts, self.keys.job(entry.id), self.keys.tokens(entry.id)]
        if entry.idempotency_key is not None:
            keys.append(self.keys.idempotency(entry.tenant, entry.idempotency_key))
        return self._call(keys, new_job_arguments(entry, limits))

    def _check(self, entry: Entry) -> None:
        if queue_of(entry.id) != self.name:
            raise InvalidJob(f"job {entry.id} is not of queue {self.name}", param="id")
        check_tenant(entry.tenant)
        if entry.band not in BANDS:
            raise InvalidJob(f"band {str(entry.band)[:64]!r} is none of {', '.join(BANDS)}", param="band")


def new_job_arguments(entry: Entry, limits: Limits) -> list[scripts.Argument]:
    """What every script that takes a job in reads first."""
    return [
        entry.id,
        entry.digest,
        entry.body,
        entry.band,
        entry.tenant,
        entry.num_prompt_tokens,
        entry.max_tokens or 0,
        milliseconds(entry.not_before),
        milliseconds(entry.deadline),
        milliseconds(entry.timeout_s),
        milliseconds(entry.queue_timeout_s),
        milliseconds(entry.result_ttl_s),
        limits.max_waiting_jobs,
        limits.max_waiting_tokens,
        limits.max_tenant_jobs,
        limits.max_later_jobs,
        entry.max_attempts or 0,
        int(entry.keep_body),
        entry.hook,
    ]
