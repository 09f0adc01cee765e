"""How fast this machine is just now: leases grow with its load, or a busy machine would look like dead workers."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

LEASE_S = 1.5
"""On a machine with nothing else to do."""

STEP_S = 0.02
"""What a worker's step takes, on top of what its own code takes."""

CALM_LEASE_S = 30.0
"""Of the rows in which nobody waits for a lease, and in which one that is lost would be a mistake."""

MAX_SLOWNESS = 8.0
MAX_STEP_SLOWNESS = 4.0
WORK_S = 0.05


def slowness() -> float:
    """How many times longer work takes now than on an idle machine, 1 to MAX_SLOWNESS.

    The larger of two: how long a bit of computing took over its own processor time, which sees what goes on
    this moment, and the processes that wanted a core in the last minute, for each core.
    """
    waiting = os.getloadavg()[0] / (os.cpu_count() or 1)
    return min(MAX_SLOWNESS, max(1.0, waiting, _stretch()))


def _stretch() -> float:
    began, worked = time.perf_counter(), time.process_time()
    while time.process_time() - worked < WORK_S:
        pass
    return (time.perf_counter() - began) / WORK_S


@dataclass(frozen=True, slots=True)
class Pace:
    """What a row goes by. Steps are slower too, so that those who watch, and share the cores, can keep up."""

    slowness: float

    @property
    def lease_s(self) -> float:
        return round(LEASE_S * self.slowness, 1)

    @property
    def step_s(self) -> float:
        return round(STEP_S * min(self.slowness, MAX_STEP_SLOWNESS), 3)


def measured() -> Pace:
    """The pace for a row that begins now."""
    return Pace(slowness())
