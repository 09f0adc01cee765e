"""The figures that continuous batching is explained with, out of the scheduler that does it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jitney.errors import InvalidJob
from jitney_worker.simulate.run import Comparison, PolicyRun, simulate_policies
from jitney_worker.simulate.scenarios import (
    HUNDRED_JOBS,
    SIXTEEN_JOBS,
    SIXTEEN_LENGTHS,
    WORKED_EXAMPLE,
    JobLine,
    Scenario,
    ScenarioJob,
    read_scenario,
)


def compare(scenario: Scenario, *, num_seats: int = 4, step_s: float = 0.05) -> Comparison:
    return simulate_policies(scenario, num_seats=num_seats, step_s=step_s)


def completions(run: PolicyRun) -> dict[str, float]:
    return {job.job.name: job.completion_s for job in run.jobs}


def names_at(run: PolicyRun, step: int) -> list[str]:
    return [
        "·" if job is None else f"({job.job.name})" if job.end_step <= step else job.job.name
        for job in run.seats_at(step)
    ]


def test_worked_example_under_the_static_policy() -> None:
    run = compare(WORKED_EXAMPLE).run("static")
    assert completions(run) == {"A": 5.0, "B": 1.0, "C": 2.5, "D": 10.0, "E": 11.5}
    assert (run.mean_completion_s, run.total_s, run.num_steps) == (6.0, 11.5, 230)
    assert run.num_output_tokens == 400


def test_worked_example_under_the_continuous_policy() -> None:
    run = compare(WORKED_EXAMPLE).run("continuous")
    assert completions(run) == {"A": 5.0, "B": 1.0, "C": 2.5, "D": 10.0, "E": 2.5}
    assert (run.mean_completion_s, run.total_s, run.num_steps) == (4.2, 10.0, 200)
    assert run.num_output_tokens == 400
    late, early = run.jobs[4], run.jobs[1]
    assert (late.start_step, late.end_step) == (20, 50)
    assert late.seat == early.seat == 1


def test_worked_example_one_at_a_time() -> None:
    run = compare(WORKED_EXAMPLE).run("naive")
    assert completions(run) == {"A": 5.0, "B": 6.0, "C": 8.5, "D": 18.5, "E": 20.0}
    assert (run.mean_completion_s, run.total_s, run.tokens_per_s) == (11.6, 20.0, 20.0)
    assert {job.seat for job in run.jobs} == {0}


def test_the_late_job_of_the_worked_example_is_done_four_and_a_half_times_sooner() -> None:
    comparison = compare(WORKED_EXAMPLE)
    static, continuous = (comparison.run(policy).jobs[4].completion_s for policy in ("static", "continuous"))
    assert static / continuous == 4.6


def test_seats_of_the_worked_example_at_the_listed_steps() -> None:
    comparison = compare(WORKED_EXAMPLE)
    assert WORKED_EXAMPLE.shown_steps == (0, 20, 50, 100, 200)
    assert [names_at(comparison.run("static"), step) for step in WORKED_EXAMPLE.shown_steps] == [
        ["A", "B", "C", "D"],
        ["A", "(B)", "C", "D"],
        ["A", "(B)", "(C)", "D"],
        ["(A)", "(B)", "(C)", "D"],
        ["E", "·", "·", "·"],
    ]
    assert [names_at(comparison.run("continuous"), step) for step in WORKED_EXAMPLE.shown_steps] == [
        ["A", "B", "C", "D"],
        ["A", "E", "C", "D"],
        ["A", "·", "·", "D"],
        ["·", "·", "·", "D"],
        ["·", "·", "·", "·"],
    ]
    waiting = [[job.job.name for job in comparison.run("static").waiting_at(step)] for step in (0, 199, 200)]
    assert waiting == [["E"], ["E"], []]


def test_hundred_jobs_under_the_static_policy_take_twenty_five_batches() -> None:
    run = compare(HUNDRED_JOBS).run("static")
    assert len({job.start_step for job in run.jobs}) == 25
    assert (run.num_steps, run.total_s, run.tokens_per_s, run.num_output_tokens) == (5_000, 250.0, 44.0, 11_000)


def test_hundred_jobs_under_the_continuous_policy_come_near_to_full_seats() -> None:
    """2,750 steps would keep four seats full throughout. The tail adds 90: the last jobs are long ones."""
    run = compare(HUNDRED_JOBS).run("continuous")
    assert run.num_full_steps == 2_750
    assert (run.num_steps, run.total_s) == (2_840, 142.0)
    assert run.tokens_per_s == 11_000 / 142.0
    full = [step for step in range(run.num_steps) if None not in run.seats_at(step)]
    assert full == list(range(2_660)), "no seat is empty while anybody waits, nor for 20 steps more"
    assert run.waiting_at(2_639) != run.waiting_at(2_640) == []
    assert [job.job.name for job in run.jobs if job.end_step > 2_660] == ["096", "098", "100"]


def test_sixteen_jobs_are_a_fixed_mix_of_short_and_long_ones() -> None:
    comparison = compare(SIXTEEN_JOBS)
    assert [job.num_output_tokens for job in SIXTEEN_JOBS.jobs] == list(SIXTEEN_LENGTHS)
    assert sorted(SIXTEEN_LENGTHS) == [30] * 11 + [400] * 5
    assert {run.policy: (run.num_steps, run.mean_completion_s) for run in comparison.runs} == {
        "naive": (2_330, 64.78125),
        "static": (1_600, 37.28125),
        "continuous": (860, 16.5625),
    }


@pytest.mark.parametrize("scenario", [WORKED_EXAMPLE, HUNDRED_JOBS, SIXTEEN_JOBS])
@pytest.mark.parametrize("num_seats", [1, 3, 4, 7])
def test_no_seat_is_taken_twice_and_every_job_takes_a_step_a_token(scenario: Scenario, num_seats: int) -> None:
    for run in compare(scenario, num_seats=num_seats).runs:
        taken: dict[int, int] = {}
        for job in sorted(run.jobs, key=lambda job: job.start_step):
            assert job.start_step >= taken.get(job.seat, 0)
            assert job.end_step - job.start_step == job.job.num_output_tokens
            taken[job.seat] = job.free_step
        assert max(taken) < run.num_seats


def test_with_one_seat_all_policies_are_the_same() -> None:
    naive, static, continuous = compare(HUNDRED_JOBS, num_seats=1).runs
    assert naive.wire() == static.wire() == continuous.wire()


def test_the_wire_form_has_exactly_the_promised_shape() -> None:
    wire = compare(WORKED_EXAMPLE).wire()
    assert list(wire) == ["naive", "static", "continuous"]
    assert wire["continuous"] == {
        "total_s": 10.0,
        "num_steps": 200,
        "tokens_per_s": 40.0,
        "mean_completion_s": 4.2,
        "jobs": {
            "A": {"start_step": 0, "end_step": 100, "completion_s": 5.0},
            "B": {"start_step": 0, "end_step": 20, "completion_s": 1.0},
            "C": {"start_step": 0, "end_step": 50, "completion_s": 2.5},
            "D": {"start_step": 0, "end_step": 200, "completion_s": 10.0},
            "E": {"start_step": 20, "end_step": 50, "completion_s": 2.5},
        },
    }


def test_a_job_that_arrives_at_a_step_can_be_in_the_next_one() -> None:
    jobs = (ScenarioJob("early", 10), ScenarioJob("late", 5, arrival_step=3, arrival_s=0.15))
    run = compare(Scenario("s", "", jobs)).run("continuous")
    assert (run.jobs[1].start_step, run.jobs[1].end_step) == (3, 8)
    assert run.jobs[1].completion_s == 0.25


def test_the_clock_goes_on_while_nobody_is_there() -> None:
    jobs = (ScenarioJob("early", 2), ScenarioJob("late", 3, arrival_step=100, arrival_s=5.0))
    for run in compare(Scenario("s", "", jobs)).runs:
        assert (run.jobs[1].start_step, run.jobs[1].end_step) == (100, 103)
        assert run.num_steps == 103
        assert run.jobs[1].completion_s == 0.15


def test_a_prompt_of_any_length_is_read_in_the_step_of_its_first_token() -> None:
    jobs = tuple(ScenarioJob(f"j{n}", 4, num_prompt_tokens=5_000) for n in range(3))
    run = compare(Scenario("s", "", jobs), num_seats=3).run("continuous")
    assert [(job.start_step, job.end_step) for job in run.jobs] == [(0, 4)] * 3


def test_a_file_of_jobs_is_read_in_the_order_of_arrival(tmp_path: Path) -> None:
    lines = [
        {"name": "last", "max_tokens": 3, "arrival_s": 0.11},
        {"name": "first", "max_tokens": 7, "num_prompt_tokens": 9},
        {"name": "second", "max_tokens": 5, "arrival_step": 2},
        {"name": "on time", "max_tokens": 5, "arrival_s": 0.15},
    ]
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n", encoding="utf-8")
    scenario = read_scenario(path, 0.05)
    assert scenario.name == "mine"
    assert scenario.jobs == (
        ScenarioJob("first", 7, 9, 0, 0.0),
        ScenarioJob("second", 5, 1, 2, 0.1),
        ScenarioJob("last", 3, 1, 3, 0.11),
        ScenarioJob("on time", 5, 1, 3, 0.15),
    )


def test_an_arrival_on_the_very_step_is_not_a_step_late_for_a_rounding_error() -> None:
    assert JobLine(name="a", max_tokens=1, arrival_s=0.14).job(0.02).arrival_step == 7
    assert JobLine(name="a", max_tokens=1, arrival_s=0.1401).job(0.02).arrival_step == 8


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "mine.jsonl holds no job: at least one line is needed"),
        ('{"name": "a", "max_tokens": 1}\n{"name": "a", "max_tokens": 1}', "line 2: the name 'a' is used twice"),
        ('{"name": "a", "max_tokens": 0}', "line 1: max_tokens: Input should be greater than or equal to 1 (given: 0)"),
        ('\n{"name": "a"}', "line 2: max_tokens: Field required"),
        ('{"name": "a", "max_tokens": 1, "tokens": 3}', "mine.jsonl line 1: unknown field tokens"),
        ('{"name": "a", "max_tokens": 1, "arrival_s": -1}', "line 1: arrival_s: Input should be greater than or equal"),
        (
            '{"name": "a", "max_tokens": 1, "arrival_s": 1, "arrival_step": 1}',
            "line 1: arrival_step and arrival_s exclude each other",
        ),
        ("nonsense", "line 1: Invalid JSON"),
    ],
)
def test_a_bad_line_is_refused_by_number_and_field(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidJob) as refused:
        read_scenario(path, 0.05)
    assert complaint in str(refused.value)


def test_simulating_needs_no_model_and_no_server() -> None:
    heavy = {"torch", "transformers", "tokenizers", "numpy", "fastapi", "uvicorn", "jitney_worker.runtime"}
    code = f"import sys, jitney_worker.simulate.cli; print(sorted({heavy!r} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
