"""After a run: what the queue itself keeps of each job, for the checker to compare with what readers were given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.faults.ledger import Ledger

from jitney.folding import read_stream
from jitney.keys import JobId
from jitney.queue import Queue
from jitney.replies import text


async def audit(queue: Queue, ledger: Ledger, jobs: Mapping[str, str], audited: set[str]) -> None:
    """Write down logs and bills of all jobs that were not written down before. jobs: id -> name of the request."""
    fresh = [job_id for job_id in jobs if job_id not in audited]
    audited.update(fresh)
    for job_id in fresh:
        # The stream as it is, not as readers are served it: that would hide a number that is there twice.
        for payload in await read_stream(queue.redis, queue.keys, JobId(job_id)):
            ledger.logged(jobs[job_id], job_id, payload)
    entries: Any = await queue.redis.xrange(queue.keys.usage)
    for _, entry in entries:
        job_id = text(entry[b"j"])
        if job_id in fresh:
            ledger.billed(jobs[job_id], job_id, int(entry[b"c"]))
