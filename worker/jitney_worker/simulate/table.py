"""A comparison as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean

from rich import box
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from jitney_worker.simulate.run import POLICIES, Comparison, JobRun, PolicyRun
from jitney_worker.simulate.ticks import round_ticks

_MAX_LISTED_JOBS = 24
_MAX_LISTED_SEATS = 8
_MAX_LISTED_WAITING = 5
_MAX_SHOWN_STEPS = 8


def comparison_tables(comparison: Comparison) -> RenderableType:
    """Everything: seats at some steps, jobs (or kinds of job, if there are many), policies, and two sentences."""
    listed = len(comparison.scenario.jobs) <= _MAX_LISTED_JOBS
    seats = [_seats_table(comparison, comparison.run(policy)) for policy in ("static", "continuous")]
    return Group(
        headline(comparison),
        "",
        Columns(seats, padding=(0, 4)),
        "",
        _jobs_table(comparison) if listed else _kinds_table(comparison),
        "",
        _policies_table(comparison),
        "",
        *verdict(comparison),
    )


def headline(comparison: Comparison) -> str:
    """What is simulated, in one line."""
    scenario = comparison.scenario
    num_tokens = sum(job.num_output_tokens for job in scenario.jobs)
    return (
        f"[bold]{escape(scenario.name)}[/]: {escape(scenario.title)}\n"
        f"{_count(len(scenario.jobs), 'job')} · {_count(num_tokens, 'token')} · "
        f"{_count(comparison.num_seats, 'seat')} · {comparison.step_s * 1000:g} ms a step"
    )


def verdict(comparison: Comparison) -> list[str]:
    """What the figures say, in plain sentences."""
    static, continuous = comparison.run("static"), comparison.run("continuous")
    faster = continuous.tokens_per_s / static.tokens_per_s
    sentences = [
        f"Continuous is done after {continuous.total_s:,.1f} s instead of {static.total_s:,.1f} s "
        f"({faster:.2f} times the tokens per second); a job takes {continuous.mean_completion_s:,.1f} s "
        f"on average instead of {static.mean_completion_s:,.1f} s."
    ]
    tail = continuous.num_steps - continuous.num_full_steps
    if tail > 0:
        sentences.append(
            f"With every seat full to the end it would take {continuous.num_full_steps:,} steps; it takes {tail:,} "
            "more, in which some seats are empty because nobody is left to fill them."
        )
    return sentences


def shown_steps(comparison: Comparison) -> list[int]:
    """The steps at which to look at the seats, up to the end of the slower policy."""
    if comparison.scenario.shown_steps:
        return list(comparison.scenario.shown_steps)
    last = max(comparison.run("static").num_steps, comparison.run("continuous").num_steps)
    steps = {int(step) for step in round_ticks(last, _MAX_SHOWN_STEPS)}
    return sorted(steps | {last})


def _seats_table(comparison: Comparison, run: PolicyRun) -> Table:
    table = _table(f"{run.policy}: seats", caption="(x) has ended and holds its seat" if run.policy == "static" else "")
    table.add_column("step", justify="right")
    table.add_column("time", justify="right")
    listed = run.num_seats <= _MAX_LISTED_SEATS
    for seat in range(run.num_seats if listed else 1):
        table.add_column(f"{seat + 1}" if listed else "seats", justify="center")
    table.add_column("waiting")
    for step in shown_steps(comparison):
        seats = run.seats_at(step)
        cells = [_seat_cell(job, step) for job in seats] if listed else [_seats_cell(seats, step)]
        table.add_row(f"{step:,}", _seconds(step * run.step_s), *cells, _waiting_cell(run.waiting_at(step)))
    return table


def _seat_cell(job: JobRun | None, step: int) -> Text:
    if job is None:
        return Text("·", style="dim")
    if job.end_step <= step:
        return Text(f"({job.job.name})", style="dim yellow")
    return Text(job.job.name, style="bold green")


def _seats_cell(seats: list[JobRun | None], step: int) -> Text:
    taken = [job for job in seats if job is not None]
    num_held = sum(job.end_step <= step for job in taken)
    held = f", {num_held} held" if num_held else ""
    return Text(f"{len(taken) - num_held} of {len(seats)} run{held}")


def _waiting_cell(waiting: list[JobRun]) -> Text:
    names = " ".join(run.job.name for run in waiting[:_MAX_LISTED_WAITING])
    more = len(waiting) - _MAX_LISTED_WAITING
    return Text(f"{names} +{more}" if more > 0 else names)


def _jobs_table(comparison: Comparison) -> Table:
    table = _table("jobs: steps from the first to the last, and seconds from arrival to the last token")
    table.add_column("job")
    table.add_column("tokens", justify="right")
    late = any(job.arrival_s for job in comparison.scenario.jobs)
    if late:
        table.add_column("arrives", justify="right")
    for policy in POLICIES:
        table.add_column(policy, justify="right")
        table.add_column("", justify="right")
    table.add_column("sooner", justify="right")
    for runs in zip(*(comparison.run(policy).jobs for policy in POLICIES), strict=True):
        job = runs[0].job
        cells = [cell for run in runs for cell in (f"{run.start_step:,}–{run.end_step:,}", _seconds(run.completion_s))]
        arrival = [_seconds(job.arrival_s)] if late else []
        table.add_row(Text(job.name), f"{job.num_output_tokens:,}", *arrival, *cells, _ratio(runs[1], runs[2]))
    return table


def _ratio(static: JobRun, continuous: JobRun) -> str:
    """How many times sooner continuous was done with a job; empty where both took as long."""
    if static.completion_s == continuous.completion_s:
        return ""
    return f"{static.completion_s / continuous.completion_s:.1f}×"


def _kinds_table(comparison: Comparison) -> Table:
    table = _table("jobs by length: seconds from arrival to the last token, on average (and at worst)")
    table.add_column("jobs", justify="right")
    table.add_column("tokens", justify="right")
    for policy in POLICIES:
        table.add_column(policy, justify="right")
    for length in sorted({job.num_output_tokens for job in comparison.scenario.jobs}):
        kinds = [
            [run.completion_s for run in comparison.run(policy).jobs if run.job.num_output_tokens == length]
            for policy in POLICIES
        ]
        cells = [f"{_seconds(mean(kind))} ({_seconds(max(kind))})" for kind in kinds]
        table.add_row(f"{len(kinds[0]):,}", f"{length:,}", *cells)
    return table


def policy_rows(comparison: Comparison) -> Iterator[tuple[str, ...]]:
    """One row of figures for each policy, in the order of `POLICY_COLUMNS`."""
    for run in comparison.runs:
        yield (
            run.policy,
            f"{run.num_seats}",
            f"{run.num_steps:,}",
            _seconds(run.total_s),
            f"{run.tokens_per_s:,.1f}",
            _seconds(run.mean_completion_s),
            f"{run.busy_share:.0%}",
        )


POLICY_COLUMNS = ("policy", "seats", "steps", "all done", "tokens/s", "mean completion", "seats busy")


def _policies_table(comparison: Comparison) -> Table:
    table = _table("policies")
    for name in POLICY_COLUMNS:
        table.add_column(name, justify="left" if name == "policy" else "right")
    for row in policy_rows(comparison):
        table.add_row(*row, style="bold" if row[0] == "continuous" else "")
    return table


def _table(title: str, caption: str = "") -> Table:
    return Table(
        title=title,
        caption=caption or None,
        box=box.SIMPLE_HEAD,
        title_justify="left",
        caption_justify="left",
        title_style="bold",
        pad_edge=False,
    )


def _seconds(seconds: float) -> str:
    return f"{seconds:,.1f} s"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
