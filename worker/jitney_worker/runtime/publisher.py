"""Writes what jobs gained: one append for the whole batch, one finish for each job that ended.

A call that failed is repeated as it was: the scripts recognise it. Only the loss of the lease ends that.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import redis.exceptions

from jitney.connection import pause_s
from jitney.keys import Fence
from jitney.logs import logger
from jitney.queue import Append, Ending, Queue, Refusal
from jitney_worker.runtime.meters import Meters

LONG_APPEND: Final = 16
"""Events of one job above which it has a call of its own: a log that gets its end back must not hold up the server."""

_TRANSIENT = (redis.exceptions.RedisError, OSError)
_LASTING = ("ERR", "WRONGTYPE")
"""How the server begins an error that the same command would meet again; others (OOM, MISCONF, ...) pass."""


@dataclass(slots=True)
class Unwritten:
    """What could not be written. lost: another claim owns the job, or it has ended, or was given up here.

    torn: the job is ours, but its log ends at this seq, which is not where we left it. closed: the job is ours,
    but its log is gone, or takes nothing more.
    """

    lost: set[Fence] = field(default_factory=set)
    torn: dict[Fence, int] = field(default_factory=dict)
    closed: set[Fence] = field(default_factory=set)

    def has(self, fence: Fence) -> bool:
        return fence in self.lost or fence in self.torn or fence in self.closed


class Publisher:
    """Hands events to Redis and reports the jobs whose events it could not write.

    is_held: whether a claim is still believed good; what is no longer held is not written.
    """

    def __init__(self, queue: Queue, meters: Meters, *, is_held: Callable[[Fence], bool]) -> None:
        self._queue = queue
        self._meters = meters
        self._is_held = is_held
        self._log = logger(part="publisher", queue=queue.name)

    async def write(self, writes: Iterable[Append | Ending]) -> Unwritten:
        """Write all of it that is still held."""
        unwritten = Unwritten()
        appends, others = list[Append](), list[Coroutine[Any, Any, None]]()
        for write in writes:
            if isinstance(write, Ending):
                others.append(self._finish(write, unwritten))
            elif len(write.events) > LONG_APPEND:
                others.append(self._append([write], unwritten))
            else:
                appends.append(write)
        await asyncio.gather(self._append(appends, unwritten), *others)
        return unwritten

    async def _append(self, appends: list[Append], unwritten: Unwritten) -> None:
        failures = 0
        while appends := [append for append in appends if self._is_held(append.fence)]:
            began = time.monotonic()
            try:
                refusals = {refusal.id: refusal for refusal in await self._queue.append(appends)}
            except _TRANSIENT as error:
                self._meters.call_failed("append")
                failures = await self._pause("append_failed", type(error).__name__, failures)
                continue
            self._meters.called("append", time.monotonic() - began)
            for append in appends:
                if append.id not in refusals:
                    self._meters.wrote(append)
            appends = [append for append in appends if append.id in refusals]
            for append in appends:
                _sort(append.fence, refusals[append.id], unwritten)
                if append.fence in unwritten.lost:
                    self._meters.refused()
            appends = [append for append in appends if not unwritten.has(append.fence)]
            if appends:
                failures = await self._pause("append_refused", refusals[appends[0].id].text, failures)

    async def _finish(self, ending: Ending, unwritten: Unwritten) -> None:
        failures = 0
        while self._is_held(ending.fence):
            began = time.monotonic()
            try:
                outcome = await self._queue.finish(ending)
                status = await self._queue.status(ending.id) if outcome == "seq" else None
            except _TRANSIENT as error:
                self._meters.call_failed("finish")
                failures = await self._pause("finish_failed", type(error).__name__, failures)
                continue
            self._meters.called("finish", time.monotonic() - began)
            if status is not None:
                unwritten.torn[ending.fence] = status.seq
            elif outcome != "ok":
                self._meters.refused()
                unwritten.lost.add(ending.fence)
            else:
                self._meters.wrote(ending)
            return

    async def _pause(self, event: str, error: str, failures: int) -> int:
        self._log.warning(event, error=error, failures=failures + 1)
        await asyncio.sleep(pause_s(failures))
        return failures + 1


def _sort(fence: Fence, refusal: Refusal, unwritten: Unwritten) -> None:
    """Into `unwritten`, unless the append may be sent again."""
    if refusal.reason == "fence":
        unwritten.lost.add(fence)
    elif refusal.reason == "seq":
        unwritten.torn[fence] = refusal.seq
    elif refusal.reason == "nolog" or refusal.text.startswith(_LASTING):
        unwritten.closed.add(fence)
