"""Kinds of jobs: those of one length, or of one range of lengths where there are many."""

from __future__ import annotations

from dataclasses import dataclass

from jitney_worker.simulate.scenarios import Scenario

_MAX_RANGES = 6


@dataclass(frozen=True, slots=True)
class LengthRange:
    """Output tokens from `first` to `last`, both included and both taken by some job."""

    first: int
    last: int

    def __contains__(self, length: int) -> bool:
        return self.first <= length <= self.last

    def __str__(self) -> str:
        return f"{self.first:,}" if self.first == self.last else f"{self.first:,} to {self.last:,}"


def length_ranges(scenario: Scenario) -> list[LengthRange]:
    """Every length as a range of its own, or six ranges with about as many jobs in each."""
    lengths = sorted(job.num_output_tokens for job in scenario.jobs)
    starts = sorted(set(lengths))
    if len(starts) > _MAX_RANGES:
        starts = sorted({lengths[len(lengths) * part // _MAX_RANGES] for part in range(_MAX_RANGES)})
    return [
        LengthRange(start, max(length for length in lengths if start <= length < after))
        for start, after in zip(starts, [*starts[1:], lengths[-1] + 1], strict=True)
    ]
