"""What the queue and the workers say of themselves, past every proxy."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError
from tests.faults.children import PATIENCE_S
from tests.faults.ledger import Ledger

from jitney.connection import Redis
from jitney.keys import BANDS, JobId, Keys
from jitney.queue import JobStatus, Queue
from jitney.workers import WorkerView, list_workers

POLL_S = 0.02


class Sight:
    """The questions that tests ask. jobs: every job id with the name of its request."""

    queue_name: str
    folder: Path
    ledger: Ledger
    jobs: dict[str, str]

    @property
    def redis(self) -> Redis:
        raise NotImplementedError

    @property
    def keys(self) -> Keys:
        return Keys(self.queue_name)

    @property
    def queue(self) -> Queue:
        return Queue(self.redis, self.queue_name)

    async def until(self, wanted: Callable[[], Awaitable[Any]], what: str, patience_s: float = PATIENCE_S) -> Any:
        """Ask until the answer is true; what it is. Errors of a server that is away count as no."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + patience_s
        while True:
            with contextlib.suppress(OSError, RedisError):
                if answer := await wanted():
                    return answer
            assert clock() < deadline, f"not within {patience_s:g} s: {what}"
            await asyncio.sleep(POLL_S)

    async def status(self, job_id: str) -> JobStatus:
        status = await self.queue.status(JobId(job_id))
        assert status is not None, f"no record of {job_id}"
        return status

    async def are_done(self, jobs: Iterable[str]) -> bool:
        return all([(await self.status(job_id)).state == "done" for job_id in jobs])

    async def statuses(self) -> dict[str, JobStatus]:
        """Of those jobs that have a record."""
        found = {job_id: await self.queue.status(JobId(job_id)) for job_id in self.jobs}
        return {job_id: status for job_id, status in found.items() if status is not None}

    async def num_unfinished(self) -> int:
        return sum(status.state != "done" for status in (await self.statuses()).values())

    async def owned_by(self, *names: str) -> set[str]:
        """Jobs that these workers hold, as the queue sees it."""
        found = set()
        for job_id in self.jobs:
            state, owner = await self.redis.hmget(self.keys.job(job_id), "state", "owner")
            if state == b"running" and owner is not None and owner.decode() in names:
                found.add(job_id)
        return found

    async def all_elsewhere(self, jobs: Iterable[str], owner: str) -> bool:
        """Whether none of these jobs is this worker's any more: another one's, or ended."""
        return not (set(jobs) & await self.owned_by(owner))

    async def expire_leases(self) -> int:
        """Leases over, now, of all jobs that have said something under them; how many.

        Of the others not: a job that lost three leases before it said a word would rightly be given up.
        """
        num_expired = 0
        for band in BANDS:
            for member in await self.redis.zrange(self.keys.leases(band), 0, -1):
                job_id = bytes(member).decode()
                seq, claimed_at = await self.redis.hmget(self.keys.job(job_id), "seq", "cseq")
                if int(seq or 0) > int(claimed_at or 0):
                    num_expired += int(await self.redis.zadd(self.keys.leases(band), {job_id: 1}, xx=True, ch=True))
        self.ledger.fault(f"{num_expired} leases expired")
        return num_expired

    async def leases_are_over(self) -> bool:
        """Whether no job is under a lease that is still good."""
        seconds, microseconds = await self.redis.time()
        now_ms = seconds * 1_000 + microseconds // 1_000
        good = [await self.redis.zcount(self.keys.leases(band), now_ms, "+inf") for band in BANDS]
        return sum(good) == 0

    async def view_says(self, name: str, state: str) -> bool:
        return any(view.id == name and view.state == state for view in await self.views())

    async def num_takeovers(self) -> int:
        """Claims beyond the first of each job: take-overs, and hand-overs that were counted."""
        return sum(max(0, status.tries - 1) for status in (await self.statuses()).values())

    async def views(self) -> list[WorkerView]:
        return await list_workers(self.redis, self.queue_name)

    async def places(self) -> dict[str, int]:
        """Where unfinished jobs are, for a message."""
        with contextlib.suppress(OSError, RedisError):
            pipe = self.redis.pipeline(transaction=False)
            for band in BANDS:
                pipe.zcard(self.keys.leases(band))
            pipe.zcard(self.keys.later)
            pipe.hget(self.keys.counts, "jobs")
            answers = await pipe.execute()
            return dict(zip((*BANDS, "later", "waiting"), (int(a or 0) for a in answers), strict=True))
        return {}

    def num_steps(self, name: str) -> int:
        """Steps that a worker has computed."""
        path = self.folder / f"{name}.tally"
        return len(path.read_text().splitlines()) if path.exists() else 0

    async def more_events(self, count: int) -> None:
        """Wait until the readers have been told so many more events."""
        wanted = sum(self.progress.values()) + count
        await self.told(lambda: sum(self.progress.values()) >= wanted, f"{count} more events")

    def num_sampled(self) -> int:
        """Tokens computed by all workers that ever lived here."""
        return sum(row[0] for row in self._tallies())

    def num_preemptions(self) -> int:
        return sum(row[2] for row in self._tallies())

    def _tallies(self) -> Iterable[tuple[int, ...]]:
        for path in self.folder.glob("*.tally"):
            for line in path.read_text().splitlines():
                yield tuple(map(int, line.split()))

    async def rests(self, *spared: str) -> None:
        """After a run: nothing waits, nothing is held, every block is free, no job left anything but its record."""

        async def at_rest() -> bool:
            views = await self.views()
            idle = all(view.num_running == 0 and view.num_free_blocks == view.num_blocks for view in views)
            return idle and await self.leftovers(*spared) == []

        await self.until(at_rest, f"the queue at rest: {await self.leftovers(*spared)}", patience_s=20)

    async def leftovers(self, *spared: str) -> list[str]:
        """Keys of the queue that only a job that has not ended may own. spared: words of keys that may be there."""
        ended_own = ("job", "tokens", "result", "idem")
        of_queue = (
            "bell",
            "counts",
            "vt",
            "usage",
            "ended",
            "workers",
            "worker",
            "last",
            "fps",
            "idle",
            "epoch",
            "dead",
        )
        found = []
        async for key in self.redis.scan_iter(match=f"{self.keys.prefix}:*", count=1_000):
            word = key.decode().removeprefix(f"{self.keys.prefix}:").split(":")[0]
            if word not in (*ended_own, *of_queue, *spared):
                found.append(key.decode())
        waiting = await self.redis.hget(self.keys.counts, "jobs")
        return found + ([f"{waiting.decode()} jobs counted as waiting"] if int(waiting or 0) else [])
