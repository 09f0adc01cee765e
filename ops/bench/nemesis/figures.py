"""From a ledger to the figures of the report. Pure: observations in, numbers out."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tests.faults.ledger import Ledger

Times = Mapping[tuple[str, str], Sequence[float]]
"""(job, reader) -> when each of its events was read, in order; seconds on one monotonic clock."""


@dataclass(frozen=True, slots=True)
class Stall:
    """A silence within one stream: between two of its events."""

    began_at: float
    ended_at: float

    @property
    def length_s(self) -> float:
        return self.ended_at - self.began_at


@dataclass(frozen=True, slots=True)
class Tally:
    """What workers computed. num_sampled: tokens. num_computed: positions run through the model, prompts included."""

    num_sampled: int = 0
    num_computed: int = 0


def event_times(ledger: Ledger) -> dict[tuple[str, str], list[float]]:
    """Of every reader of every job."""
    read: dict[tuple[str, str], list[float]] = defaultdict(list)
    for line in ledger.of("event"):
        read[line.job, line.reader].append(line.at)
    return dict(read)


def stalls(times: Times) -> list[Stall]:
    """Every silence between two events of a stream, however short."""
    return [Stall(sooner, later) for at in times.values() for sooner, later in pairwise(at)]


def longest_s(found: Iterable[Stall]) -> float:
    return max((stall.length_s for stall in found), default=0.0)


def slowest_first_s(ledger: Ledger, times: Times) -> float:
    """The longest that an accepted job waited for its first event."""
    accepted = {line.job: line.at for line in ledger.of("accepted")}
    return max((at[0] - accepted[job] for (job, _), at in times.items() if at and job in accepted), default=0.0)


def recoveries_s(faults: Sequence[float], found: Iterable[Stall], normal_s: float) -> list[float]:
    """For each fault, seconds until the last stream that it silenced went on; 0 if it silenced none.

    Silenced: for longer than `normal_s`, the longest silence of the undisturbed run. A silence belongs to the last
    fault before its end; one that was over before, to none.
    """
    bounds = [*faults, float("inf")]
    ends = [stall.ended_at for stall in found if stall.length_s > normal_s]
    return [
        max((end - fault for end in ends if fault < end <= next_fault), default=0.0)
        for fault, next_fault in pairwise(bounds)
    ]


def tokens_shown(ledger: Ledger, start: float, end: float) -> int:
    """Tokens that readers were given in [start, end). A job has one reader here."""
    return sum(len(line.event.token_ids) for line in ledger.of("event") if start <= line.at < end)


def num_resumed(ledger: Ledger) -> int:
    """How often another claim went on with an answer that had begun."""
    return sum(1 for line in ledger.of("event") if '"resumed_tokens"' in line.payload)


def tally_of(folder: Path) -> Tally:
    """Of all workers that ever lived: a line a step (tokens sampled, positions computed, preemptions)."""
    sampled = computed = 0
    for path in folder.glob("*.tally"):
        for line in path.read_text().splitlines():
            num_sampled, num_computed, *_ = map(int, line.split())
            sampled += num_sampled
            computed += num_computed
    return Tally(sampled, computed)


def percent_more(count: int, needed: int) -> float:
    """How much more than needed, in percent of what was needed; 0 for less."""
    return 100.0 * max(0, count - needed) / needed if needed else 0.0


def median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0
