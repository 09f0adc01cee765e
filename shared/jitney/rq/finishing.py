"""How held jobs end: by the methods that RQ's own workers use, and only those that are still ours."""

from __future__ import annotations

import functools
import inspect
from typing import Any, Final

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import OutOfMemoryError, ReadOnlyError
from redis.exceptions import TimeoutError as RedisTimeoutError
from rq.job import Job
from rq.rate_limit import release_slot
from rq.utils import now

from jitney.errors import JitneyError
from jitney.logs import logger
from jitney.rq.held import is_hopeless
from jitney.rq.holder import Holding
from jitney.rq.scheduling import SchedulingWorker
from jitney.rq.standing import Standing, standing

LOST: Final = (RedisConnectionError, RedisTimeoutError, OutOfMemoryError, ReadOnlyError)
"""Redis is away, full, or a replica since just now: what it was asked for is asked again."""

_log = logger(part="rq")


class CallbackFailed(JitneyError):
    """A callback could not reach a Redis."""

    code = "callback_failed"


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
        error = holding.error
        if error is None:
            try:
                _tell_apart(job)
                self._finalize_success(job, queue, execution, holding.result)
                return
            except LOST:
                raise  # Redis is away, not the result
            except Exception as broken:
                error = broken
        if is_hopeless(error):
            job.retries_left = 0
        self._finalize_failure(job, queue, execution, (type(error), error, error.__traceback__))

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


def _tell_apart(job: Job) -> None:
    """A callback may ask a Redis of its own. Taken for ours it would be called for ever, and nothing behind it end."""
    callback = job.success_callback
    if callback is None or inspect.iscoroutinefunction(callback):  # RQ refuses those
        return

    @functools.wraps(callback)
    def call(*arguments: Any) -> Any:
        try:
            return callback(*arguments)
        except LOST as error:
            raise CallbackFailed(f"a callback failed: {type(error).__name__}: {error}") from error

    job._success_callback = call
