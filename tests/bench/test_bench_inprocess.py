"""The engine in this process, and what its steps are made of."""

from __future__ import annotations

import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from ops.bench.step_cost import IdleRunner

from jitney.errors import ModelError, PromptTooLong
from jitney_worker.bench.inprocess import measure_engine, num_tokens_needed, ride_engine
from jitney_worker.bench.naive import load_naive, measure_naive
from jitney_worker.bench.profile import StepProfile
from jitney_worker.bench.report import figures
from jitney_worker.bench.workloads import BenchJob, Workload, load_workload
from jitney_worker.engine.engine import LocalEngine
from jitney_worker.engine.protocol import ModelOutput, RowFailure, Sampled, SchedulerOutput
from jitney_worker.engine.settings import EngineSettings
from jitney_worker.model.runner import load_runner


def idle_engine(*, num_blocks: int = 400, seats: int = 4, policy: str = "continuous") -> LocalEngine:
    """An engine whose model costs nothing."""
    settings = EngineSettings(
        max_model_len=512,
        num_blocks=num_blocks,
        max_num_seqs=seats,
        enable_prefix_caching=False,
        admission_reserve=0.0,
        policy=policy,  # type: ignore[arg-type]
    )
    return LocalEngine(settings, IdleRunner())


def jobs(*lengths: int, prompt_tokens: int = 4) -> tuple[BenchJob, ...]:
    return tuple(BenchJob(tuple(range(3, 3 + prompt_tokens)), length) for length in lengths)


def workload(*given: BenchJob, repeats: int = 1, warm: tuple[BenchJob, ...] = ()) -> Workload:
    return Workload("W5", "tiny", given, 4, warm, repeats=repeats)


def test_every_job_gets_exactly_its_tokens_and_rides_stand_in_the_order_of_jobs() -> None:
    rides = ride_engine(idle_engine(), jobs(5, 1, 9, 2, 7))
    assert [len(ride.token_ids) for ride in rides] == [5, 1, 9, 2, 7]
    for ride in rides:
        assert len(ride.token_times) == len(ride.token_ids)
        assert list(ride.token_times) == sorted(ride.token_times)
        assert ride.enqueued_at <= ride.token_times[0]
        assert ride.ended_at == ride.token_times[-1]


def test_a_job_joins_when_it_arrives_and_not_before() -> None:
    late, early = BenchJob((3, 4), 2, arrives_at_s=0.05), BenchJob((3, 4), 2)
    first, second = ride_engine(idle_engine(), (late, early))
    assert first.enqueued_at - second.enqueued_at == pytest.approx(0.05)
    assert second.ended_at < first.enqueued_at <= first.token_times[0]


def test_a_job_that_arrives_meanwhile_joins_those_who_ride() -> None:
    """The long one is still running when the other comes: nobody waits for an empty engine."""
    engine, shared = idle_engine(), []
    long, late = BenchJob((3, 4), 400), BenchJob((3, 4), 400, arrives_at_s=0.0005)
    ride_engine(engine, (long, late), after_step=lambda: shared.append(engine.capacity().num_running))
    assert shared[0] == 1
    assert max(shared) == 2


def test_the_best_of_so_many_runs_counts_and_the_warm_up_does_not() -> None:
    engine = idle_engine()
    run = measure_engine(engine, workload(*jobs(3, 3), repeats=3, warm=jobs(8)), {"dtype": "none"}, profiled=True)
    assert run.profile is not None
    assert (run.profile["num_steps"], run.profile["mean_batch"]) == (3, 2.0)
    assert engine.snapshot().num_generated_tokens == 8 + 3 * 6
    assert (run.num_preemptions, run.load_cpu_s, run.features) == (0, 0.0, {"dtype": "none"})


class TiringRunner:
    """Says the number of the run, and is quick in the second one alone: a run is over with a sequence's two tokens."""

    def __init__(self) -> None:
        self.num_steps = 0

    def execute(self, scheduled: SchedulerOutput) -> ModelOutput:
        self.num_steps += 1
        number = (self.num_steps + 1) // 2
        until = time.perf_counter() + (0.0 if number == 2 else 0.2)
        while time.perf_counter() < until:
            pass
        return ModelOutput([Sampled(number) for item in scheduled.scheduled if item.samples])


def test_of_several_runs_the_quickest_is_told() -> None:
    engine = LocalEngine(EngineSettings(max_model_len=64, num_blocks=8), TiringRunner())
    run = measure_engine(engine, workload(*jobs(2), repeats=3), {})
    assert [ride.token_ids for ride in run.rides] == [(2, 2)]


def test_preemptions_are_those_of_the_timed_run_alone() -> None:
    engine = idle_engine(num_blocks=6)
    many = jobs(40, 40, 40, 40)
    ride_engine(engine, many)
    before = engine.snapshot().num_preemptions
    run = measure_engine(engine, workload(*many), {})
    assert before > 0
    assert run.num_preemptions == engine.snapshot().num_preemptions - before == before


