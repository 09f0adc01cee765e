"""What a command asks Redis, once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from jitney.connection import Redis, connect
from jitney.redis_link import answering
from jitney.settings import client_settings, usable_url

T = TypeVar("T")


def ask_redis(redis_url: str | None, call: Callable[[Redis], Awaitable[T]]) -> T:
    """What `call` gives. redis_url: None = where clients find their server. Raises QueueUnavailable, SettingsError."""

    async def ask() -> T:
        redis = connect(usable_url(redis_url or client_settings().url), name="jitney-cli")
        try:
            async with answering():
                return await call(redis)
        finally:
            await redis.aclose()

    return asyncio.run(ask())
