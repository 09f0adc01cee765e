"""What is said to a worker: a cancelled job leaves the engine at the next step boundary, whatever it does there, and
one that goes before bulk is claimed at once, though bulk has all the seats.

Without the first a job that only waits or prefills would be computed until its first append is refused. A message
that is missed (a channel keeps nothing) costs no more than that, or the time until the worker looks by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import orjson
import redis.exceptions

from jitney.connection import Redis, pause_s
from jitney.keys import BANDS, Band, Fence, Keys
from jitney.logs import logger

PING_EVERY_S = 5.0


class Control:
    """Hears what is said to this worker, and to all of its queue.

    on_cancel: receives the fence of the claim that is void. on_call: receives the band of a job that has come, and goes
    before bulk.
    redis: a client that never repeats a call (`connect_once`): a subscription is made anew here instead.
    """

    def __init__(
        self,
        redis: Redis,
        keys: Keys,
        worker_id: str,
        *,
        on_cancel: Callable[[Fence], None],
        on_call: Callable[[Band], None],
    ) -> None:
        self._redis = redis
        self._own, self._call = keys.ctl(worker_id), keys.call
        self._on_cancel = on_cancel
        self._on_call = on_call
        self._failures = 0
        self._log = logger(part="control", channel=self._own)

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
            await pubsub.subscribe(self._own, self._call)
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
        elif message["type"] == "message" and message["channel"] == self._call.encode():
            band = called_band(message["data"])
            if band is not None:
                self._on_call(band)
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


def called_band(payload: bytes) -> Band | None:
    """The band that was called; None for whatever else somebody published."""
    return next((band for band in BANDS if band.encode() == payload), None)
