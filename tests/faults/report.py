"""The figures of a run of all rows, as a table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from tests.faults.checker import Summary

HEAD = ("row", "jobs", "failed", "lost", "longest gap", "recovery", "done twice", "the fault hit")


class Row(Protocol):
    row: str
    summary: Summary
    notes: dict[str, object]

    @property
    def duplicate_percent(self) -> float: ...


def table(rows: Iterable[Row]) -> str:
    cells = [HEAD, *(_cells(row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(HEAD))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    lines.insert(1, "─" * max(map(len, lines)))
    return "\n".join(lines)


def _cells(row: Row) -> tuple[str, ...]:
    summary = row.summary
    return (
        row.row,
        str(summary.num_accepted),
        str(summary.num_otherwise),
        str(summary.num_lost),
        f"{summary.longest_gap_s:.2f} s",
        f"{summary.recovery_s:.2f} s",
        f"{row.duplicate_percent:.1f} %",
        ", ".join(f"{name}={value}" for name, value in row.notes.items()),
    )
