"""Progress where people wait: a bar on a terminal, a line now and then elsewhere, and nothing for what is short."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Final, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

PATIENCE_S: Final = 1.0
"""What is done sooner shows nothing."""

LINE_EVERY_S: Final = 5.0


class Tells(Protocol):
    """Called with how much is done by now, as often as one likes."""

    def __call__(self, done: float, /) -> None: ...


@contextlib.contextmanager
def progress(what: str, total: float, unit: str, console: Console | None = None) -> Iterator[Tells]:
    """`with progress("simulating", 400, "tokens") as tell: tell(17)`. console: default: standard error."""
    where = console or Console(stderr=True)
    began = said = time.monotonic()
    bar: Progress | None = None

    def tell_plainly(done: float) -> None:
        nonlocal said
        if time.monotonic() - said >= LINE_EVERY_S:
            said = time.monotonic()
            share = done / total if total else 1.0
            where.print(f"{what}: {done:,.0f} of {total:,.0f} {unit} ({share:.0%})", markup=False, highlight=False)

    def tell_in_colour(done: float) -> None:
        nonlocal bar
        if bar is None and time.monotonic() - began >= PATIENCE_S:
            bar = _bar(where, unit)
            bar.add_task(what, total=total)
            bar.start()
        if bar is not None:
            bar.update(bar.task_ids[0], completed=done)

    try:
        yield tell_in_colour if where.is_terminal else tell_plainly
    finally:
        if bar is not None:
            bar.stop()


def _bar(console: Console, unit: str) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeRemainingColumn(compact=True),
    )
    return Progress(*columns, console=console, transient=True)
