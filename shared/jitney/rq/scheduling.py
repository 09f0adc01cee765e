"""RQ's scheduler, for jobs that are tried again later on, in a thread of the worker.

RQ forks a process for it, which lives on when its worker is killed, and beside whose fork no thread of ours may hold a
lock.
"""

from __future__ import annotations

import threading
import time
from typing import Any, Final

from redis.exceptions import RedisError
from rq.scheduler import RQScheduler
from rq.worker import Worker

from jitney.logs import logger

AGAIN_S: Final = 1.0

_log = logger(part="rq")


class ThreadScheduler(RQScheduler):
    """RQ's own loop, without its signals: those are the main thread's."""

    def start(self) -> threading.Thread:
        """Schedule from now on; or later, if another worker does it now."""
        self._status = self.Status.STARTED
        thread = threading.Thread(target=self._work, name="jitney-scheduler", daemon=True)
        thread.start()
        self._process: Any = thread  # RQ asks it whether it is alive
        return thread

    def end(self) -> None:
        """Leave the queues to another worker."""
        self.request_stop()
        self._process.join()

    def _install_signal_handlers(self) -> None:
        pass

    def _work(self) -> None:
        while not self._stop_requested:
            try:
                self.work()
            except (RedisError, OSError) as error:
                _log.warning("scheduler_waits", error=str(error))
                time.sleep(AGAIN_S)


class SchedulingWorker(Worker):
    """RQ's worker with its scheduler in a thread."""

    def _start_scheduler(self, burst: bool = False, *arguments: Any) -> None:
        if burst:
            super()._start_scheduler(burst, *arguments)
            return
        self.scheduler = ThreadScheduler(self.queues, connection=self.connection, serializer=self.serializer)
        self.scheduler.acquire_locks()
        self.scheduler.start()

    def stop_scheduler(self) -> None:
        """As RQ's, of a thread."""
        if isinstance(self.scheduler, ThreadScheduler):
            self.scheduler.end()
