"""Was anybody else at work meanwhile? CPU time of the machine less that of our own tree of processes, from /proc.

Standard library alone: engines that are compared with this one import it from environments of their own.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

DISTURBED_CORES = 0.2
"""A run during which others took more than so many cores is not counted."""

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Reading:
    """Seconds: a clock, CPU time that the machine has spent since its start, and our tree's part of it."""

    at: float
    busy_s: float
    own_s: float


def reading(root: int | None = None) -> Reading | None:
    """Now, for the tree of processes under `root` (this one). None on a system without /proc/stat."""
    try:
        return Reading(time.monotonic(), _busy_s(), _tree_s(os.getpid() if root is None else root))
    except OSError:
        return None


def other_cores(before: Reading | None, after: Reading | None) -> float | None:
    """Cores that somebody else used between two readings, time taken by the hypervisor included.

    Both clocks tick a hundred times a second: of much less than a second it says little.
    """
    if before is None or after is None or after.at <= before.at:
        return None
    others = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    return round(max(0.0, others / (after.at - before.at)), 3)


def is_disturbed(cores: float | None, most: float = DISTURBED_CORES) -> bool:
    """True if so much CPU time of others spoils a run; what nobody could measure does not."""
    return cores is not None and cores > most


def _busy_s(stat: Path = _PROC / "stat") -> float:
    """All but idle and waiting for the disk: user, nice, system, both kinds of interrupts, steal."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, stat.read_text().split("\n", 1)[0].split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _tree_s(root: int, proc: Path = _PROC) -> float:
    """A process and all its descendants, with those that have ended and were waited for."""
    ticks: dict[int, int] = {}
    children: defaultdict[int, list[int]] = defaultdict(list)
    for entry in proc.iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):  # it has just ended
                continue
            children[int(fields[1])].append(int(entry.name))
            ticks[int(entry.name)] = sum(map(int, fields[11:15]))
    total, left = 0, [root]
    while left:
        pid = left.pop()
        total += ticks.get(pid, 0)
        left += children[pid]
    return total / os.sysconf("SC_CLK_TCK")
