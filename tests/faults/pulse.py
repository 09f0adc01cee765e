"""Waiting for what is announced: a pulse that wakes everybody, and the pulse of a queue's own keys."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from redis.exceptions import RedisError

from jitney.connection import Redis

LOOK_AGAIN_S = 0.25
"""What a lost announcement costs, and how often those things are looked at that nobody announces: time itself."""


class Pulse:
    """Wakes everybody who waits, whenever something has happened."""

    def __init__(self) -> None:
        self._next = asyncio.Event()
        self._is_waited_for = False

    def beat(self) -> None:
        if self._is_waited_for:
            beaten, self._next, self._is_waited_for = self._next, asyncio.Event(), False
            beaten.set()

    async def wait(self, most_s: float = LOOK_AGAIN_S) -> None:
        """Until the next beat, at most so long."""
        self._is_waited_for = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                await self._next.wait()


class KeyPulse(Pulse):
    """Beats when a sorted set of the queue changes: claims, renewals, hand-overs, endings and workers' views do that.

    Only sorted sets, because every token is a write to something else. connect: a fresh connection to the server
    as it stands now; that may be another one after a fault.
    """

    def __init__(self, connect: Callable[[], Redis], prefix: str) -> None:
        super().__init__()
        self._connect = connect
        self._prefix = prefix

    async def run(self) -> None:
        """For ever. A server that is away, or that forgot what it was asked to announce, is asked again."""
        while True:
            redis = self._connect()
            try:
                await self._listen(redis)
            except (OSError, RedisError):
                await self.wait()
            finally:
                with contextlib.suppress(OSError, RedisError):
                    await redis.aclose()

    async def _listen(self, redis: Redis) -> None:
        await redis.config_set("notify-keyspace-events", "Kz")
        async with redis.pubsub() as pubsub:
            await pubsub.psubscribe(f"__keyspace@*__:{self._prefix}:*")
            while True:
                if await pubsub.get_message(timeout=1.0):
                    self.beat()
