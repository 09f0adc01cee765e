"""Writes what jobs gained: one append for the whole batch, one finish for each job that ended.

A call that failed is repeated as it was: the scripts recognise it. Only the loss of the lease ends that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import redis.exceptions

from jitney.connection import pause_s
from jitney.keys import Fence
from jitney.logs import logger
from jitney.queue import Append, Ending, Queue, Refusal

_TRANSIENT = (redis.exceptions.RedisError, OSError)
_LASTING = ("ERR", "WRONGTYPE")
"""How the server begins an error that the same command would meet again; others (OOM, MISCONF, ...) pass."""


@dataclass(slots=True)
class Unwritten:
    """What could not be written. lost: another claim owns the job, or it has ended, or was given up here.

    torn: the job is ours, but its log does not end where we left it, or takes nothing more.
    """

    lost: set[Fence] = field(default_factory=set)
    torn: set[Fence] = field(default_factory=set)


class Publisher:
    """Hands events to Redis and reports the jobs whose events it could not write.

    is_held: whether a claim is still believed good; what is no longer held is not written.
    """

    def __init__(self, queue: Queue, *, is_held: Callable[[Fence], bool]) -> None:
        self._queue = queue
        self._is_held = is_held
        self._log = logger(part="publisher", queue=queue.name)

    async def write(self, appends: list[Append], endings: list[Ending]) -> Unwritten:
        """Write all of it that is still held."""
        unwritten = Unwritten()
        await asyncio.gather(self._append(appends, unwritten), *(self._finish(ending, unwritten) for ending in endings))
        return unwritten

    async def _append(self, appends: list[Append], unwritten: Unwritten) -> None:
        failures = 0
        while appends := [append for append in appends if self._is_held(append.fence)]:
            try:
                refusals = {refusal.id: refusal for refusal in await self._queue.append(appends)}
            except _TRANSIENT as error:
                failures = await self._pause("append_failed", type(error).__name__, failures)
                continue
            appends = [append for append in appends if append.id in refusals]
            for append in appends:
                _sort(append.fence, refusals[append.id], unwritten)
            appends = [append for append in appends if append.fence not in unwritten.lost | unwritten.torn]
            if appends:
                failures = await self._pause("append_refused", refusals[appends[0].id].text, failures)

    async def _finish(self, ending: Ending, unwritten: Unwritten) -> None:
        failures = 0
        while self._is_held(ending.fence):
            try:
                outcome = await self._queue.finish(ending)
            except _TRANSIENT as error:
                failures = await self._pause("finish_failed", type(error).__name__, failures)
                continue
            if outcome == "seq":
                unwritten.torn.add(ending.fence)
            elif outcome != "ok":
                unwritten.lost.add(ending.fence)
            return

    async def _pause(self, event: str, error: str, failures: int) -> int:
        self._log.warning(event, error=error, failures=failures + 1)
        await asyncio.sleep(pause_s(failures))
        return failures + 1


def _sort(fence: Fence, refusal: Refusal, unwritten: Unwritten) -> None:
    """Into `unwritten`, unless the append may be sent again."""
    if refusal.reason == "fence":
        unwritten.lost.add(fence)
    elif refusal.reason != "error" or refusal.text.startswith(_LASTING):
        unwritten.torn.add(fence)
