"""When what the steps gave is written: first and last tokens at once, all else now and then.

To hear of a step, to write a job's tokens and to read them costs the loop, the server and every reader about as much
for one token as for six, and on a CPU they take that time from the cores that compute.
"""

from __future__ import annotations

from collections.abc import Iterable

from jitney.keys import Fence
from jitney_worker.runtime.running import RunningJob


class Pace:
    """Of the engine's thread: after which steps everything is due.

    interval_s: from one such step to the next; 0 = after each. max_steps: so many are not published for longer.
    """

    def __init__(self, interval_s: float, max_steps: int) -> None:
        self._interval_s = interval_s
        self._max_steps = max_steps
        self._due_at = float("-inf")

    def is_due(self, now: float, num_unpublished: int) -> bool:
        """Asked once after each step. num_unpublished: steps, this one included."""
        if now < self._due_at and num_unpublished < self._max_steps:
            return False
        self._due_at = now + self._interval_s
        return True


class Backlog:
    """Of the event loop: jobs with news that nobody has written yet, and the steps that gave it."""

    def __init__(self) -> None:
        self._urgent: dict[Fence, RunningJob] = {}
        self._others: dict[Fence, RunningJob] = {}
        self._num_steps = 0

    def add(self, jobs: Iterable[RunningJob], num_steps: int) -> None:
        """Jobs that gained something, and how many steps the engine may go on by once that is written."""
        for job in jobs:
            if job.is_urgent:
                self._others.pop(job.fence, None)
                self._urgent[job.fence] = job
            else:
                self._others[job.fence] = job
        self._num_steps += num_steps

    def urgent(self) -> list[RunningJob]:
        """The jobs whose news somebody waits for; the others stay."""
        return _drain(self._urgent)

    def everybody(self) -> list[RunningJob]:
        return [*_drain(self._urgent), *_drain(self._others)]

    def take_steps(self) -> int:
        """Steps of which nothing waits any more."""
        if self._urgent or self._others:
            return 0
        num_steps, self._num_steps = self._num_steps, 0
        return num_steps


def _drain(jobs: dict[Fence, RunningJob]) -> list[RunningJob]:
    drained = list(jobs.values())
    jobs.clear()
    return drained
