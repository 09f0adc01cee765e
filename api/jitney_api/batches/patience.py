"""Waiting for a Redis that does not answer: a batch has all night."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from jitney.connection import pause_s
from jitney.errors import QueueUnavailable

Found = TypeVar("Found")


async def patiently(call: Callable[[], Awaitable[Found]]) -> Found:
    """What `call` gives, called again for as long as Redis is not there. Only for what may be done twice."""
    num_failures = 0
    while True:
        try:
            return await call()
        except QueueUnavailable:
            await asyncio.sleep(pause_s(num_failures))
            num_failures += 1
