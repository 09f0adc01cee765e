"""The worker's own channel: a cancelled job leaves the engine at the next step boundary, whatever it does there.

Without it a job that only waits or prefills would be computed until its first append is refused. A message
that is missed (the channel keeps nothing) costs no more than that, or the time to the next renewal.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import orjson
import redis.exceptions

from jitney.connection import Redis, pause_s
from jitney.keys import Fence
from jitney.logs import logger

PING_EVERY_S = 5.0


class Control:
    """Hears what is said to this worker. on_cancel: receives the fence of the claim that is void.

    redis: a client that never repeats a call (`connect_once`): a subscription is made anew here instead.
    """

    def __init__(self, redis: Redis, channel: str, on_cancel: Callable[[Fence], None]) -> None:
        self._redis = redis
        self._channel = channel
        self._on_cancel = on_cancel
        self._failures = 0
        self._log = logger(part="control", channel=channel)

    async def run(self) -> None:
        """For ever: one subscribed connection after the other."""
        while True:
            try:
                await self._listen()
            except (redis.exceptions.RedisError, OSError) as error:
                self._log.warning("control_lost", error=type(error).__name__)
            await asyncio.sleep(pause_s(self._failures))
            self._failures += 1

    async def _listen(self) -> None:
        """Until the connection breaks."""
        is_pinged = False
        async with contextlib.aclosing(self._redis.pubsub()) as pubsub:
            await pubsub.subscribe(self._channel)
            while True:
                message = await pubsub.get_message(timeout=PING_EVERY_S)
                if message is not None:
                    is_pinged = False
                    self._hear(message)
                elif is_pinged:  # a connection that died without a word looks like one on which nothing is said
                    raise redis.exceptions.ConnectionError(f"no answer to a ping for {PING_EVERY_S:g} s")
                else:
                    is_pinged = True
                    await pubsub.ping()

    def _hear(self, message: dict[str, Any]) -> None:
        if message["type"] == "subscribe":
            self._failures = 0
        elif message["type"] == "message":
            fence = cancelled_fence(message["data"])
            if fence is not None:
                self._on_cancel(fence)


def cancelled_fence(payload: bytes) -> Fence | None:
    """The claim that `{"type":"cancel","id":…,"fence":…}` calls void; None for whatever else somebody published."""
    try:
        said = orjson.loads(payload)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(said, dict) or said.get("type") != "cancel" or not isinstance(said.get("fence"), str):
        return None
    return Fence(said["fence"])
