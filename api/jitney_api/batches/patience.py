"""Waiting for what does not answer just now, Redis or the store of files: a batch has all night."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from jitney.connection import pause_s
from jitney.errors import QueueUnavailable
from jitney.logs import logger
from jitney_api.batches.files import StoreUnavailable

Found = TypeVar("Found")

PASSING: Final = (QueueUnavailable, StoreUnavailable)


async def patiently(call: Callable[[], Awaitable[Found]]) -> Found:
    """What `call` gives, called again for as long as nobody answers. Only for what may be done twice."""
    num_failures = 0
    while True:
        try:
            return await call()
        except PASSING as error:
            if num_failures == 0:
                logger().warning("batch_waits", error=str(error))
            await asyncio.sleep(pause_s(num_failures))
            num_failures += 1
