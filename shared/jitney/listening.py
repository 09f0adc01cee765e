"""The one pub/sub connection of a process: it hears what is wanted, and is made again when it breaks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

import redis.asyncio as aredis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from jitney.connection import connect_once, pause_s
from jitney.logs import logger
from jitney.subscription import Subscription
from jitney.tasks import end_tasks

PING_EVERY_S = 2.0
"""Of silence. Whoever hangs is found out by the second one."""

_BURST = 64

_log = logger()


class Listener:
    """Keeps a connection subscribed to exactly the channels of `wanted`, and hands on what it hears.

    live: channels whose subscription the server has confirmed. trouble: why the last connection ended.
    """

    def __init__(self, url: str, wanted: Mapping[bytes, Subscription]) -> None:
        self._redis = connect_once(url, name="jitney-channel")
        self._wanted = wanted
        self._sent: set[bytes] = set()
        self.live: set[bytes] = set()
        self.trouble: BaseException | None = None
        self._heard_at = 0.0
        self._is_stale = asyncio.Event()
        self._has_sent = asyncio.Event()

    def renew(self) -> None:
        """`wanted` has changed."""
        self._is_stale.set()

    async def outages(self) -> AsyncIterator[float]:
        """Listen for as long as this is iterated. Each time that there is no connection: for how many seconds now."""
        clock = asyncio.get_running_loop().time
        attempt, down_since = 0, clock()
        self._sent.clear()
        self.live.clear()
        while True:
            try:
                await self._live_once()
            except (RedisError, OSError) as error:
                self.trouble = error
            except Exception as error:
                # redis-py lets some through when one task writes to what the other has just closed. For the readers
                # it is a lost connection like any other; without this line they would never get a new one.
                _log.warning("channel_connection_broke", error=repr(error))
                self.trouble = error
            if self.live:  # the connection that just ended had worked
                attempt, down_since = 0, clock()
                _log.warning("channel_connection_lost", error=str(self.trouble))
            self._sent.clear()
            self.live.clear()
            yield clock() - down_since
            await asyncio.sleep(pause_s(attempt))
            attempt += 1

    async def aclose(self) -> None:
        await self._redis.aclose()

    async def _live_once(self) -> None:
        """One connection, until it breaks. The next one subscribes anew, and each confirmation means: read the log."""
        self._has_sent.clear()
        async with contextlib.aclosing(self._redis.pubsub()) as pubsub:
            parts = {asyncio.create_task(part(pubsub)) for part in (self._send, self._listen, self._ping)}
            try:
                await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await end_tasks(parts)
            # Of all, though the first will do: an error that nobody looks at is reported as forgotten.
            for error in [task.exception() for task in parts if not task.cancelled()]:
                if error is not None:
                    raise error

    async def _send(self, pubsub: aredis.client.PubSub) -> None:
        """Subscribe and unsubscribe, so that what is sent equals what is wanted."""
        while True:
            fresh, stale = self._wanted.keys() - self._sent, self._sent - self._wanted.keys()
            if not (fresh or stale):
                self._is_stale.clear()
                await self._is_stale.wait()
                continue
            if stale:
                self._sent -= stale
                self.live -= stale
                await pubsub.unsubscribe(*stale)
            if fresh:
                self._sent |= fresh
                await pubsub.subscribe(*fresh)
                self._has_sent.set()

    async def _listen(self, pubsub: aredis.client.PubSub) -> None:
        num_read = 0
        while True:
            if not pubsub.subscribed:  # reading would raise, or return at once and for ever
                self._has_sent.clear()
                await self._has_sent.wait()
            message = await pubsub.get_message(timeout=None)  # a timeout of its own would cost each as much as reading
            self._heard_at = asyncio.get_running_loop().time()
            if message is not None:
                self._on_message(message)
            num_read += 1
            if num_read % _BURST == 0:
                await asyncio.sleep(0)  # a full socket is read without ever yielding to the followers

    async def _ping(self, pubsub: aredis.client.PubSub) -> None:
        """After a silence; one that lasts although there was a ping ends the connection."""
        clock = asyncio.get_running_loop().time
        self._heard_at = clock()
        while True:
            await asyncio.sleep(max(0.0, self._heard_at + PING_EVERY_S - clock()))
            if clock() < self._heard_at + PING_EVERY_S:
                continue
            pinged_at, is_pinged = clock(), pubsub.subscribed
            if is_pinged:
                await pubsub.ping()
            await asyncio.sleep(PING_EVERY_S)
            if is_pinged and self._heard_at < pinged_at and pubsub.subscribed:
                raise RedisConnectionError(f"no answer to a ping for {PING_EVERY_S:g} s")

    def _on_message(self, message: dict[str, Any]) -> None:
        channel, kind = message["channel"], message["type"]
        subscription = self._wanted.get(channel)
        if kind == "subscribe" and channel in self._sent:
            self.live.add(channel)
            if subscription is not None:
                subscription.confirmed.set()
                subscription.look()
        elif kind == "message" and subscription is not None:
            subscription.heard_at = asyncio.get_running_loop().time()
            subscription.deliver(message["data"])
