"""What a run leaves behind: one ride for each job, and what is known of the run as a whole."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STILL_MB, STILL_S = 1.0, 0.25
PATIENCE_S = 20.0

AfterEach = Callable[[], None]
"""Called when a timed ride has ended: for whoever watches."""


def unwatched() -> None:
    """Nobody watches."""


@dataclass(frozen=True, slots=True)
class Ride:
    """One job as its client saw it. Times are seconds on one monotonic clock.

    enqueued_at: when it was sent, or when it was to arrive, whichever the client can know.
    """

    enqueued_at: float
    token_times: tuple[float, ...]
    ended_at: float
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """One timed run.

    load_cpu_s: CPU seconds that the load generator used meanwhile, where it is a process of its own.
    features: what the worker tells of itself. other_cores: cores that neither this process nor its children used,
    but somebody did; None where nobody can say. profile: what a step was made of, if that was asked for.
    """

    rides: tuple[Ride, ...]
    wall_s: float
    load_cpu_s: float
    num_preemptions: int
    peak_rss_mb: float
    features: Mapping[str, Any]
    other_cores: float | None = None
    profile: Mapping[str, Any] | None = None


def peak_rss_mb(pid: int | str = "self") -> float:
    """The highest resident memory of a program on this machine, in MB; 0 where /proc does not say."""
    return _status_mb(pid, "VmHWM:")


def _status_mb(pid: int | str, name: str) -> float:
    status = Path(f"/proc/{pid}/status")
    if not status.exists():
        return 0.0
    for line in status.read_text().splitlines():
        if line.startswith(name):
            return round(int(line.split()[1]) / 1_000, 1)
    return 0.0


def await_memory(pid: int | str = "self") -> None:
    """Until a program no longer takes memory: a worker has its cache populated in the background after its start.

    So that cost belongs to the start, as it does with engines that pay it before they are ready.
    """
    before, deadline = -STILL_MB, time.monotonic() + PATIENCE_S
    while (now := _status_mb(pid, "VmRSS:")) - before >= STILL_MB and time.monotonic() < deadline:
        before = now
        time.sleep(STILL_S)
