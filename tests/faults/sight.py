"""What the queue and the workers say of themselves, past every proxy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from redis.exceptions import RedisError
from tests.faults.scene import Scene

from jitney.keys import BANDS, JobId
from jitney.queue import JobStatus
from jitney.replies import text
from jitney.workers import WorkerView, list_workers

REST_S = 120.0


class Sight(Scene):
    """The questions that tests ask."""

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
        jobs = list(self.jobs)
        async with self.redis.pipeline(transaction=False) as pipe:
            for job_id in jobs:
                pipe.hmget(self.keys.job(job_id), "state", "owner")
            places = await pipe.execute()
        return {
            job_id
            for job_id, (state, owner) in zip(jobs, places, strict=True)
            if state == b"running" and text(owner) in names
        }

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
                job_id = text(member)
                seq, claimed_at = await self.redis.hmget(self.keys.job(job_id), "seq", "cseq")
                if int(seq or 0) > int(claimed_at or 0):
                    changed = await self.redis.zadd(self.keys.leases(band), {job_id: 1}, xx=True, ch=True)
                    num_expired += int(changed or 0)
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

    def num_sampled(self) -> int:
        """Tokens computed by all workers that ever lived here."""
        return sum(row[0] for row in self._tallies())

    def num_late_writes(self) -> int:
        """Jobs whose write was refused because another claim owned them by then, or they had ended."""
        lines = [line.split() for worker in self.workers.values() for line in worker.said("refused ")]
        return sum(int(words[1]) for words in lines if words[2] in ("fence", "done", "gone"))

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

        await self.until(at_rest, f"the queue at rest: {await self.leftovers(*spared)}", patience_s=REST_S)

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
        return found + ([f"{int(waiting)} jobs counted as waiting"] if waiting and int(waiting) else [])
