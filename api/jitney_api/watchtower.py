"""One look at Redis for all pages that are open here, and no look while none is."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

import orjson
from redis.exceptions import RedisError

from jitney.connection import Redis
from jitney.errors import QueueUnavailable
from jitney.overview import Lookout
from jitney.tasks import end_tasks

EVERY_S: Final = 0.5
"""As often as a worker shows its batch."""


@dataclass(frozen=True, slots=True)
class Sight:
    """What one look saw, encoded once for everybody. trouble: why nothing was seen, '' if it was."""

    number: int
    overview: bytes = b""
    trouble: str = ""


class Watchtower:
    """Belongs to one event loop. Looks for as long as somebody watches; `aclose` ends it."""

    def __init__(self, redis: Redis, every_s: float = EVERY_S) -> None:
        self._lookout = Lookout(redis)
        self._every_s = every_s
        self._num_watchers = 0
        self._task: asyncio.Task[None] | None = None
        self._sight = Sight(0)
        self._seen = asyncio.Event()

    async def aclose(self) -> None:
        if self._task is not None:
            await end_tasks([self._task])

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[Watcher]:
        """While it is open, there are looks. What was seen before it was opened is not shown."""
        self._num_watchers += 1
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._look_on(), name="watchtower")
        try:
            yield Watcher(self, self._sight.number)
        finally:
            self._num_watchers -= 1

    async def after(self, number: int) -> Sight:
        """The newest sight, once there is one after that: whoever is slow misses those between."""
        while self._sight.number <= number:
            await self._seen.wait()
        return self._sight

    def curves(self) -> bytes:
        """`Lookout.points` as JSON: what a page draws before it has seen anything itself."""
        return orjson.dumps({name: list(points) for name, points in self._lookout.points.items()})

    async def _look_on(self) -> None:
        while self._num_watchers:
            number = self._sight.number + 1
            try:
                self._sight = Sight(number, (await self._lookout.look()).encode())
            except (RedisError, OSError) as error:
                self._sight = Sight(number, trouble=f"Redis does not answer: {type(error).__name__}")
            # Whoever waits is woken by this event; whoever comes now waits for the next one.
            self._seen.set()
            self._seen = asyncio.Event()
            await asyncio.sleep(self._every_s)


class Watcher:
    """One page's place on the tower."""

    def __init__(self, tower: Watchtower, number: int) -> None:
        self._tower = tower
        self._number = number

    async def next(self) -> Sight:
        """The newest sight that this page has not had."""
        sight = await self._tower.after(self._number)
        self._number = sight.number
        return sight


async def glance(tower: Watchtower) -> bytes:
    """One overview, for who does not stay. Raises QueueUnavailable."""
    async with tower.watching() as watcher:
        sight = await watcher.next()
    if sight.trouble:
        raise QueueUnavailable(sight.trouble)
    return sight.overview
