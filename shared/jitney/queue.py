"""The queue's contract: one typed method per script. Every script does one guarded, atomic thing.

Events: the log is the stream `:tokens:<id>` with ids `<seq>-0` and one field `e`; the same bytes go to
the channel of the same name, one message per event. `:ctl:<worker>` carries
`{"type":"cancel","id":…,"fence":…}` to the owner of a cancelled job, and `:call` the band of a job that goes before
bulk to every worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, cast

import orjson

from jitney import folding, replies, scripts
from jitney.calls import milliseconds, slices
from jitney.connection import Redis
from jitney.deadletters import DeadLetters
from jitney.keys import Fence, JobId
from jitney.records import (
    Append,
    Backlog,
    Cancelled,
    Claimed,
    Credit,
    DeadJob,
    Delivery,
    Ending,
    Enqueued,
    Entry,
    FinishOutcome,
    Held,
    JobState,
    JobStatus,
    Limits,
    Refusal,
    ReleaseOutcome,
    RetryOutcome,
    Swept,
    pack_ids,
    unpack_ids,
)
from jitney.upkeep import Upkeep

__all__ = [
    "Append",
    "Backlog",
    "Cancelled",
    "Claimed",
    "Credit",
    "DeadJob",
    "Delivery",
    "Ending",
    "Enqueued",
    "Entry",
    "FinishOutcome",
    "Held",
    "JobState",
    "JobStatus",
    "Limits",
    "Queue",
    "Refusal",
    "ReleaseOutcome",
    "RetryOutcome",
    "Swept",
    "pack_ids",
    "unpack_ids",
]

RENEW_SLICE: Final = 256
APPEND_SLICE: Final = 64
"""Longer calls would hold up the server: 64 jobs take about a third of a millisecond."""

LOG_PAGE: Final = 256
"""Events that a reader takes from a log in one call."""


class Queue(DeadLetters, Upkeep):
    """One queue over one client. Methods may be awaited concurrently.

    What a client calls (`enqueue`, `cancel`, `requeue_dead`, `drop_dead`) raises QueueUnavailable when Redis does
    not answer or refuses to write; the other methods let its own errors through, because a worker decides
    differently on each.
    """

    # --- what a client does -------------------------------------------------------------------------------

    async def cancel(self, id: JobId, *, keep_s: int | None = None) -> Cancelled:
        """End a job now, in whatever state it is. keep_s: life of the result, None = as the job asked.

        Raises QueueUnavailable.
        """
        keys = [self.keys.counts, self.keys.job(id), self.keys.tokens(id)]
        reply = await self._run_or_unavailable("cancel", keys, [id, "" if keep_s is None else milliseconds(keep_s)])
        outcome = cast(Literal["cancelled", "done", "notfound"], replies.text(reply[0]))
        return Cancelled(outcome, replies.text(reply[1]) if len(reply) > 1 else "")

    async def status(self, id: JobId) -> JobStatus | None:
        """The job's record; None if there is none (never was, or its result's life is over)."""
        fields: Any = await self.redis.hgetall(self.keys.job(id))
        return replies.job_status(id, fields) if fields else None

    async def job_of_key(self, tenant: str, idempotency_key: str) -> JobId | None:
        """The job that a tenant's idempotency key answers for; None if there is none. Its record may be gone."""
        known: Any = await self.redis.get(self.keys.idempotency(tenant, idempotency_key))
        return None if known is None else JobId(replies.text(known).partition(" ")[0])

    async def read_log(self, id: JobId, after_seq: int = 0, *, count: int = LOG_PAGE) -> list[bytes] | None:
        """At most `count` events after `after_seq`, in order; None if neither log nor record exists."""
        return await folding.read_log(self.redis, self.keys, id, after_seq, count)

    # --- what a worker does -------------------------------------------------------------------------------

    async def claim(
        self,
        worker: str,
        nonce: str,
        *,
        credit: int | Credit,
        fingerprint: str,
        lease_s: float,
        scan: bool = True,
        keep_s: int = 3_600,
        max_strikes: int = 3,
        max_tries: int = 10,
    ) -> Claimed:
        """Take up to `credit` jobs, most urgent bands first. nonce: never used before, for fences are made from it.

        A suspect (strikes > 0) is the only job of its claim: what else there is waits for the next one.
        scan: also look for expired leases and delayed jobs. keep_s: life of what ends here and named none.
        Not to be sent twice: after an error, `adopt` tells what was handed out.
        """
        credits = Credit.of(credit) if isinstance(credit, int) else credit
        arguments: list[scripts.Argument] = [
            worker,
            nonce,
            credits.interactive,
            fingerprint,
            milliseconds(lease_s),
            int(scan),
            milliseconds(keep_s),
            max_strikes,
            max_tries,
            credits.standard,
            credits.bulk,
        ]
        return replies.claimed(await self._run("claim", [self.keys.counts], arguments))

    async def adopt(self, worker: str, nonce: str) -> tuple[Delivery, ...]:
        """Deliveries of the worker's last claim that are still its own, if that claim had this nonce."""
        reply = await self._run("adopt", [self.keys.counts], [worker, nonce])
        return tuple(replies.delivery(row) for row in reply)

    async def renew(self, lease_s: float, held: Sequence[Held]) -> set[JobId]:
        """Extend the leases of `held` to `lease_s` from now. Returns the jobs that another claim owns or that ended."""
        calls = [
            self._call(
                [self.keys.counts],
                [milliseconds(lease_s), *(word for job in part for word in (job.id, job.fence, job.band))],
            )
            for part in slices(held, RENEW_SLICE)
        ]
        lost = await scripts.run_each(self.redis, scripts.load("renew"), calls)
        return {JobId(replies.text(id)) for reply in lost for id in reply}

    async def append(self, appends: Sequence[Append]) -> list[Refusal]:
        """Write the events of one step of many jobs, each job on its own. Returns those refused.

        May be repeated after a lost reply: what had been written is then not reported.
        """
        parts = list(slices(appends, APPEND_SLICE))
        answers = await scripts.run_each(
            self.redis, scripts.load("append"), [self._append_call(part) for part in parts]
        )
        return [
            refusal for part, reply in zip(parts, answers, strict=True) for refusal in replies.refusals(part, reply)
        ]

    async def finish(self, ending: Ending) -> FinishOutcome:
        """End a job with its last events. May be repeated after a lost reply."""
        keys = [self.keys.counts, self.keys.job(ending.id), self.keys.tokens(ending.id)]
        arguments: list[scripts.Argument] = [
            ending.id,
            ending.fence,
            ending.first_seq,
            ending.num_tokens,
            "" if ending.num_prompt_tokens is None else ending.num_prompt_tokens,
            ending.reason,
            "" if ending.keep_s is None else milliseconds(ending.keep_s),
            ending.dead_reason or "",
            *ending.events,
        ]
        reply = await self._run("finish", keys, arguments)
        outcome = replies.text(reply[0])
        if outcome == "done" and replies.text(reply[2]) == ending.fence:
            return "ok"
        return cast(FinishOutcome, outcome)

    async def release(self, id: JobId, fence: Fence, *, delay_s: float = 0.0) -> ReleaseOutcome:
        """Hand a job back, to be claimed at once or after `delay_s`. Burns no attempt."""
        reply = await self._run("release", [self.keys.counts, self.keys.job(id)], [id, fence, milliseconds(delay_s)])
        return cast(ReleaseOutcome, replies.text(reply[0]))

    async def retry(
        self,
        id: JobId,
        fence: Fence,
        *,
        delay_s: float = 0.0,
        keep_s: int = 3_600,
        max_strikes: int = 3,
        max_tries: int = 10,
        error: dict[str, Any] | None = None,
    ) -> RetryOutcome:
        """Hand a job back after a failure. The attempt counts; the last one ends the job with `error` and buries it."""
        keys = [self.keys.counts, self.keys.job(id), self.keys.tokens(id)]
        last_error = b"" if error is None else orjson.dumps(error)
        arguments: list[scripts.Argument] = [
            id,
            fence,
            milliseconds(delay_s),
            milliseconds(keep_s),
            max_strikes,
            max_tries,
            last_error,
        ]
        return cast(RetryOutcome, replies.text((await self._run("retry", keys, arguments))[0]))

    async def wait_bell(self, blocking: Redis, fingerprint: str, timeout_s: float) -> bool:
        """True as soon as something may be claimable, False after `timeout_s`. `blocking`: `connect_blocking`'s."""
        bells = [self.keys.bell_for(fingerprint), self.keys.bell]
        return await blocking.blpop(bells, timeout=timeout_s) is not None

    def _append_call(self, appends: Sequence[Append]) -> scripts.Call:
        keys, arguments = [self.keys.counts], list[scripts.Argument]()
        for append in appends:
            keys += (self.keys.job(append.id), self.keys.tokens(append.id))
            arguments += (
                append.fence,
                append.first_seq,
                append.num_tokens,
                "" if append.num_prompt_tokens is None else append.num_prompt_tokens,
                append.prompt_ids or b"",
                len(append.events),
                *append.events,
            )
        return self._call(keys, arguments)
