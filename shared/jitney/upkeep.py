"""What keeps a queue in order, and what shows its state as a whole."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final, Literal

from redis.exceptions import ResponseError

from jitney import folding, replies, scripts
from jitney.calls import ScriptedQueue, is_wrong_kind, milliseconds, slices
from jitney.keys import JobId
from jitney.records import Backlog, Swept

STREAM_TTL_S: Final = 600.0
"""Life of an ended job's log as a stream; after it, the log is one compressed string."""

SWEEP_PAGES: Final = 16
SWEEP_PAGE: Final = 512
"""8,192 keys a round: two milliseconds of the server's time, and a pass over a hundred thousand keys in 13 rounds."""

REPAIR_SLICE: Final = 64
SWEEP_REST_MS: Final = 3_600_000
"""A cursor that nobody has moved for so long is forgotten: an empty queue leaves nothing behind."""

JANITOR_SLICES: Final = 64
"""At most in one round: four thousand jobs that are late at once are told so at once, each slice in a short call."""

TELLING: Final = frozenset(("job", "body", "ids", "tokens", "jobs", "held"))


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
        """What no claim comes across: delayed jobs, deadlines in a jam, orphans of a build, counts, damage.

        Every worker calls it once per lease or sooner, with its own `fingerprint`: this build lives.
        Costs one script (more only while each has a whole slice to do), and a `sweep` of one slice of the key space.
        """
        arguments: list[scripts.Argument] = [
            slice_size,
            milliseconds(resume_wait_s),
            resume_mismatch,
            milliseconds(keep_s),
            fingerprint,
        ]
        swept = Swept()
        for _ in range(JANITOR_SLICES):
            *numbers, is_cut = map(int, await self._run("janitor", [self.keys.counts], arguments))
            swept = swept.and_then(Swept(*numbers))
            if not is_cut:
                break
        return replace(swept, num_repaired=await self.sweep(keep_s=keep_s))

    async def sweep(self, *, keep_s: int = 3_600, max_pages: int = SWEEP_PAGES) -> int:
        """Look at the next slice of the key space, and put right what somebody has deleted or overwritten there.

        A job goes back to the place its state names, at the end of the line; one that cannot run any more, because
        its body or its record is gone, ends as `failed` (`job_lost`). Returns the number of keys that needed it.
        The slice: at most `max_pages` SCANs over SWEEP_PAGE keys of all queues, ended where a pass over all of them
        ends. The cursor is kept in Redis, so that all workers together make the passes.
        """
        stored = await self.redis.get(self.keys.sweep)
        cursor = int(stored) if stored is not None and stored.isdigit() and len(stored) < 20 else 0
        num_repaired = 0
        for _ in range(max_pages):
            cursor, names = await self.redis.scan(cursor, match=f"{self.keys.prefix}:*", count=SWEEP_PAGE)
            done = await self._repair(self._telling(names), keep_s)
            num_repaired += sum(outcome != b"gone" for _, outcome in done)
            if cursor == 0:
                break
        if cursor:
            await self.redis.set(self.keys.sweep, cursor, px=SWEEP_REST_MS)
        elif stored is not None:
            await self.redis.delete(self.keys.sweep)
        return num_repaired

    async def repair(self, id: JobId) -> str:
        """Put a job into the place its state names; 'ok' when it is there, otherwise what was done."""
        done = await self._repair([f"job:{id}"], 3_600)
        return replies.text(done[0][1]) if done else "ok"

    def _telling(self, names: Iterable[bytes | str]) -> list[str]:
        """Those of the keys, without their prefix, from which a repair can begin."""
        suffixes = (replies.text(name).removeprefix(f"{self.keys.prefix}:") for name in names)
        return [suffix for suffix in suffixes if suffix.partition(":")[0] in TELLING]

    async def _repair(self, names: Sequence[str], keep_s: int) -> list[list[bytes]]:
        """What was done: pairs of name and outcome."""
        calls = [self._call([self.keys.counts], [milliseconds(keep_s), *part]) for part in slices(names, REPAIR_SLICE)]
        answers = await scripts.run_each(self.redis, scripts.load("repair"), calls)
        return [pair for answer in answers for pair in answer]

    async def fold(self, id: JobId) -> str:
        """Replace the log of an ended job by one compressed string: 'ok', 'changed' or 'gone'."""
        payloads = await folding.read_stream(self.redis, self.keys, id)
        # A log with log probabilities is megabytes long: compressing it would hold up everything else on this loop.
        packed = await asyncio.to_thread(folding.pack_log, payloads)
        keys = [self.keys.counts, self.keys.job(id), self.keys.tokens(id)]
        return replies.text(await self._run("fold", keys, [id, len(payloads), packed]))

    async def fold_ended(self, older_than_s: float = STREAM_TTL_S, limit: int = 64) -> int:
        """Fold up to `limit` logs of jobs that ended more than `older_than_s` ago. Returns how many were folded."""
        seconds, _ = await self.redis.time()
        newest = milliseconds(seconds - older_than_s)
        ids = await self.redis.zrange(self.keys.ended, "-inf", newest, byscore=True, offset=0, num=limit)
        return [await self._fold_or_forget(JobId(replies.text(id))) for id in ids].count("ok")

    async def _fold_or_forget(self, id: JobId) -> str:
        """A log that somebody else has written to would stop all that ended after it from being folded."""
        try:
            outcome = await self.fold(id)
        except ResponseError as error:
            if not is_wrong_kind(error):
                raise
            outcome = "changed"
        if outcome == "changed":
            await self.redis.zrem(self.keys.ended, id)
        return outcome

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
