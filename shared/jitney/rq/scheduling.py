"""RQ's scheduler, for jobs that are tried again later on, in a thread of the worker.

RQ forks a process for it, which lives on when its worker is killed, and beside whose fork no thread of ours may hold a
lock.
"""

from __future__ import annotations

import threading
import time
from typing import Final

from redis.exceptions import RedisError
from rq.scheduler import RQScheduler

from jitney.logs import logger

AGAIN_S: Final = 1.0

_log = logger(part="rq")


class ThreadScheduler(RQScheduler):
    """RQ's own loop, without its signals: those are the main thread's."""

    def start(self) -> threading.Thread:
        """Schedule from now on; or later, if another worker does it now."""
        self._status = self.Status.STARTED
        self._process = threading.Thread(target=self._work, name="jitney-scheduler", daemon=True)
        self._process.start()
        return self._process

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
