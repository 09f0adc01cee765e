"""What it means to follow a job, whichever way its events come."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from jitney.position import Message


class Reader(Protocol):
    """Follows jobs: `async with reader.follow(job_id) as batches`. Leaving the block ends it."""

    def follow(self, job_id: str, cursor: int = 0) -> AbstractAsyncContextManager[AsyncIterator[list[Message]]]:
        """Non-empty lists of the events after `cursor`, in order, each once, up to the terminal one.

        Lost connections are made again and outages waited for, within bounds. Raises InvalidJob for what is no job id
        or cursor, JobNotFound, QueueUnavailable, and StreamLost when the log is gone or is another one than was read.
        """
        ...
