"""A program: deliver what is due, once, with the settings of its environment; print how many were tried."""

from __future__ import annotations

import asyncio
import sys

from jitney.connection import connect
from jitney.webhooks.outbox import deliver_due
from jitney.webhooks.settings import WebhookSettings


async def main(redis_url: str) -> None:
    redis = connect(redis_url, name="jitney-test")
    print(await deliver_due(redis, WebhookSettings.load(), limit=10), flush=True)
    await redis.aclose()


asyncio.run(main(sys.argv[1]))
