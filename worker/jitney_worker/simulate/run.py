"""The real scheduler and block manager on a virtual clock: every step takes the same time, whatever it computes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import ceil
from statistics import mean
from typing import Any, Literal

from jitney.progress import Tells
from jitney_worker.engine.engine import LocalEngine
from jitney_worker.engine.protocol import ModelOutput, Sampled, SchedulerOutput, SequenceDelta
from jitney_worker.engine.sequence import SequenceId, SequenceParams, SequenceRequest
from jitney_worker.engine.settings import EngineSettings
from jitney_worker.simulate.scenarios import Scenario, ScenarioJob

PolicyName = Literal["naive", "static", "continuous"]
POLICIES: tuple[PolicyName, ...] = ("naive", "static", "continuous")
"""`naive` is one seat: a job at a time, each with the engine to itself."""

_BLOCK_SIZE = 16
_TELL_EVERY = 256
_TOKEN = Sampled(0)


@dataclass(frozen=True, slots=True)
class JobRun:
    """How a job fared. Step counts are steps completed: before its first, at its end, and when its seat was free.

    seat: from 0, the lowest free one when it began. free_step is later than end_step where an ended job holds its
    seat until its batch is over. completion_s: from arrival to last token.
    """

    job: ScenarioJob
    seat: int
    start_step: int
    end_step: int
    free_step: int
    completion_s: float


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """A scenario under one policy."""

    policy: PolicyName
    num_seats: int
    step_s: float
    jobs: tuple[JobRun, ...]

    @property
    def num_steps(self) -> int:
        """Steps until the last job ended, idle ones between late arrivals included."""
        return max(run.end_step for run in self.jobs)

    @property
    def num_output_tokens(self) -> int:
        return sum(run.job.num_output_tokens for run in self.jobs)

    @property
    def total_s(self) -> float:
        return round(self.num_steps * self.step_s, 9)

    @property
    def tokens_per_s(self) -> float:
        return self.num_output_tokens / self.total_s

    @property
    def mean_completion_s(self) -> float:
        return round(mean(run.completion_s for run in self.jobs), 9)

    @property
    def busy_share(self) -> float:
        """Share of all seat-steps that computed something."""
        return sum(run.end_step - run.start_step for run in self.jobs) / (self.num_seats * self.num_steps)

    @property
    def num_full_steps(self) -> int:
        """Steps that perfectly full seats would need, were every prompt read in the step of its first token."""
        return ceil(self.num_output_tokens / self.num_seats)

    def seats_at(self, step: int) -> list[JobRun | None]:
        """Who sits where once `step` steps are completed; an ended job still sits there if it holds its seat."""
        seats: list[JobRun | None] = [None] * self.num_seats
        for run in self.jobs:
            if run.start_step <= step < run.free_step:
                seats[run.seat] = run
        return seats

    def waiting_at(self, step: int) -> list[JobRun]:
        """Who has arrived and not begun once `step` steps are completed."""
        return [run for run in self.jobs if run.job.arrival_step <= step < run.start_step]

    def wire(self) -> dict[str, Any]:
        """The run as it stands in the JSON file."""
        return {
            "total_s": self.total_s,
            "num_steps": self.num_steps,
            "tokens_per_s": self.tokens_per_s,
            "mean_completion_s": self.mean_completion_s,
            "jobs": {
                run.job.name: {
                    "start_step": run.start_step,
                    "end_step": run.end_step,
                    "completion_s": run.completion_s,
                }
                for run in self.jobs
            },
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """One scenario under every policy."""

    scenario: Scenario
    num_seats: int
    step_s: float
    runs: tuple[PolicyRun, ...]

    def run(self, policy: PolicyName) -> PolicyRun:
        """The run under one policy."""
        return next(run for run in self.runs if run.policy == policy)

    def wire(self) -> dict[str, Any]:
        """What `jitney simulate --json` writes."""
        return {run.policy: run.wire() for run in self.runs}


class _CountingRunner:
    """Stands in for the model: one token for whoever asks."""

    def execute(self, scheduled: SchedulerOutput) -> ModelOutput:
        return ModelOutput([_TOKEN for item in scheduled.scheduled if item.samples])


class _Lane:
    """One policy's engine with its own queue of arrivals; all lanes tick together."""

    def __init__(self, policy: PolicyName, scenario: Scenario, num_seats: int) -> None:
        self.policy = policy
        self.num_seats = 1 if policy == "naive" else num_seats
        self.spans: dict[str, tuple[int, int]] = {}
        self._engine = LocalEngine(_engine_settings(policy, scenario, self.num_seats), _CountingRunner())
        self._arrivals = deque(enumerate(scenario.jobs))
        self._completed_before: list[int] = [0]
        """Indexed by the engine's step number, which does not count idle ticks."""

    @property
    def has_work(self) -> bool:
        return bool(self._arrivals) or self._engine.has_work()

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return self._engine.snapshot().num_generated_tokens

    def tick(self, num_completed: int) -> None:
        """Take in whoever has arrived, and compute one step."""
        while self._arrivals and self._arrivals[0][1].arrival_step <= num_completed:
            self._engine.add(_request(*self._arrivals.popleft()))
        if not self._engine.has_work():
            return
        self._completed_before.append(num_completed)
        for delta in self._engine.step():
            self._note(delta, num_completed + 1)

    def _note(self, delta: SequenceDelta, num_completed: int) -> None:
        if delta.finish_reason is not None:
            self.spans[delta.id] = (self._completed_before[delta.joined_step], num_completed)


