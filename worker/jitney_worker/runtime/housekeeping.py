"""What every worker does for its queue, once per lease or sooner: whoever is alive keeps it in order."""

from __future__ import annotations

import asyncio
from typing import Final

import redis.exceptions

from jitney.logs import logger
from jitney.queue import Queue
from jitney_worker.runtime.server_watch import ServerWatch
from jitney_worker.settings import WorkerSettings

MAX_BETWEEN_ROUNDS_S: Final = 15.0
"""Each round says that this build lives, and jobs wait for one that is silent for a minute: a long lease must not
make it look dead."""


class Housekeeping:
    """What no claim comes across, the logs of jobs that ended long ago, and the server's own settings."""

    def __init__(self, queue: Queue, fingerprint: str, watch: ServerWatch, settings: WorkerSettings) -> None:
        self._queue = queue
        self._fingerprint = fingerprint
        self._watch = watch
        self._settings = settings.worker
        self._every_s = min(settings.lease.duration_s, MAX_BETWEEN_ROUNDS_S)
        self._log = logger(part="janitor", queue=queue.name)

    async def run(self) -> None:
        """For ever."""
        while True:
            try:
                await self._queue.janitor(
                    fingerprint=self._fingerprint,
                    resume_wait_s=self._settings.resume_wait_s,
                    resume_mismatch=self._settings.resume_mismatch,
                )
                await self._queue.fold_ended()
                await self._watch.look()
            except (redis.exceptions.RedisError, OSError) as error:
                self._log.warning("janitor_failed", error=type(error).__name__)
            await asyncio.sleep(self._every_s)
