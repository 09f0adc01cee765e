"""What is simulated: jobs as plain figures, from the project's own list or from a file."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from jitney.errors import InvalidJob
from jitney.sampling import explain

MAX_TOKENS = 1_000_000


@dataclass(frozen=True, slots=True)
class ScenarioJob:
    """A job as the scheduler sees it. It is in the queue before step `arrival_step + 1`; ties go by list order.

    num_output_tokens: it generates exactly so many.
    """

    name: str
    num_output_tokens: int
    num_prompt_tokens: int = 1
    arrival_step: int = 0
    arrival_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """Jobs in the order of their arrival, and what to show of them.

    shown_steps: steps at which the table of seats looks; none = evenly spaced over the run.
    """

    name: str
    title: str
    jobs: tuple[ScenarioJob, ...]
    shown_steps: tuple[int, ...] = ()


WORKED_EXAMPLE = Scenario(
    "worked-example",
    "four jobs at once, and a fifth just after them",
    tuple(ScenarioJob(name, n) for name, n in (("A", 100), ("B", 20), ("C", 50), ("D", 200), ("E", 30))),
    shown_steps=(0, 20, 50, 100, 200),
)

HUNDRED_JOBS = Scenario(
    "hundred-jobs",
    "fifty jobs of 20 tokens and fifty of 200, taking turns",
    tuple(ScenarioJob(f"{n + 1:03}", 200 if n % 2 else 20) for n in range(100)),
)

SIXTEEN_LENGTHS = (30, 30, 400, 30, 400, 400, 30, 30, 30, 400, 30, 30, 30, 30, 30, 400)

SIXTEEN_JOBS = Scenario(
    "sixteen-jobs",
    "sixteen jobs, eleven of 30 tokens and five of 400",
    tuple(ScenarioJob(f"{n + 1:02}", length) for n, length in enumerate(SIXTEEN_LENGTHS)),
)

SCENARIOS = {scenario.name: scenario for scenario in (WORKED_EXAMPLE, HUNDRED_JOBS, SIXTEEN_JOBS)}


class JobLine(BaseModel):
    """One line of a scenario file. At most one of `arrival_step` and `arrival_s`; without either, at the start."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str = Field(min_length=1, max_length=64)
    max_tokens: int = Field(ge=1, le=MAX_TOKENS)
    num_prompt_tokens: int = Field(1, ge=1, le=MAX_TOKENS)
    arrival_step: int | None = Field(None, ge=0)
    arrival_s: float | None = Field(None, ge=0)

    @model_validator(mode="after")
    def _one_arrival(self) -> JobLine:
        if self.arrival_step is not None and self.arrival_s is not None:
            raise ValueError("arrival_step and arrival_s exclude each other")
        return self

    def job(self, step_s: float) -> ScenarioJob:
        """The job on a clock of `step_s` a step. Whoever arrives during a step is in the queue at its end."""
        step = self.arrival_step or 0
        seconds = step * step_s
        if self.arrival_s is not None:
            # Rounded first: 0.14 s on a clock of 0.02 s is 7 steps, not 7.000000000000001 and so 8.
            step, seconds = ceil(round(self.arrival_s / step_s, 9)), self.arrival_s
        return ScenarioJob(self.name, self.max_tokens, self.num_prompt_tokens, step, seconds)


def read_scenario(path: Path, step_s: float) -> Scenario:
    """A scenario from a file of one JSON object a line; empty lines are skipped.

    Raises InvalidJob, naming the line, for anything that is not a `JobLine`, and for a name used twice.
    """
    jobs: dict[str, ScenarioJob] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            job = JobLine.model_validate_json(line).job(step_s)
        except ValidationError as error:
            complaint = explain(error)
            sentence = str(complaint).removeprefix(": ")
            raise InvalidJob(f"{path.name} line {number}: {sentence}", param=complaint.param) from None
        if job.name in jobs:
            raise InvalidJob(f"{path.name} line {number}: the name {job.name!r} is used twice", param="name")
        jobs[job.name] = job
    if not jobs:
        raise InvalidJob(f"{path.name} holds no job: at least one line is needed")
    in_order = sorted(jobs.values(), key=lambda job: job.arrival_step)
    return Scenario(path.stem, f"{len(jobs)} jobs of {path.name}", tuple(in_order))