def test_tokens_needed_are_those_of_a_run_without_preemption() -> None:
    engine, given = idle_engine(), jobs(5, 1, 9, prompt_tokens=7)
    ride_engine(engine, given)
    assert engine.num_computed_tokens == num_tokens_needed(given) == 3 * 7 + 15 - 3


def test_what_can_never_run_is_refused_with_its_numbers() -> None:
    with pytest.raises(PromptTooLong):
        ride_engine(idle_engine(), jobs(5, prompt_tokens=600))


class FailingRunner:
    def execute(self, scheduled: SchedulerOutput) -> ModelOutput:
        return ModelOutput([RowFailure("numbers", "NaN") for item in scheduled.scheduled if item.samples])


def test_a_sequence_that_fails_makes_the_run_worthless() -> None:
    engine = LocalEngine(EngineSettings(max_model_len=64, num_blocks=8), FailingRunner())
    with pytest.raises(ModelError, match="failed: NaN"):
        ride_engine(engine, jobs(2))


def test_a_profile_counts_steps_rows_and_tokens_and_its_parts_make_up_the_wall() -> None:
    engine = idle_engine()
    profile = StepProfile(engine)
    ride_engine(engine, jobs(9))
    profile.reset()
    ride_engine(engine, jobs(2, 4))
    report = profile.report(wall_s=1.0)
    assert (report["num_steps"], report["mean_batch"]) == (4, 6 / 4)
    assert report["mean_tokens"] == (2 * 4 + 1 + 1 + 1 + 1) / 4
    assert sum(report["parts_ms"].values()) == pytest.approx(1_000 / 4, abs=0.001)
    assert set(report["parts_ms"]) == {"schedule", "runner", "commit", "engine", "between"}
    profile.reset()
    assert profile.report(1.0) == {"num_steps": 0}


@pytest.mark.parametrize(("dtype", "kernels", "head"), [("float32", "torch", "logits"), ("bfloat16", "auto", None)])
def test_a_real_runner_is_split_into_what_its_decoder_does_and_the_rest(
    dtype: str, kernels: Any, head: str | None, tiny_model: Path
) -> None:
    """Compiled kernels draw tokens themselves; which machine has them is not this test's business."""
    runner = load_runner(tiny_model, dtype=dtype, kernels=kernels, num_blocks=64, num_threads=1)
    engine = LocalEngine(EngineSettings(max_model_len=512, num_blocks=64, enable_prefix_caching=False), runner)
    run = measure_engine(engine, workload(*jobs(3, 5)), {}, profiled=True)
    assert run.profile is not None
    parts = run.profile["parts_ms"]
    head = head or ("choose" if hasattr(runner.decoder, "choose") else "logits")
    assert set(parts) == {"schedule", "forward", head, "runner", "commit", "engine", "between"}
    assert all(parts[name] > 0 for name in ("schedule", "forward", head, "runner", "commit"))
    assert run.profile["step_ms"]["p50"] <= run.profile["step_ms"]["p99"]


@pytest.mark.parametrize("name", ["W1", "W7G"])
def test_the_engine_says_what_transformers_says_one_job_at_a_time(
    name: str, tiny_model: Path, tiny_workload: Path
) -> None:
    """End tokens are ignored by both, not avoided: the ids are the same."""
    given = load_workload(tiny_workload, name)
    runner = load_runner(tiny_model, dtype="float32", num_blocks=200, num_threads=1)
    engine = LocalEngine(EngineSettings(max_model_len=512, num_blocks=200), runner)
    ours = measure_engine(engine, given, {})
    ended = count()
    naive = measure_naive(load_naive(tiny_model, "float32", 1), given, lambda: next(ended))
    assert [ride.token_ids for ride in ours.rides] == [ride.token_ids for ride in naive.rides]
    assert next(ended) == len(given.jobs) * given.repeats
    result = figures(given, "naive", naive)
    assert (result["dtype"], result["engine"]) == ("float32", {"max_num_seqs": 1})
    assert all(len(ride.token_times) == len(ride.token_ids) for ride in naive.rides)
    assert all(a.ended_at <= b.token_times[0] for a, b in zip(naive.rides, naive.rides[1:], strict=False))


def test_naive_sampling_is_repeated_by_its_seed(tiny_model: Path, tiny_workload: Path) -> None:
    model, given = load_naive(tiny_model, "float32", 1), load_workload(tiny_workload, "W7", limit=2)
    first, second = (measure_naive(model, given).rides for _ in range(2))
    assert [ride.token_ids for ride in first] == [ride.token_ids for ride in second]
    greedy = measure_naive(model, load_workload(tiny_workload, "W7G", limit=2)).rides
    assert [ride.token_ids for ride in first] != [ride.token_ids for ride in greedy]
