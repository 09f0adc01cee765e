"""What is told to the world when a batch has ended."""

from __future__ import annotations

from jitney.connection import Redis
from jitney.logs import logger
from jitney.webhooks.outbox import announce
from jitney.webhooks.settings import WebhookSettings
from jitney_api.batches.patience import patiently
from jitney_api.batches.records import Batch


def note_end(batch: Batch) -> None:
    """In the log of whoever ended the batch."""
    logger().info(
        "batch_ended",
        batch=batch.id,
        state=batch.state,
        total=batch.total,
        completed=batch.completed,
        failed=batch.failed,
    )


async def announce_end(redis: Redis, settings: WebhookSettings, batch: Batch) -> None:
    """Have the deployment's endpoint told, if it has one.

    The script that ends a batch does not: whoever finds a batch that has ended calls this too, for an assembler may die
    between the two. Told twice, it is one event: its id is made from the batch's.
    """
    await patiently(lambda: announce(redis, settings, event=f"batch.{batch.state}", object_id=batch.id))
