"""Dead letters: jobs that were given up on, kept with their reason to be looked at, queued anew or dropped."""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final

import orjson

from jitney import replies
from jitney.calls import or_unavailable
from jitney.entrance import Entrance, new_job_arguments
from jitney.errors import InvalidJob, JobNotFound
from jitney.keys import JobId, new_job_id, queue_of
from jitney.messages import MAX_BODY_BYTES, JobSpec
from jitney.records import DeadJob, Entry, Limits
from jitney.submission import entry_of

PAGE: Final = 200
BYTES_PER_TOKEN: Final = 4.0
"""For a job whose record, and its true prompt with it, is gone."""

_ENTRY_ID = re.compile(r"\d{1,20}-\d{1,20}")


@dataclass(frozen=True, slots=True)
class _Record:
    """What Redis still has of a buried job."""

    body: bytes | None
    num_prompt_tokens: int
    now: float


class DeadLetters(Entrance):
    """The part of `Queue` that deals with buried jobs. A buried job is named by its id or by its entry's."""

    async def dead(self, *, count: int = 100) -> list[DeadJob]:
        """The youngest buried entries, youngest first."""
        entries: Any = await self.redis.xrevrange(self.keys.dead, count=count)
        return [replies.dead_job(entry_id, fields) for entry_id, fields in entries]

    async def count_dead(self) -> int:
        return int(await self.redis.xlen(self.keys.dead))

    async def each_dead(self) -> AsyncIterator[DeadJob]:
        """All buried entries, oldest first. They may be requeued or dropped meanwhile."""
        start = b"-"
        while True:
            entries: Any = await self.redis.xrange(self.keys.dead, min=start, count=PAGE)
            for entry_id, fields in entries:
                yield replies.dead_job(entry_id, fields)
            if len(entries) < PAGE:
                return
            start = b"(" + entries[-1][0]

    async def find_dead(self, id: str) -> DeadJob:
        """The buried entry of that job id or entry id. Raises JobNotFound."""
        if _ENTRY_ID.fullmatch(id):
            entries: Any = await self.redis.xrange(self.keys.dead, min=id, max=id)
            for entry_id, fields in entries:
                return replies.dead_job(entry_id, fields)
        else:
            async for dead in self.each_dead():
                if dead.id == id:
                    return dead
        raise JobNotFound(f"nothing is buried under {id[:80]!r} in queue {self.name}")

    async def dead_body(self, dead: DeadJob) -> bytes | None:
        """The job as it was asked for; None when it is not there (any more)."""
        if not dead.id:
            return None
        body: Any = await self.redis.get(self.keys.body(dead.id))
        return None if body is None else bytes(body)

    async def requeue_dead(self, id: str, limits: Limits = Limits()) -> JobId:  # noqa: B008 (frozen)
        """Queue a buried job anew, as another job; returns that one's id. The buried entry is gone then.

        Its body is that of the old one, seed included, with `of` = the old id; a deadline that has passed is
        left out. Its idempotency key answers for the new job.
        Raises JobNotFound, InvalidJob for what was never a job, Overloaded, QueueUnavailable.
        """
        dead = await self.find_dead(id)
        if not _is_job_of(dead.id, self.name):
            raise InvalidJob(f"entry {dead.entry_id} names no job and cannot be queued anew: drop it", param="id")
        record = await self._record(dead)
        if record.body is None:
            raise InvalidJob(f"the body of {dead.id} is gone: it cannot be queued anew, drop it", param="id")
        entry = _entry_anew(dead, record.body, record, new_job_id(self.name))
        keys = [self.keys.counts, self.keys.job(entry.id), self.keys.tokens(entry.id), self.keys.dead]
        arguments = [*new_job_arguments(entry, limits), dead.entry_id, dead.id]
        reply = await self._run_or_unavailable("requeue", keys, arguments)
        if replies.text(reply[0]) == "gone":
            raise JobNotFound(f"{dead.id} was requeued or dropped by somebody else")
        return replies.enqueued(reply).id

    async def drop_dead(self, id: str) -> bool:
        """Forget a buried job. False if somebody else was faster. Raises JobNotFound, QueueUnavailable."""
        dead = await self.find_dead(id)
        keys = [self.keys.counts, self.keys.dead]
        return replies.text(await self._run_or_unavailable("drop", keys, [dead.entry_id, dead.id])) == "ok"

    async def _record(self, dead: DeadJob) -> _Record:
        with or_unavailable():
            pipeline = self.redis.pipeline(transaction=False)
            pipeline.get(self.keys.body(dead.id))
            pipeline.hget(self.keys.job(dead.id), "pt")
            pipeline.time()
            body, num_prompt_tokens, (seconds, _) = await pipeline.execute()
        return _Record(body, int(num_prompt_tokens or 0), float(seconds))


def _is_job_of(id: str, queue: str) -> bool:
    try:
        return queue_of(id) == queue
    except InvalidJob:
        return False


def _entry_anew(dead: DeadJob, body: bytes, record: _Record, id: JobId) -> Entry:
    """Raises InvalidJob for a body that no worker could read either."""
    try:
        spec = JobSpec.decode(body)
    except InvalidJob as error:
        raise InvalidJob(f"{dead.id} cannot be queued anew: {error}", param="id", code=error.code) from None
    # The JSON itself and not the spec: what a newer process wrote into it stays as it is.
    fields = orjson.loads(body) | {"of": dead.id}
    if spec.deadline is not None and spec.deadline <= record.now:
        del fields["deadline"]
        spec = spec.model_copy(update={"deadline": None})
    anew = orjson.dumps(fields, option=orjson.OPT_SORT_KEYS)
    if len(anew) > MAX_BODY_BYTES:
        raise InvalidJob(f"{dead.id} cannot be queued anew: with the old id it has {len(anew)} bytes", param="id")
    return entry_of(
        spec,
        job_id=id,
        body=anew,
        digest=hashlib.sha256(anew).hexdigest(),
        num_prompt_tokens=record.num_prompt_tokens or spec.estimate(BYTES_PER_TOKEN),
    )