def simulate_policies(scenario: Scenario, *, num_seats: int, step_s: float, tell: Tells = lambda _: None) -> Comparison:
    """Run the scenario under every policy, in lockstep: each tick of the clock is one step of every engine.

    tell: is told now and then how many tokens all of them have come to.
    """
    lanes = [_Lane(policy, scenario, num_seats) for policy in POLICIES]
    num_completed = 0
    while any(lane.has_work for lane in lanes):
        for lane in lanes:
            lane.tick(num_completed)
        num_completed += 1
        if num_completed % _TELL_EVERY == 0:
            tell(sum(lane.num_tokens for lane in lanes))
    runs = tuple(PolicyRun(lane.policy, lane.num_seats, step_s, _job_runs(lane, scenario, step_s)) for lane in lanes)
    return Comparison(scenario, num_seats, step_s, runs)


def _engine_settings(policy: PolicyName, scenario: Scenario, num_seats: int) -> EngineSettings:
    """Memory and budget for every seat at once: what is compared is when seats are filled, nothing else."""
    longest = max(job.num_prompt_tokens + job.num_output_tokens for job in scenario.jobs)
    longest_prompt = max(job.num_prompt_tokens for job in scenario.jobs)
    return EngineSettings(
        max_model_len=longest,
        num_blocks=num_seats * ceil(longest / _BLOCK_SIZE),
        block_size=_BLOCK_SIZE,
        max_num_seqs=num_seats,
        max_num_batched_tokens=num_seats * longest_prompt,
        admission_reserve=0.0,
        enable_prefix_caching=False,
        policy="static" if policy == "static" else "continuous",
    )


def _request(place: int, job: ScenarioJob) -> SequenceRequest:
    return SequenceRequest(
        id=SequenceId(job.name),
        prompt_ids=(0,) * job.num_prompt_tokens,
        params=SequenceParams(max_tokens=job.num_output_tokens),
        order_key=(0, 0.0, 0, place),
    )


def _job_runs(lane: _Lane, scenario: Scenario, step_s: float) -> tuple[JobRun, ...]:
    """Give every job the lowest seat that is free when it begins; in the scenario's order."""
    free_steps = _free_steps(lane)
    free_from = [0] * lane.num_seats
    seats: dict[str, int] = {}
    for job in sorted(scenario.jobs, key=lambda job: lane.spans[job.name][0]):
        start = lane.spans[job.name][0]
        seats[job.name] = next(seat for seat in range(lane.num_seats) if free_from[seat] <= start)
        free_from[seats[job.name]] = free_steps[job.name]
    return tuple(
        JobRun(
            job=job,
            seat=seats[job.name],
            start_step=lane.spans[job.name][0],
            end_step=lane.spans[job.name][1],
            free_step=free_steps[job.name],
            completion_s=round(lane.spans[job.name][1] * step_s - job.arrival_s, 9),
        )
        for job in scenario.jobs
    )


def _free_steps(lane: _Lane) -> dict[str, int]:
    """When each job's seat was free again: at its end, or under `static` when the last of its batch had ended."""
    if lane.policy != "static":
        return {name: end for name, (_, end) in lane.spans.items()}
    batches: list[tuple[int, list[str]]] = []
    for name, (start, end) in sorted(lane.spans.items(), key=lambda span: span[1][0]):
        if batches and start < batches[-1][0]:
            batches[-1] = (max(batches[-1][0], end), [*batches[-1][1], name])
        else:
            batches.append((end, [name]))
    return {name: end for end, names in batches for name in names}
