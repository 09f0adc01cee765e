"""Writes what jobs gained: one append for the whole batch, one finish for each job that ended.

A call that failed is repeated as it was: the scripts recognise it. Only the loss of the lease ends that.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import redis.exceptions

from jitney.keys import JobId
from jitney.logs import logger
from jitney.queue import Append, Ending, Queue

MAX_BACKOFF_S = 1.0

_TRANSIENT = (redis.exceptions.RedisError, OSError)


class Publisher:
    """Hands events to Redis and reports the jobs that are not ours any more.

    is_held: whether a job's lease is still believed good; what is no longer held is not written.
    """

    def __init__(self, queue: Queue, *, is_held: Callable[[JobId], bool]) -> None:
        self._queue = queue
        self._is_held = is_held
        self._log = logger(part="publisher", queue=queue.name)

    async def write(self, appends: list[Append], endings: list[Ending]) -> set[JobId]:
        """Write all of it; the ids that were refused (another owner, or the job is gone)."""
        if not endings:
            return await self._append(appends)
        refused, outcomes = await asyncio.gather(
            self._append(appends), asyncio.gather(*(self._finish(ending) for ending in endings))
        )
        return refused | {ending.id for ending, ok in zip(endings, outcomes, strict=True) if not ok}

    async def _append(self, appends: list[Append]) -> set[JobId]:
        refused: set[JobId] = set()
        failures = 0
        while appends:
            try:
                refusals = {refusal.id: refusal for refusal in await self._queue.append(appends)}
            except _TRANSIENT as error:
                failures = await self._pause("append_failed", error, failures)
            else:
                refused |= {job_id for job_id, refusal in refusals.items() if refusal.reason != "error"}
                appends = [append for append in appends if append.id in refusals and append.id not in refused]
                if appends:
                    failures = await self._pause("append_refused", refusals[appends[0].id].text, failures)
            appends = [append for append in appends if self._is_held(append.id)]
        return refused

    async def _finish(self, ending: Ending) -> bool:
        """True if the job has ended by this ending."""
        failures = 0
        while self._is_held(ending.id):
            try:
                return await self._queue.finish(ending) == "ok"
            except _TRANSIENT as error:
                failures = await self._pause("finish_failed", error, failures)
        return False

    async def _pause(self, event: str, error: Exception | str, failures: int) -> int:
        name = error if isinstance(error, str) else type(error).__name__
        self._log.warning(event, error=name, failures=failures + 1)
        await asyncio.sleep(random.uniform(0.5, 1.0) * min(MAX_BACKOFF_S, 0.02 * 2**failures))
        return failures + 1
