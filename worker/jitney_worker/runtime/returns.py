"""Jobs that go back into the queue, for a peer or for us: after a fault of ours, or of our own will."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterable

import redis.exceptions

from jitney.errors import JitneyError
from jitney.logs import logger
from jitney.queue import Held, Queue
from jitney.retrying import backoff_s
from jitney_worker.runtime.aboard import Aboard
from jitney_worker.runtime.meters import Meters
from jitney_worker.runtime.running import RunningJob
from jitney_worker.settings import WorkerSettings

_AWAY = (redis.exceptions.RedisError, OSError)


class Returns:
    """A lease that cannot be given back now, because Redis is away, runs out by itself."""

    def __init__(self, settings: WorkerSettings, queue: Queue, aboard: Aboard, meters: Meters) -> None:
        self._limits = settings.worker
        self._queue = queue
        self._aboard = aboard
        self._meters = meters
        self._rng = random.Random()
        self._log = logger(part="returns", queue=queue.name)

    async def retry(self, jobs: Iterable[RunningJob], error: JitneyError) -> None:
        """With a pause. The attempt counts; a job that has had too many of them ends, and is buried."""
        await self._retry([(job, backoff_s(job.spec.retry, job.delivery.tries, self._rng)) for job in jobs], error)

    async def retry_now(self, jobs: Iterable[RunningJob], error: JitneyError) -> None:
        """As `retry`, but a peer may have them at once: it was us who could not go on."""
        await self._retry([(job, 0.0) for job in jobs], error)

    async def release(self, helds: Iterable[Held]) -> None:
        """At once. What is not in their logs yet will be computed again, and the attempt does not count."""
        helds = list(helds)
        if helds:
            self._log.info("jobs_released", num_jobs=len(helds))
        for held in helds:
            self._meters.left(held.fence, "released")
            self._aboard.forget(held.fence)
        await asyncio.gather(*map(self._release_one, helds))

    async def _retry(self, delays: list[tuple[RunningJob, float]], error: JitneyError) -> None:
        for job, _ in delays:
            self._meters.left(job.fence, "retried")
            self._aboard.forget(job.fence)
        await asyncio.gather(*(self._retry_one(job, delay_s, error) for job, delay_s in delays))

    async def _release_one(self, held: Held) -> None:
        with contextlib.suppress(*_AWAY):
            await self._queue.release(held.id, held.fence)

    async def _retry_one(self, job: RunningJob, delay_s: float, error: JitneyError) -> None:
        with contextlib.suppress(*_AWAY):
            outcome = await self._queue.retry(
                job.id,
                job.fence,
                delay_s=delay_s,
                keep_s=job.keep_s,
                max_strikes=self._limits.max_attempts,
                max_tries=self._limits.max_tries,
                error=error.wire(),
            )
            if outcome == "dead":
                self._meters.buried()
            event = "job_buried" if outcome == "dead" else "job_retried"
            self._log.warning(
                event, job=job.id, attempt=job.delivery.tries, error=str(error), delay_s=round(delay_s, 3)
            )
