"""A job's whole answer: its events added up from the first to the last."""

from __future__ import annotations

from typing import Final

from jitney.errors import JobNotFound, StreamLost
from jitney.keys import JobId
from jitney.reading import Reader
from jitney.result import Collector, Result

MAX_BEGINNINGS: Final = 4
"""Each takes another loss by Redis, in the middle of one answer."""


async def gather(reader: Reader, job_id: JobId) -> Result:
    """Wait for the job's end and add up what it said.

    A log that turns out to be another one than was read (`StreamLost`) is read anew from its beginning: nothing has
    been given out yet, so the caller need not know. Raises JobFailed, JobCancelled, JobExpired, JobNotFound,
    QueueUnavailable; StreamLost when the job itself is gone, or after MAX_BEGINNINGS.
    """
    lost: StreamLost | None = None
    for _ in range(MAX_BEGINNINGS):
        try:
            return await _gather_once(reader, job_id)
        except StreamLost as error:
            lost = error
        except JobNotFound:
            if lost is None:
                raise
            break
    assert lost is not None
    raise lost


async def _gather_once(reader: Reader, job_id: JobId) -> Result:
    collector = Collector(job_id)
    async with reader.follow(job_id) as follower:
        async for batch in follower:
            for message in batch:
                result = collector.add(message.event)
                if result is not None:
                    return result
    raise StreamLost(f"the log of {job_id} ended without a last event")
