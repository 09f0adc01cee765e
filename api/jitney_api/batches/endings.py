"""What is told to the world when a batch has ended."""

from __future__ import annotations

from jitney.logs import logger
from jitney_api.batches.records import Batch


async def announce_end(batch: Batch) -> None:
    """Called once by whoever ended the batch, after it is recorded."""
    logger().info(
        "batch_ended",
        batch=batch.id,
        state=batch.state,
        total=batch.total,
        completed=batch.completed,
        failed=batch.failed,
    )
