"""`jitney batch`: bulk work from a shell."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from jitney import AsyncClient
from jitney.errors import SettingsError
from jitney.logs import configure
from jitney.plugins import INTERRUPTED_EXIT
from jitney.settings import client_settings, usable_url
from jitney_api.batches.settings import WINDOW
from jitney_api.batches.shell import BadLines, Counts, Files, run_file

SOME_FAILED_EXIT = 3

batch = typer.Typer(
    name="batch",
    no_args_is_help=True,
    add_completion=False,
    help="Answer a file of requests, beside everybody else.",
)


@batch.callback()
def group() -> None:
    """So that `run` keeps its name while it is the only one."""


@batch.command()
def run(
    input: Annotated[
        Path, typer.Argument(metavar="IN", help="Requests, one a line, as OpenAI's Batch API takes them.")
    ],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="Answers, one a line; goes on where it ends.")],
    errors: Annotated[
        Path | None, typer.Option(help="Where lines go that failed (default: OUT with .errors.jsonl).")
    ] = None,
    queue: Annotated[str | None, typer.Option(help="The queue of lines that name no model.")] = None,
    model: Annotated[str | None, typer.Option(help="The model of lines that name none.")] = None,
    window: Annotated[int, typer.Option(min=1, max=10_000, help="Jobs on their way at once.")] = WINDOW,
    redis_url: Annotated[
        str | None, typer.Option(help="Redis to talk to (default: JITNEY_REDIS_URL, the local stack, localhost).")
    ] = None,
) -> int:
    """Answer every line of IN, in the bulk band. Killed or stopped, the same command goes on where it was.

    Exit: 0 = every line is answered, 1 = nothing could be done, 3 = some lines failed (they are in the error file).
    """
    if queue is not None and model is not None:
        raise SettingsError("give --queue or --model, not both")
    files = Files(input, output, errors or output.with_suffix(".errors.jsonl"))
    _check_apart(files)
    url = client_settings().url if redis_url is None else usable_url(redis_url)
    configure()
    try:
        counts = asyncio.run(_run(url, files, queue or model, window))
    except BadLines as bad:
        for error in bad.errors:
            where = "" if error.line is None else f"line {error.line}: "
            typer.echo(f"{where}{error.message}", err=True)
        raise
    except KeyboardInterrupt:
        typer.echo("stopped; the same command goes on from here", err=True)
        return INTERRUPTED_EXIT
    typer.echo(f"{counts.answered} answered in {files.output}", err=True)
    if counts.failed:
        typer.echo(f"{counts.failed} failed: {files.errors}", err=True)
        return SOME_FAILED_EXIT
    return 0


async def _run(url: str, files: Files, model: str | None, window: int) -> Counts:
    async with AsyncClient(url, name="jitney-batch") as client:
        with _progress() as show:
            return await run_file(client, files, model=model, window=window, show=show)


def _check_apart(files: Files) -> None:
    paths = [files.input.resolve(), files.output.resolve(), files.errors.resolve()]
    if len(set(paths)) < len(paths):
        raise SettingsError("IN, OUT and --errors must be three files")


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[Counts], None]]:
    """A bar on a terminal; elsewhere a line whenever another hundredth is done."""
    if not sys.stderr.isatty():
        yield _lines()
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]} failed"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("lines", total=None, failed=0)
        yield lambda counts: bar.update(task, total=counts.total, completed=counts.done, failed=counts.failed)


def _lines() -> Callable[[Counts], None]:
    last = -1

    def show(counts: Counts) -> None:
        nonlocal last
        hundredth = 100 * counts.done // max(1, counts.total)
        if hundredth != last:
            last = hundredth
            typer.echo(f"{counts.done}/{counts.total} lines done, {counts.failed} failed", err=True)

    return show
