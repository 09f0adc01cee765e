"""`jitney simulate`: what static batching wastes, shown on the scheduler that runs in the worker."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from jitney.errors import BadRecord, InvalidJob
from jitney.progress import progress
from jitney_worker.record.cli import recorded_runs
from jitney_worker.record.telling import tell_run
from jitney_worker.simulate.page import page, record_page
from jitney_worker.simulate.picture import draw
from jitney_worker.simulate.raster import png
from jitney_worker.simulate.run import POLICIES, Comparison, simulate_policies
from jitney_worker.simulate.scenarios import SCENARIOS, WORKED_EXAMPLE, Scenario, read_scenario
from jitney_worker.simulate.table import comparison_tables
from jitney_worker.simulate.timeline import Timeline, of_comparison, of_record, window

SEATS = 4
STEP_MS = 50.0


@dataclass(frozen=True, slots=True)
class Files:
    """Where to write what; None: nowhere."""

    json: Path | None
    svg: Path | None
    png: Path | None
    html: Path | None

    def write_pictures(self, timeline: Timeline) -> None:
        if self.svg is not None or self.png is not None:
            picture = draw(timeline)
            _write(self.svg, picture)
            _write(self.png, png(picture) if self.png is not None else b"")


def _file(name: str, words: str) -> object:
    return typer.Option(name, metavar="FILE", dir_okay=False, help=words)


def simulate(
    scenario: Annotated[
        str | None, typer.Option(metavar="NAME|FILE.jsonl", help=f"{', '.join(SCENARIOS)}, or one job a line as JSON.")
    ] = None,
    record: Annotated[
        Path | None, _file("--record", "Show a run that `jitney worker --record` wrote down, instead of a scenario.")
    ] = None,
    seats: Annotated[int | None, typer.Option(min=1, max=4096, help=f"Sequences computed at once ({SEATS}).")] = None,
    step_ms: Annotated[
        float | None, typer.Option(min=0.001, max=3_600_000, help=f"Length of a step on the clock ({STEP_MS:g}).")
    ] = None,
    steps: Annotated[str | None, typer.Option(metavar="A-B", help="Draw these steps alone.")] = None,
    json_file: Annotated[Path | None, _file("--json", "Write all figures as JSON.")] = None,
    svg_file: Annotated[Path | None, _file("--svg", "Draw the seats over time.")] = None,
    png_file: Annotated[Path | None, _file("--png", "The same picture as PNG.")] = None,
    html_file: Annotated[Path | None, _file("--html", "An animation, the picture and the tables as one page.")] = None,
) -> None:
    """Compare naive, static and continuous batching on the real scheduler with a virtual clock.

    Nothing is computed: a step takes --step-ms, whatever is in it, and every job runs to exactly its length.
    A line of a scenario file: {"name": "A", "max_tokens": 100}, with "num_prompt_tokens" (1), and "arrival_step"
    or "arrival_s" (0) if wanted. With --record, a real run is shown as it was.
    """
    files = Files(json_file, svg_file, png_file, html_file)
    if record is not None:
        _refuse_with_record(scenario=scenario, seats=seats, step_ms=step_ms, json=json_file)
        _show_record(record, steps, files)
        return
    step_s = (step_ms or STEP_MS) / 1000
    chosen = WORKED_EXAMPLE if scenario is None else _scenario(scenario, step_s)
    comparison = _simulated(chosen, seats or SEATS, step_s)
    timeline = _windowed(of_comparison(comparison), steps)
    Console().print(comparison_tables(comparison))
    if files.json is not None:
        _write(files.json, json.dumps(comparison.wire(), indent=2) + "\n")
    files.write_pictures(timeline)
    if files.html is not None:
        _write(files.html, page(comparison))


def _refuse_with_record(**options: object) -> None:
    for name, given in options.items():
        if given is not None:
            option = "--" + name.replace("_", "-")
            raise typer.BadParameter(
                f"a recorded run has its own: {option} is for scenarios, leave it out or leave out --record",
                param_hint=option,
            )


def _simulated(scenario: Scenario, num_seats: int, step_s: float) -> Comparison:
    num_tokens = len(POLICIES) * sum(job.num_output_tokens for job in scenario.jobs)
    with progress("simulating", num_tokens, "tokens") as tell:
        return simulate_policies(scenario, num_seats=num_seats, step_s=step_s, tell=tell)


def _show_record(path: Path, steps: str | None, files: Files) -> None:
    run = recorded_runs(path)[-1]
    if not run.boundaries:
        raise BadRecord(f"{path.name} holds no step yet: there is nothing to show")
    whole = of_record(run)
    timeline = _windowed(whole, steps)
    for line in tell_run(run):
        typer.echo(line)
    files.write_pictures(timeline)
    if files.html is not None:
        _write(files.html, record_page(run, whole))


def _windowed(timeline: Timeline, steps: str | None) -> Timeline:
    if steps is None:
        return timeline
    last = max(lane.num_steps for lane in timeline.lanes)
    match = re.fullmatch(r"(\d+)-(\d+)", steps)
    if match is None or not 1 <= int(match[1]) <= int(match[2]) or int(match[1]) > last:
        raise typer.BadParameter(f"{steps!r} is no range A-B within steps 1 to {last:,}", param_hint="--steps")
    return window(timeline, int(match[1]), min(int(match[2]), last))


def _scenario(name: str, step_s: float) -> Scenario:
    if name in SCENARIOS:
        return SCENARIOS[name]
    path = Path(name)
    if not path.is_file():
        known = ", ".join(SCENARIOS)
        raise typer.BadParameter(f"{name!r} is neither a scenario ({known}) nor a file", param_hint="--scenario")
    try:
        return read_scenario(path, step_s)
    except (InvalidJob, UnicodeDecodeError) as error:
        raise typer.BadParameter(str(error), param_hint="--scenario") from None


def _write(path: Path | None, content: str | bytes) -> None:
    if path is None:
        return
    try:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise typer.BadParameter(f"{path} cannot be written: {error.strerror}", param_hint=str(path)) from None
    typer.echo(f"wrote {path}", err=True)
