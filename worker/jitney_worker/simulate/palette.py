"""Colours of jobs: one each while that can be told apart, otherwise one for each kind."""

from __future__ import annotations

from jitney_worker.simulate.lengths import length_ranges
from jitney_worker.simulate.scenarios import Scenario, ScenarioJob

COLOURS = (
    *("#3b71d9", "#b64b06", "#11864d", "#8951c0", "#cc454f", "#846908", "#c04789", "#0b768a"),
    *("#7265d7", "#986008", "#578021", "#a247a8", "#077cb5", "#be3b65", "#787800", "#087a70"),
)
"""White words on any of them have a contrast of 4.5 to 1, and any of them on the page's dark ground one of 3 to 1."""


class Palette:
    """colours: those in use. legend: (colour, words) for the foot of the picture."""

    def __init__(self, scenario: Scenario) -> None:
        if len(scenario.jobs) <= len(COLOURS):
            self._numbers = {job.name: number for number, job in enumerate(scenario.jobs)}
            self.colours = COLOURS[: len(scenario.jobs)]
            self.legend = [(self.colours[0], "computing")]
            return
        kinds = length_ranges(scenario)
        self._numbers = {
            job.name: next(number for number, kind in enumerate(kinds) if job.num_output_tokens in kind)
            for job in scenario.jobs
        }
        self.colours = COLOURS[: len(kinds)]
        self.legend = [(colour, f"{kind} tokens") for colour, kind in zip(self.colours, kinds, strict=True)]

    def number(self, job: ScenarioJob) -> int:
        """Index of the job's colour."""
        return self._numbers[job.name]
