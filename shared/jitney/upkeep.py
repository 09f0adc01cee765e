"""What keeps a queue in order, and what shows its state as a whole."""

from __future__ import annotations

import secrets
from typing import Final, Literal

from redis.exceptions import ResponseError

from jitney import folding, replies, scripts
from jitney.calls import ScriptedQueue, milliseconds
from jitney.keys import JobId
from jitney.records import Backlog, Swept

STREAM_TTL_S: Final = 600.0
"""Life of an ended job's log as a stream; after it, the log is one compressed string."""


class Upkeep(ScriptedQueue):
    """The part of `Queue` that no single job needs."""

    async def janitor(
        self,
        *,
        fingerprint: str = "",
        resume_wait_s: float = 60.0,
        resume_mismatch: Literal["fail", "continue"] = "fail",
        keep_s: int = 3_600,
        slice_size: int = 64,
    ) -> Swept:
        """What no claim comes across: delayed jobs, deadlines in a jam, orphans of a build, counts.

        Every worker calls it once per lease with its own `fingerprint`, which also says that this build lives.
        """
        arguments: list[scripts.Argument] = [
            slice_size,
            milliseconds(resume_wait_s),
            resume_mismatch,
            milliseconds(keep_s),
            fingerprint,
        ]
        return Swept(*map(int, await self._run("janitor", [self.keys.counts], arguments)))

    async def repair(self, id: JobId) -> str:
        """Put a job into the place its state names; 'ok' when it is there, otherwise what was done."""
        return replies.text(await self._run("repair", [self.keys.counts, self.keys.job(id)], [id]))

    async def fold(self, id: JobId) -> str:
        """Replace the log of an ended job by one compressed string: 'ok', 'changed' or 'gone'."""
        payloads = await folding.read_stream(self.redis, self.keys, id)
        keys = [self.keys.counts, self.keys.job(id), self.keys.tokens(id)]
        return replies.text(await self._run("fold", keys, [id, len(payloads), folding.pack_log(payloads)]))

    async def fold_ended(self, older_than_s: float = STREAM_TTL_S, limit: int = 64) -> int:
        """Fold up to `limit` logs of jobs that ended more than `older_than_s` ago. Returns how many were folded."""
        seconds, _ = await self.redis.time()
        newest = milliseconds(seconds - older_than_s)
        ids = await self.redis.zrange(self.keys.ended, "-inf", newest, byscore=True, offset=0, num=limit)
        return [await self._fold_or_forget(JobId(replies.text(id))) for id in ids].count("ok")

    async def _fold_or_forget(self, id: JobId) -> str:
        """A log that is no stream would stop all that ended after it from being folded."""
        try:
            return await self.fold(id)
        except ResponseError as error:
            if not str(error).startswith("WRONGTYPE"):
                raise
            await self.redis.zrem(self.keys.ended, id)
            return "gone"

    async def counts(self) -> tuple[int, int]:
        """Waiting jobs, and their prompt tokens."""
        jobs, tokens = await self.redis.hmget(self.keys.counts, "jobs", "tok")
        return int(jobs or 0), int(tokens or 0)

    async def backlog(self) -> Backlog:
        """What waits, and how long it will take at the measured rate."""
        pipeline = self.redis.pipeline(transaction=False)
        pipeline.hmget(self.keys.counts, "jobs", "tok")
        pipeline.hmget(self.keys.virtual_time, "avg", "rate")
        counts, pace = await pipeline.execute()
        return replies.backlog(*counts, *pace)

    async def epoch(self) -> str:
        """Identity of the data set: another value, and everything that was known of this queue is lost.

        Set by whoever asks first. One short command: a worker may ask with every renewal.
        """
        fresh = secrets.token_hex(8)
        known = await self.redis.set(self.keys.epoch, fresh, nx=True, get=True)
        return fresh if known is None else replies.text(known)
