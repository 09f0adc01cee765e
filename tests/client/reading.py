"""Reading a follower's words in a test."""

from __future__ import annotations

import asyncio

from tests.client.scripted_worker import PATIENCE_S

from jitney.connection import Redis
from jitney.follower import Follower, Message
from jitney.messages import Event

NEVER_S = 3_600.0


async def texts(follower: Follower, upto: int | None = None) -> list[str]:
    """Texts of the events, up to seq `upto` or to the end."""
    said: list[str] = []
    async with asyncio.timeout(PATIENCE_S):
        async for batch in follower:
            assert batch, "a batch is never empty"
            said += [message.event.text for message in batch]
            if batch[-1].event.seq == upto:
                break
    return said


async def num_subscribers(redis: Redis, channel: str) -> int:
    ((_, number),) = await redis.pubsub_numsub(channel)
    return int(number)


def tokens(seq: int) -> Message:
    event = Event("tokens", seq, text="word")
    return Message(event, event.encode())
