"""Colours of jobs: one each while that can be told apart, otherwise one for each kind."""

from __future__ import annotations

from jitney_worker.simulate.lengths import length_ranges
from jitney_worker.simulate.scenarios import Scenario, ScenarioJob

_COLOURS = ("#2f6fdb", "#e07b39", "#2a9d6f", "#9b5fc0", "#c9473f", "#8a6d3b", "#d45d9a", "#4a8fa8")


class Palette:
    """colours: those in use. legend: (colour, words) for the foot of the picture."""

    def __init__(self, scenario: Scenario) -> None:
        if len(scenario.jobs) <= len(_COLOURS):
            self._numbers = {job.name: number for number, job in enumerate(scenario.jobs)}
            self.colours = _COLOURS[: len(scenario.jobs)]
            self.legend = [(self.colours[0], "computing")]
            return
        kinds = length_ranges(scenario)
        self._numbers = {
            job.name: next(number for number, kind in enumerate(kinds) if job.num_output_tokens in kind)
            for job in scenario.jobs
        }
        self.colours = _COLOURS[: len(kinds)]
        self.legend = [(colour, f"{kind} tokens") for colour, kind in zip(self.colours, kinds, strict=True)]

    def number(self, job: ScenarioJob) -> int:
        """Index of the job's colour."""
        return self._numbers[job.name]
