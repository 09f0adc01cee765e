"""Each batch as an RQ job: put into RQ's queue once, and once more whenever it is not there and should be.

What RQ does by itself (3.0): a worker beats every `job_monitoring_interval` (30 s), each beat holds its job for 60 s
more than that. Every worker cleans the registries when it starts and each `maintenance_interval` (10 minutes): a job
whose time is over is enqueued again while it has retries left (AbandonedJobError), else it is marked failed. One whose
worker died between taking and beginning it is failed by the second cleaning that meets it, a minute later at the
earliest, and retried by the same count. Intervals between retries need a worker with RQ's scheduler: there are none.
A count that is used up, and a Redis that was rolled back, are nothing that RQ mends: the sweep does (sweeping.py).
"""

from __future__ import annotations

import contextlib
import os
from typing import Final, Literal, cast

import redis
from rq import Queue
from rq.exceptions import DuplicateJobError, NoSuchJobError
from rq.job import Job, JobStatus, Retry
from rq.serializers import JSONSerializer

from jitney.rq.settings import RqSettings

QUEUE: Final = "jitney"
FUNCTION: Final = "jitney.rq.run_batch"
MAX_RETRIES: Final = 100
"""By then a worker has died a hundred times, or the assembler failed as often: the sweep goes on, one at a time."""

RESULT_S: Final = 24 * 3_600
TIMEOUT_S: Final = 10.0

Standing = Literal["held", "stopped", "gone"]


def rq_url(url: str) -> str:
    """Where `jitney rq-worker` looks: RQ's Redis if it has one of its own, else jitney's (`url`)."""
    own = RqSettings.load().url
    return os.environ.get("RQ_REDIS_URL", url) if own is None else own.get_secret_value()


class BatchQueue:
    """RQ's queue of batches. Blocking: for threads. Raises redis' own errors."""

    def __init__(self, url: str) -> None:
        self._connection = redis.Redis.from_url(
            url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S, client_name="jitney-rq"
        )
        self._queue = Queue(QUEUE, connection=self._connection, serializer=JSONSerializer)
        # Or it asks by INFO, which is none of an API's rights; an older server takes no jobs of jitney's at all.
        self._queue.redis_server_version = (7, 0, 0)
        self._started = self._queue.started_job_registry

    def close(self) -> None:
        self._connection.close()

    def enqueue(self, batch_id: str) -> bool:
        """Put the batch's job into the queue. False if it is there already, in whatever state."""
        try:
            self._queue.enqueue_call(
                FUNCTION,
                args=(batch_id,),
                job_id=batch_id,
                unique=True,
                timeout=-1,  # a batch lasts as long as its window
                retry=Retry(max=MAX_RETRIES),
                result_ttl=RESULT_S,
                failure_ttl=RESULT_S,
                description=f"batch {batch_id}",
                meta={"total": 0, "completed": 0, "failed": 0},
            )
        except DuplicateJobError:
            return False
        return True

    def standing(self, batch_id: str) -> Standing:
        """held: its job waits or runs. stopped: somebody has stopped or cancelled it in RQ. gone: anything else."""
        try:
            job = Job.fetch(batch_id, connection=self._connection, serializer=JSONSerializer)
        except NoSuchJobError:
            return "gone"
        status = job.get_status(refresh=False)
        if status in (JobStatus.STOPPED, JobStatus.CANCELED):
            return "stopped"
        return "held" if status in _ALIVE and not self._is_lost(job, status) else "gone"

    def enqueue_anew(self, batch_id: str) -> None:
        """A new job in the place of one that will not run any more."""
        with contextlib.suppress(NoSuchJobError):
            job = Job.fetch(batch_id, connection=self._connection, serializer=JSONSerializer)
            # RQ fails to delete a job that has an execution whose own record is gone.
            self._connection.delete(job.execution_registry.key)
            job.delete()
        # What is left of them would be taken for a dead execution of the new job.
        for entry in self._connection.zrange(self._started.key, 0, -1):
            if self._started.parse_job_id(entry) == batch_id:
                self._connection.zrem(self._started.key, cast(bytes, entry))
        self.enqueue(batch_id)

    def _is_lost(self, job: Job, status: JobStatus) -> bool:
        """It waits and stands in no queue, as after a rollback of the server; or runs without a sign of life."""
        if status is JobStatus.QUEUED:
            # In the order in which a job moves on, so that one that moves meanwhile is met at least once.
            is_held = (
                self._queue.get_job_position(job.id) is not None
                or job.id in self._queue.intermediate_queue.get_job_ids()
            )
        elif status is JobStatus.STARTED:
            # Not by RQ's own cleaning: that is of everybody's jobs, and runs callbacks that only their workers know.
            held, let_go = self._started.get_job_ids(cleanup=False), self._started.get_expired_job_ids()
            is_held = held.count(job.id) > let_go.count(job.id)
        else:
            return False
        return not is_held and job.get_status(refresh=True) is status


_ALIVE: Final = (JobStatus.QUEUED, JobStatus.STARTED, JobStatus.DEFERRED, JobStatus.SCHEDULED)
