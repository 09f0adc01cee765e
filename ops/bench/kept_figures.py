"""What is left of an answer, as figures and as tables. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ops.bench import page

NUM_TOKENS = 100
"""Of every answer."""

MOMENTS = ("before its first job", "after the first round", "after the last")
"""At which the worker is looked at."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What a server keeps at one moment.

    num_bytes: of all its memory but clients' buffers and what is on its way to the file. num_keys: but those that
    come and go with workers. answers_bytes: of the keys of jobs, one by one, as `MEMORY USAGE` counts them.
    """

    num_bytes: int
    num_keys: int
    answers_bytes: int


@dataclass(frozen=True, slots=True)
class Round:
    """A server before a round of jobs, after it, and with less and less of it.

    ledger_bytes: what the round added to the usage ledger, which stays until it has a million entries.
    """

    idle: Kept
    ended: Kept
    folded: Kept
    expired: Kept
    ledger_bytes: int
    num_events: int


@dataclass(frozen=True, slots=True)
class Machine:
    """The worker at one moment. num_connections: its own; the measuring one is not counted."""

    rss_mb: float
    num_connections: int
    num_held_blocks: int


@dataclass(frozen=True, slots=True)
class Leftovers:
    """One server's figures. machines: before the first job, after the round that warms it, after the last one."""

    server: str
    num_jobs: int
    rounds: Sequence[Round]
    machines: Sequence[Machine]

    @property
    def ended_bytes(self) -> float:
        """Of one answer."""
        return statistics.median(one.ended.answers_bytes for one in self.rounds) / self.num_jobs

    @property
    def folded_bytes(self) -> float:
        """Of one answer."""
        return statistics.median(one.folded.answers_bytes for one in self.rounds) / self.num_jobs

    @property
    def ledger_bytes(self) -> float:
        """Of one job."""
        return sum(one.ledger_bytes for one in self.rounds) / (self.num_jobs * len(self.rounds))

    @property
    def expired_bytes(self) -> int:
        """Of all answers of all rounds together."""
        ledger = sum(one.ledger_bytes for one in self.rounds)
        return self.rounds[-1].expired.num_bytes - self.rounds[0].idle.num_bytes - ledger

    @property
    def num_events(self) -> float:
        """Of one answer."""
        return sum(one.num_events for one in self.rounds) / (self.num_jobs * len(self.rounds))


BYTES_HEAD = ("server", "events", "just ended", "folded", "all expired", "ledger entry", "keys: before", "after")
WORKER_HEAD = ("server", "", "resident memory", "of before", "connections", "blocks held")


def bytes_cells(one: Leftovers) -> list[str]:
    return [
        one.server,
        f"{one.num_events:.0f}",
        f"{one.ended_bytes:,.0f} B",
        f"{one.folded_bytes:,.0f} B",
        f"{one.expired_bytes:+,} B in all",
        f"{one.ledger_bytes:,.0f} B",
        str(one.rounds[0].idle.num_keys),
        str(one.rounds[-1].expired.num_keys),
    ]


def worker_cells(one: Leftovers, moment: int) -> list[str]:
    first, now = one.machines[0], one.machines[moment]
    return [
        one.server,
        MOMENTS[moment],
        f"{now.rss_mb:,.1f} MB",
        page.times(now.rss_mb, first.rss_mb),
        str(now.num_connections),
        str(now.num_held_blocks),
    ]


def text(found: Sequence[Leftovers], model: str, machine: str) -> str:
    num_rounds = len(found[0].rounds)
    return "\n\n".join(
        (
            page.paragraph(
                f"`python -m ops.bench.kept_bytes`, model `{model}`: answers of {NUM_TOKENS} tokens with text, one",
                f"round of {found[0].num_jobs} to warm the worker and {num_rounds} that count. {machine}.",
            ),
            page.table(BYTES_HEAD, [bytes_cells(one) for one in found]),
            page.paragraph(
                "*Events*: of an answer. *Just ended*, *folded*: bytes of one answer's keys, as `MEMORY USAGE` counts",
                f"them. *All expired*: what the {num_rounds * found[0].num_jobs:,} answers together left behind in all",
                "of the server's memory, whose tables and buffers come and go. *Ledger entry*: what stays of a job in",
                "`:usage`, the oldest dropped beyond a million. *Keys*: but those that come and go with workers.",
            ),
            page.table(WORKER_HEAD, [worker_cells(one, moment) for one in found for moment in range(len(MOMENTS))]),
        )
    )


def row_of(one: Leftovers) -> dict[str, Any]:
    """For programs."""
    return {
        "server": one.server,
        "jobs_a_round": one.num_jobs,
        "events_per_answer": round(one.num_events, 1),
        "ended_bytes": round(one.ended_bytes),
        "folded_bytes": round(one.folded_bytes),
        "expired_bytes_in_all": one.expired_bytes,
        "ledger_bytes": round(one.ledger_bytes, 1),
        "keys": [one.rounds[0].idle.num_keys, one.rounds[-1].expired.num_keys],
        "worker": {name: asdict(at) for name, at in zip(MOMENTS, one.machines, strict=True)},
    }
