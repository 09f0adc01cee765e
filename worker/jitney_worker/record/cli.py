"""`jitney trace`: what a worker that ran with --record did between its steps."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from jitney.errors import BadRecord
from jitney_worker.record.reading import RecordedRun, read_runs
from jitney_worker.record.telling import tell_boundary, tell_run, tell_steps

NUM_STEPS_SHOWN = 20


def trace(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="what `jitney worker --record FILE` wrote")],
    step: Annotated[int | None, typer.Option(min=1, help="what happened just before this step, and in it")] = None,
    steps: Annotated[str | None, typer.Option(metavar="A-B", help="one line for each of these steps")] = None,
    run: Annotated[int, typer.Option(help="which run of several in the file; -1 is the last one")] = -1,
) -> None:
    """Print what happened between two forward passes of a recorded run: budget, who joined and left, blocks, victims.

    Without --step or --steps: what the run came to, and its first twenty steps.
    """
    if step is not None and steps is not None:
        raise typer.BadParameter("--step and --steps exclude each other", param_hint="--steps")
    chosen = _chosen(recorded_runs(file), run)
    for line in _told(chosen, step, steps):
        typer.echo(line)


def recorded_runs(file: Path) -> list[RecordedRun]:
    """The runs in a file that was named on the command line. Raises BadRecord, also for a file that cannot be read."""
    try:
        return read_runs(file)
    except OSError as error:
        raise BadRecord(f"{file} cannot be read: {error.strerror}") from None


def _chosen(runs: list[RecordedRun], number: int) -> RecordedRun:
    index = number if number < 0 else number - 1
    if number == 0 or not -len(runs) <= index < len(runs):
        raise typer.BadParameter(f"the file holds {len(runs)} run(s), counted from 1", param_hint="--run")
    return runs[index]


def _told(run: RecordedRun, step: int | None, steps: str | None) -> Iterator[str]:
    if step is not None:
        yield from tell_boundary(run, run.before(step))
    elif steps is not None:
        yield from tell_steps(run, *_range(run, steps))
    else:
        yield from tell_run(run)
        if run.boundaries:
            first = run.boundaries[0].step.step
            yield ""
            yield from tell_steps(run, first, first + NUM_STEPS_SHOWN - 1)


def _range(run: RecordedRun, text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)-(\d+)", text)
    if match is None:
        raise typer.BadParameter(f"{text!r} is not of the form A-B, as in 12-30", param_hint="--steps")
    first, last = int(match[1]), int(match[2])
    if not any(first <= step.step <= last for step in run.steps):
        raise BadRecord(f"steps {text} are not in the record, which has {run.range}")
    return first, last
