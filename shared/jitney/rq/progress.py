"""What held jobs say of themselves on their way: written into RQ's records at a bounded rate."""

from __future__ import annotations

import asyncio
from typing import Final

from redis.exceptions import RedisError
from rq.job import Job

from jitney.logs import logger

INTERVAL_S: Final = 1.0

_SAVE_IF_THERE: Final = """
if redis.call('EXISTS', KEYS[1]) == 1 then redis.call('HSET', KEYS[1], 'meta', ARGV[1]) end
"""

_log = logger(part="rq")


class Progress:
    """The metas that have changed and are not stored yet. Belongs to one event loop."""

    def __init__(self, interval_s: float = INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._changed: dict[str, Job] = {}
        self._storing = asyncio.Lock()

    def note(self, job: Job) -> None:
        """`job.meta` has changed."""
        self._changed[job.id] = job

    async def run(self) -> None:
        """Store what has changed, again and again."""
        while True:
            await asyncio.sleep(self._interval_s)
            async with self._storing:
                jobs = list(self._changed.values())
                self._changed.clear()
                await self._store(jobs)

    async def settle(self, job: Job) -> None:
        """Store the last word of a job that ends. Nothing of it is written after this: its record may be gone soon."""
        async with self._storing:
            last = self._changed.pop(job.id, None)
            await self._store([] if last is None else [last])

    async def _store(self, jobs: list[Job]) -> None:
        """In a thread: RQ's own calls block. What cannot be stored is let go: more will follow, or the result."""
        if jobs:
            try:
                await asyncio.to_thread(_save_metas, jobs)
            except (RedisError, OSError) as error:
                _log.warning("meta_not_stored", num_jobs=len(jobs), error=str(error))


def _save_metas(jobs: list[Job]) -> None:
    """All in one round trip. As `Job.save_meta`, but a record that was deleted meanwhile stays away."""
    with jobs[0].connection.pipeline(transaction=False) as pipeline:
        for job in jobs:
            pipeline.eval(_SAVE_IF_THERE, 1, job.key, job._serialize_meta())
        pipeline.execute()
