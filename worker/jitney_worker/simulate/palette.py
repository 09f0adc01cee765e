"""Colours of jobs: one each while that can be told apart, otherwise one for each range of lengths."""

from __future__ import annotations

from bisect import bisect_right

from jitney_worker.simulate.scenarios import Scenario, ScenarioJob

_COLOURS = ("#2f6fdb", "#e07b39", "#2a9d6f", "#9b5fc0", "#c9473f", "#8a6d3b", "#d45d9a", "#4a8fa8")
_MAX_RANGES = 6


class Palette:
    """colours: those in use. legend: (colour, words) for the foot of the picture."""

    def __init__(self, scenario: Scenario) -> None:
        if len(scenario.jobs) <= len(_COLOURS):
            self._numbers = {job.name: number for number, job in enumerate(scenario.jobs)}
            self.colours = _COLOURS[: len(scenario.jobs)]
            self.legend = [(self.colours[0], "computing")]
            return
        lengths = sorted(job.num_output_tokens for job in scenario.jobs)
        starts = _range_starts(lengths)
        self._numbers = {job.name: bisect_right(starts, job.num_output_tokens) - 1 for job in scenario.jobs}
        self.colours = _COLOURS[: len(starts)]
        self.legend = list(zip(self.colours, _range_words(lengths, starts), strict=True))

    def number(self, job: ScenarioJob) -> int:
        """Index of the job's colour."""
        return self._numbers[job.name]


def _range_starts(lengths: list[int]) -> list[int]:
    """The shortest length of each range: every length its own range, or about as many jobs in each of six."""
    distinct = sorted(set(lengths))
    if len(distinct) <= _MAX_RANGES:
        return distinct
    return sorted({lengths[len(lengths) * part // _MAX_RANGES] for part in range(_MAX_RANGES)})


def _range_words(lengths: list[int], starts: list[int]) -> list[str]:
    words = []
    for start, after in zip(starts, [*starts[1:], lengths[-1] + 1], strict=True):
        last = max(length for length in lengths if start <= length < after)
        words.append(f"{start:,} tokens" if start == last else f"{start:,} to {last:,}")
    return words
