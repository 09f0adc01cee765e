"""How held jobs end: by the methods that RQ's own workers use, and only those that are still ours."""

from __future__ import annotations

import asyncio
import sys
from typing import Final

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from rq.rate_limit import release_slot
from rq.utils import now

from jitney.logs import logger
from jitney.rq.held import is_hopeless
from jitney.rq.holder import Holding
from jitney.rq.scheduling import SchedulingWorker
from jitney.rq.standing import Standing, standing

LOST: Final = (RedisConnectionError, RedisTimeoutError)
"""Redis is away: what it was asked for is asked again."""

_log = logger(part="rq")


class FinishingWorker(SchedulingWorker):
    """The half of `HoldingWorker` that ends jobs. On the main thread, as their callbacks expect it."""

    def finish(self, holding: Holding) -> None:
        """By RQ's own success or failure path, if the job is still ours."""
        job, queue, execution = holding.job, holding.rq_queue, holding.execution
        if self._leave_or_keep(holding) != "ours":
            return
        if holding.is_stopped and holding.error is not None:
            self._stopped_job_id = job.id
            job.ended_at = now()
            self._handle_stopped_job(job, queue, execution)
            return
        try:
            if holding.error is not None:
                raise holding.error
            self._finalize_success(job, queue, execution, holding.result)
        except LOST:
            raise  # Redis is away, not the result
        except (Exception, asyncio.CancelledError) as error:
            if is_hopeless(error):
                job.retries_left = 0
            self._finalize_failure(job, queue, execution, sys.exc_info())

    def _leave_or_keep(self, holding: Holding) -> Standing:
        """Where the job stands; one that is not ours any more leaves no trace of this execution."""
        job, execution = holding.job, holding.execution
        found = self.standing_of([holding])[0]
        if found == "withdrawn":
            with self.connection.pipeline() as pipeline:
                self.cleanup_execution(job, pipeline=pipeline, execution=execution)
                pipeline.execute()
            release_slot(job)
        if found != "ours":
            self.executions.pop(execution.id, None)
            _log.info("job_gone", rq_job=job.id, standing=found)
        return found

    def standing_of(self, holdings: list[Holding]) -> list[Standing]:
        with self.connection.pipeline(transaction=False) as pipeline:
            for holding in holdings:
                pipeline.hget(holding.job.key, "status")
                pipeline.zscore(holding.job.started_job_registry.key, holding.execution.composite_key)
            replies = pipeline.execute()
        return [standing(*pair) for pair in zip(replies[::2], replies[1::2], strict=True)]

    def give_back(self, holding: Holding) -> None:
        """To the front of its queue, with all its retries. Its coroutine is not told: this process ends."""
        if self._leave_or_keep(holding) != "ours":
            return
        job = holding.job
        with self.connection.pipeline() as pipeline:
            self.cleanup_execution(job, pipeline=pipeline, execution=holding.execution)
            holding.rq_queue._enqueue_job(job, pipeline=pipeline, at_front=True)
            pipeline.execute()
        _log.info("job_given_back", rq_job=job.id)
