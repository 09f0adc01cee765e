"""`jitney simulate`: what static batching wastes, shown on the scheduler that runs in the worker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from jitney.errors import InvalidJob
from jitney_worker.simulate.page import page
from jitney_worker.simulate.picture import svg
from jitney_worker.simulate.run import simulate_policies
from jitney_worker.simulate.scenarios import SCENARIOS, Scenario, read_scenario
from jitney_worker.simulate.table import comparison_tables


def simulate(
    scenario: Annotated[
        str, typer.Option(metavar="NAME|FILE.jsonl", help=f"{', '.join(SCENARIOS)}, or one job a line as JSON.")
    ] = "worked-example",
    seats: Annotated[int, typer.Option(min=1, max=4096, help="Sequences computed at once.")] = 4,
    step_ms: Annotated[float, typer.Option(min=0.001, max=3_600_000, help="Length of a step on the clock.")] = 50.0,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", dir_okay=False, help="Write all figures as JSON.")
    ] = None,
    svg_file: Annotated[
        Path | None, typer.Option("--svg", metavar="FILE", dir_okay=False, help="Draw the seats over time.")
    ] = None,
    html_file: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", dir_okay=False, help="Picture and tables as one page.")
    ] = None,
) -> None:
    """Compare naive, static and continuous batching on the real scheduler with a virtual clock.

    Nothing is computed: a step takes --step-ms, whatever is in it, and every job runs to exactly its length.
    A line of a scenario file: {"name": "A", "max_tokens": 100}, with "num_prompt_tokens" (1), and "arrival_step"
    or "arrival_s" (0) if wanted.
    """
    step_s = step_ms / 1000
    comparison = simulate_policies(_scenario(scenario, step_s), num_seats=seats, step_s=step_s)
    console = Console()
    console.print(comparison_tables(comparison))
    if json_file is not None:
        _write(json_file, json.dumps(comparison.wire(), indent=2) + "\n")
    if svg_file is not None:
        _write(svg_file, svg(comparison))
    if html_file is not None:
        _write(html_file, page(comparison))


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


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(f"{path} cannot be written: {error.strerror}", param_hint=str(path)) from None
    typer.echo(f"wrote {path}", err=True)
