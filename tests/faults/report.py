"""The figures of a run of all rows, as a table for people."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tests.faults.checker import Summary


@dataclass(frozen=True, slots=True)
class Figures:
    """One row: what the checker counted, and what queue and workers say of the run.

    num_sampled: tokens that all workers computed, 0 where they keep no tally. num_takeovers: claims of a job beyond
    its first. num_late_writes: writes refused because their claim was over. notes: what else shows that the fault hit.
    """

    row: str
    summary: Summary
    lease_s: float
    num_sampled: int
    num_takeovers: int = 0
    num_late_writes: int = 0
    num_preemptions: int = 0
    notes: Mapping[str, object] = field(default_factory=dict)

    @property
    def duplicate_percent(self) -> float:
        """Tokens that were computed and never shown, because somebody computed them again (or nobody wanted them)."""
        shown = max(1, self.summary.num_tokens)
        return 100.0 * max(0, self.num_sampled - shown) / shown

    @property
    def gap_in_leases(self) -> float:
        return self.summary.longest_gap_s / self.lease_s


COLUMNS: Mapping[str, Callable[[Figures], str]] = {
    "fault": lambda row: row.row,
    "jobs": lambda row: str(row.summary.num_accepted),
    "failed": lambda row: _count(row.summary.num_otherwise),
    "lost": lambda row: _count(row.summary.num_lost),
    "taken over": lambda row: _count(row.num_takeovers),
    "late writes refused": lambda row: _count(row.num_late_writes),
    "preempted": lambda row: _count(row.num_preemptions),
    "reconnects": lambda row: _count(row.summary.num_reconnects),
    "longest gap": lambda row: f"{row.summary.longest_gap_s:.1f} s",
    "lease": lambda row: f"{row.lease_s:.1f} s",
    "gap/lease": lambda row: f"{row.gap_in_leases:.1f}",
    "recovery": lambda row: f"{row.summary.recovery_s:.1f} s" if row.summary.recovery_s else "–",
    "done twice": lambda row: f"{row.duplicate_percent:.1f} %" if row.num_sampled and row.summary.num_finished else "–",
    "besides": lambda row: ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in row.notes.items()),
}
LEFT = ("fault", "besides")

LEGEND = """\
failed: jobs that ended otherwise than they would have undisturbed (only where the row means it: poison, cancels).
lost: accepted jobs that the server itself forgot, each reader told. taken over: claims beyond a job's first.
longest gap: between two events of one client's stream; the lease is what a death may cost. recovery: from the
first fault until every stream went on. done twice: tokens computed and not shown, in percent of those shown."""


def table(rows: Sequence[Figures]) -> str:
    """One line a row, the sums, and what the columns mean."""
    cells = [tuple(COLUMNS), *(tuple(cell(row) for cell in COLUMNS.values()) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(COLUMNS))]
    head, *body = [_line(line, widths) for line in cells]
    rule = "─" * max(map(len, (head, *body)))
    return "\n".join((_machine(), "", head, rule, *body, rule, _sums(rows), "", LEGEND))


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    pairs = zip(COLUMNS, cells, widths, strict=True)
    return "  ".join(cell.ljust(width) if name in LEFT else cell.rjust(width) for name, cell, width in pairs).rstrip()


def _machine() -> str:
    return (
        f"Python {platform.python_version()} on {os.cpu_count()} cores of {platform.machine()}, "
        f"load at the end {os.getloadavg()[0]:.1f}"
    )


def _sums(rows: Sequence[Figures]) -> str:
    worst = max(rows, key=lambda row: row.gap_in_leases)
    return (
        f"{len(rows)} rows: {sum(row.summary.num_accepted for row in rows)} jobs accepted, "
        f"{sum(row.summary.num_tokens for row in rows)} tokens compared one by one, "
        f"{sum(row.summary.num_lost for row in rows)} lost with their server, "
        f"{sum(row.num_takeovers for row in rows)} taken over, {sum(row.num_late_writes for row in rows)} late writes "
        f"refused; longest gap in leases {worst.gap_in_leases:.1f} ({worst.row})."
    )


def _count(number: int) -> str:
    return str(number) if number else "–"
