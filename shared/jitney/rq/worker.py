"""RQ's worker, holding many jobs at once.

Everything that RQ knows of a job stays RQ's: this class takes jobs, has them awaited by a `Holder`, and brings what has
ended to its end by the methods that RQ's own workers use. All of that happens on the main thread, one after the other,
as RQ's callbacks and signals expect it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty
from queue import Queue as Inbox
from typing import Any, Final

from redis.client import Pipeline
from rq.command import handle_command, parse_payload
from rq.exceptions import DeserializationError
from rq.job import Job
from rq.queue import Queue
from rq.serializers import JSONSerializer
from rq.suspension import is_suspended

from jitney.errors import JitneyError, SettingsError
from jitney.logs import logger
from jitney.rq.finishing import LOST, FinishingWorker
from jitney.rq.held import OUR_PREFIX, HeldJobs, function_name
from jitney.rq.holder import Holder, Holding
from jitney.rq.pulse import Pulse
from jitney.rq.settings import RqSettings
from jitney.rq.strangers import Strangers

POLL_S: Final = 0.1
"""Between two looks for new jobs while others are held. Without any, RQ's own blocking call waits for them."""

RECONNECT_S: Final = 1.0
WORKER_TTL_S: Final = 60

_log = logger(part="rq")


class HoldingWorker(FinishingWorker):
    """Holds up to `settings.concurrency` jobs. client_url: as in `AsyncClient`. held_jobs: those it knows.

    Raises SettingsError for queues that are not written in JSON.
    """

    log_result_lifespan = False

    def __init__(
        self,
        queues: Iterable[Queue | str],
        *,
        settings: RqSettings = RqSettings(),  # noqa: B008 (frozen)
        client_url: str | None = None,
        held_jobs: HeldJobs | None = None,
        **options: Any,
    ) -> None:
        options = {"worker_ttl": WORKER_TTL_S, "log_job_description": False, **options}
        super().__init__(
            [*queues],  # type: ignore[arg-type]
            serializer=JSONSerializer,
            job_monitoring_interval=settings.heartbeat_s,
            **options,
        )
        for queue in self.queues:
            if queue.serializer is not JSONSerializer:
                raise SettingsError(f'queue {queue.name} unpickles what is in it: make it with serializer="json"')
        self.settings = settings
        self.held_jobs = held_jobs or HeldJobs()
        self.holdings: dict[str, Holding] = {}
        self._client_url = client_url
        # Not a SimpleQueue, which waits for ever (CPython 3.11) when a signal's handler outlasts its timeout.
        self._ended: Inbox[Holding] = Inbox()
        self._to_finish: list[Holding] = []
        self._strangers = Strangers()
        self._holder: Holder | None = None
        self._pulse: Pulse | None = None

    # --- taking --------------------------------------------------------------------------------

    def dequeue_job_and_maintain_ttl(
        self, timeout: int | None, max_idle_time: int | None = None
    ) -> tuple[Job, Queue] | None:
        """The next job, while those that are held come to their end. None when it is time to leave."""
        while not self._stop_requested:
            with self._outlasting_redis():
                self._finish_ended()
                if not self.holdings and not self._strangers.are_resting:
                    return super().dequeue_job_and_maintain_ttl(timeout, max_idle_time)
                taken = self._take()
                if taken is not None or (timeout is None and not self.holdings):
                    return taken
                if self.should_run_maintenance_tasks:
                    self.run_maintenance_tasks()
            self._await_ended(POLL_S)
        return None

    def _take(self) -> tuple[Job, Queue] | None:
        """A job that waits, if there is room. Does not wait for one."""
        queues = [queue for queue in self._ordered_queues if self._strangers.allow(queue)]
        if not queues or len(self.holdings) >= self.settings.concurrency or is_suspended(self.connection):
            return None
        taken = self.queue_class.dequeue_any(
            queues, None, self.connection, job_class=self.job_class, serializer=self.serializer
        )
        if taken is not None:
            self.reorder_queues(reference_queue=taken[1])
        return taken

    def execute_job(self, job: Job, queue: Queue) -> None:
        """Hold the job, unless it is somebody else's."""
        with self._outlasting_redis():
            if self._is_strange(job):
                self._put_back(job, queue)
            else:
                self._hold(job, queue)

    def _is_strange(self, job: Job) -> bool:
        with suppress(JitneyError):
            name = function_name(job)
            return name not in self.held_jobs and not name.startswith(OUR_PREFIX)
        return False  # nobody may read it: it ends here

    def _put_back(self, job: Job, queue: Queue) -> None:
        """To the end of its queue, for a worker of another kind."""
        with self.connection.pipeline() as pipeline:
            queue.push_job_id(job.id, pipeline=pipeline)
            pipeline.lrem(queue.intermediate_queue_key, 1, job.id)
            num_waiting, _ = pipeline.execute()
        self._strangers.note(queue, str(job.func_name), num_waiting)

    def _hold(self, job: Job, queue: Queue) -> None:
        execution = self.prepare_execution(job)
        try:
            with suppress(DeserializationError):
                self.prepare_job_execution(job, remove_from_intermediate_queue=len(self.queues) == 1)
            perform = self.held_jobs.find(function_name(job))
        except JitneyError:
            job.retries_left = 0
            self._finalize_failure(job, queue, execution, sys.exc_info())
            return
        limit = job.timeout or self.queue_class.DEFAULT_TIMEOUT
        timeout_s = limit if limit > 0 else None
        assert self._holder is not None
        self.holdings[execution.id] = self._holder.hold(job, queue, execution, perform, timeout_s=timeout_s)

    # --- finishing -----------------------------------------------------------------------------

    def _await_ended(self, timeout_s: float) -> None:
        with suppress(Empty):
            self._to_finish.append(self._ended.get(timeout=timeout_s))

    def _finish_ended(self) -> None:
        while not self._ended.empty():
            self._to_finish.append(self._ended.get())
        while self._to_finish:
            self.finish(self._to_finish[0])
            del self.holdings[self._to_finish.pop(0).execution.id]

    # --- meanwhile, on other threads -----------------------------------------------------------

    def handle_payload(self, message: Any) -> None:
        """RQ's commands. `stop-job` finds its job among all that are held, not only the first."""
        payload = parse_payload(message)
        if payload["command"] != "stop-job":
            handle_command(self, payload)
            return
        for holding in list(self.holdings.values()):
            if holding.job.id == payload.get("job_id"):
                self._stop(holding)

    def request_stop_execution(self, execution_id: str) -> None:
        """RQ's command `stop-execution`."""
        holding = self.holdings.get(execution_id)
        if holding is not None:
            self._stop(holding)

    def _stop(self, holding: Holding) -> None:
        assert self._holder is not None
        holding.is_stopped = True
        self._holder.cancel(holding)

    def keep_alive(self) -> None:
        """A sign of life of the worker and of every job that it holds."""
        for holding in list(self.holdings.values()):
            self.maintain_heartbeats(holding.job, holding.execution)

    def watch(self) -> None:
        """End what was cancelled or deleted: RQ tells nobody."""
        assert self._holder is not None
        holdings = list(self.holdings.values())
        for holding, found in zip(holdings, self.standing_of(holdings), strict=True):
            if found == "withdrawn":
                self._holder.cancel(holding)

    # --- coming and leaving --------------------------------------------------------------------

    def bootstrap(self, *arguments: Any, **options: Any) -> None:
        """As RQ's. Raises SettingsError for a client that cannot be, before RQ knows of this worker."""
        self._holder = Holder(self._client_url, self._ended)
        super().bootstrap(*arguments, **options)
        self._pulse = Pulse(self.keep_alive, self.watch, beat_every_s=self.settings.heartbeat_s)

    def check_for_suspension(self, burst: bool) -> None:
        """Waits while RQ is suspended, once nothing is held; until then no job is taken."""
        if not self.holdings:
            super().check_for_suspension(burst)

    def heartbeat(self, timeout: int | None = None, pipeline: Pipeline | None = None) -> None:
        """As RQ's; without Redis the worker lives on."""
        with self._outlasting_redis():
            super().heartbeat(timeout, pipeline)

    def teardown(self) -> None:
        """Finish what ends in time, and give the rest back; at once if somebody is in a hurry (a second signal)."""
        try:
            if self.holdings and sys.exception() is None:
                self._drain()
        finally:
            with self._outlasting_redis():
                for holding in reversed(self.holdings.values()):
                    self.give_back(holding)
            if self._pulse is not None:
                self._pulse.close()
            if self._holder is not None and not self.holdings:
                self._holder.close()
            super().teardown()  # type: ignore[no-untyped-call]

    def _drain(self) -> None:
        deadline = time.monotonic() + self.settings.drain_timeout_s
        while self.holdings and (left_s := deadline - time.monotonic()) > 0:
            self._await_ended(min(POLL_S, left_s))
            with self._outlasting_redis():
                self._finish_ended()

    @contextmanager
    def _outlasting_redis(self) -> Iterator[None]:
        """What was not done now is done later."""
        try:
            yield
        except LOST as error:
            _log.warning("redis_lost", error=str(error))
            time.sleep(RECONNECT_S)
