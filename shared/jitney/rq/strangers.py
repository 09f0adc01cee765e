"""Jobs on our queues that are for workers of another kind: left to them, without spinning. Pure, but for the clock."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Final

from rq.queue import Queue

from jitney.logs import logger

REST_S: Final = 1.0

_log = logger(part="rq")


class Strangers:
    """How many jobs in a row were put back, and which queues hold nothing else and are left alone for a while."""

    def __init__(self) -> None:
        self._num_put_back: dict[str, int] = defaultdict(int)
        self._rests_until: dict[str, float] = {}
        self._known: set[str] = set()

    def note(self, queue: Queue, name: str, num_waiting: int) -> None:
        """A job of function `name` was put back; `num_waiting` are in the queue with it."""
        if name not in self._known:
            self._known.add(name)
            hint = "a worker of RQ's own must listen to this queue too"
            _log.warning("job_put_back", rq_queue=queue.name, function=name[:80], hint=hint)
        self._num_put_back[queue.name] += 1
        if self._num_put_back[queue.name] >= num_waiting:
            self._num_put_back[queue.name] = 0
            self._rests_until[queue.name] = time.monotonic() + REST_S

    def allow(self, queue: Queue) -> bool:
        """Whether it may be looked into."""
        return self._rests_until.get(queue.name, 0.0) <= time.monotonic()

    @property
    def are_resting(self) -> bool:
        return any(until > time.monotonic() for until in self._rests_until.values())
