"""A comparison as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from jitney_worker.simulate.lengths import length_ranges
from jitney_worker.simulate.run import POLICIES, Comparison, JobRun
from jitney_worker.simulate.ticks import round_ticks

_MAX_LISTED_JOBS = 24
_MAX_SEATS_WIDTH = 20
_MAX_LISTED_WAITING = 3
_MAX_SHOWN_STEPS = 8


def comparison_tables(comparison: Comparison) -> RenderableType:
    """Everything: seats at some steps, jobs (or kinds of job, if there are many), policies, and two sentences."""
    listed = len(comparison.scenario.jobs) <= _MAX_LISTED_JOBS
    return Group(
        headline(comparison),
        "",
        _seats_table(comparison),
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
    when = (
        f"Both are done after {static.total_s:,.1f} s"
        if static.num_steps == continuous.num_steps
        else f"Continuous is done after {continuous.total_s:,.1f} s instead of {static.total_s:,.1f} s "
        f"({continuous.tokens_per_s / static.tokens_per_s:.2f} times the tokens per second)"
    )
    sentences = [
        f"{when}; a job takes {continuous.mean_completion_s:,.1f} s on average under continuous, "
        f"{static.mean_completion_s:,.1f} s under static."
    ]
    tail = continuous.num_steps - continuous.num_full_steps
    if tail > 0:
        sentences.append(
            f"With every seat full to the end it would take {continuous.num_full_steps:,} steps; it takes {tail:,} "
            "more, in which some seats are empty because nobody is there to fill them."
        )
    return sentences


def shown_steps(comparison: Comparison) -> list[int]:
    """The steps at which to look at the seats, up to the end of the slower policy."""
    if comparison.scenario.shown_steps:
        return list(comparison.scenario.shown_steps)
    last = max(comparison.run("static").num_steps, comparison.run("continuous").num_steps)
    steps = {int(step) for step in round_ticks(last, _MAX_SHOWN_STEPS)}
    return sorted(steps | {last})


def _seats_table(comparison: Comparison) -> Table:
    """Who sits where under the two policies that share seats, and who waits, at the shown steps."""
    runs = [comparison.run("static"), comparison.run("continuous")]
    width = max(len(job.name) for job in comparison.scenario.jobs) + 3
    listed = comparison.num_seats * width <= _MAX_SEATS_WIDTH
    numbers = "".join(f"{seat + 1}".center(width) for seat in range(comparison.num_seats)) if listed else "seats"
    table = _table("seats", caption="(x) has ended and holds its seat" if listed else "")
    table.add_column("\nstep", justify="right")
    table.add_column("\ntime", justify="right")
    for run in runs:
        table.add_column(f"{run.policy}\n{numbers}", no_wrap=True)
        table.add_column("\nwaits")
    for step in shown_steps(comparison):
        cells: list[Text] = []
        for run in runs:
            seats = run.seats_at(step)
            cells.append(_named_seats(seats, step, width) if listed else _counted_seats(seats, step))
            cells.append(_waiting_cell(run.waiting_at(step)))
        table.add_row(f"{step:,}", _seconds(step * comparison.step_s), *cells)
    return table


def _named_seats(seats: list[JobRun | None], step: int, width: int) -> Text:
    line = Text()
    for run in seats:
        if run is None:
            line.append("·".center(width), style="dim")
        elif run.end_step <= step:
            line.append(f"({run.job.name})".center(width), style="dim yellow")
        else:
            line.append(run.job.name.center(width), style="bold green")
    return line


def _counted_seats(seats: list[JobRun | None], step: int) -> Text:
    taken = [job for job in seats if job is not None]
    num_held = sum(job.end_step <= step for job in taken)
    held = f", {num_held} held" if num_held else ""
    return Text(f"{len(taken) - num_held} of {len(seats)} run{held}")


def _waiting_cell(waiting: list[JobRun]) -> Text:
    if len(waiting) <= _MAX_LISTED_WAITING:
        return Text(" ".join(run.job.name for run in waiting))
    return Text(f"{waiting[0].job.name} +{len(waiting) - 1:,}")


def _jobs_table(comparison: Comparison) -> Table:
    table = _table("jobs: steps from first to last, seconds from arrival to last token")
    table.add_column("job")
    table.add_column("tokens", justify="right")
    late = any(job.arrival_s for job in comparison.scenario.jobs)
    if late:
        table.add_column("arrives", justify="right")
    table.add_column("naive", justify="right")
    for policy in ("static", "continuous"):
        table.add_column("steps", justify="right")
        table.add_column(policy, justify="right", no_wrap=True)
    table.add_column("sooner", justify="right")
    for naive, static, continuous in zip(*(comparison.run(policy).jobs for policy in POLICIES), strict=True):
        job = naive.job
        arrival = [_seconds(job.arrival_s)] if late else []
        cells = [cell for run in (static, continuous) for cell in (f"{run.start_step:,}–{run.end_step:,}", _done(run))]
        table.add_row(
            Text(job.name), f"{job.num_output_tokens:,}", *arrival, _done(naive), *cells, _ratio(static, continuous)
        )
    return table


def _done(run: JobRun) -> str:
    return _seconds(run.completion_s)


def _ratio(static: JobRun, continuous: JobRun) -> str:
    """How many times sooner continuous was done with a job; empty where both took as long."""
    if static.completion_s == continuous.completion_s:
        return ""
    return f"{static.completion_s / continuous.completion_s:.1f}×"


def _kinds_table(comparison: Comparison) -> Table:
    table = _table("jobs by length: seconds to the last token, mean (and worst)")
    table.add_column("jobs", justify="right")
    table.add_column("tokens", justify="right")
    for policy in POLICIES:
        table.add_column(policy, justify="right")
    for kind in length_ranges(comparison.scenario):
        seconds = [
            [run.completion_s for run in comparison.run(policy).jobs if run.job.num_output_tokens in kind]
            for policy in POLICIES
        ]
        cells = [f"{_seconds(mean(each))} ({_seconds(max(each))})" for each in seconds]
        table.add_row(f"{len(seconds[0]):,}", str(kind), *cells)
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


POLICY_COLUMNS = ("policy", "seats", "steps", "all done", "tokens/s", "mean", "seats busy")


def _policies_table(comparison: Comparison) -> Table:
    table = _table("policies: mean is from arrival to last token")
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
