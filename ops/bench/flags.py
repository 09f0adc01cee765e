"""What the commands of this folder are told: flags that several of them have, and values that are refused by name."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from ops.bench import page

from jitney.errors import JitneyError
from jitney_worker.bench.quiet import DISTURBED_CORES

WORKLOAD = page.ROOT / "ops" / "bench" / "workload.json"
MODEL = "smollm2-135m-instruct"
RESULTS = Path("ops/bench/RESULTS.md")

Value = TypeVar("Value")


def positive(words: str) -> int:
    """A whole number of at least 1."""
    return at_least(1)(words)


def at_least(least: int) -> Callable[[str], int]:
    """A whole number that is not smaller."""

    def parse(words: str) -> int:
        return int(_number(words, int, lambda value: value >= least, f"a whole number of at least {least}"))

    return parse


def above_zero(words: str) -> float:
    """A number above 0."""
    return float(_number(words, float, lambda value: 0 < value < float("inf"), "a number above 0"))


def percent(words: str) -> int:
    """A whole percentage, 1 to 1,000."""
    return int(_number(words, int, lambda value: 1 <= value <= 1_000, "a whole percentage of 1 to 1000"))


def _number(words: str, kind: Callable[[str], Any], fits: Callable[[Any], bool], wanted: str) -> Any:
    try:
        value = kind(words)
    except ValueError:
        value = None
    if value is None or not fits(value):
        raise argparse.ArgumentTypeError(f"{words!r} is not {wanted}")
    return value


def listed(each: Callable[[str], Value], known: Sequence[Value] = ()) -> Callable[[str], tuple[Value, ...]]:
    """Values with commas between them, each once; `known`: the only ones there are."""

    def parse(words: str) -> tuple[Value, ...]:
        values = tuple(each(word.strip()) for word in words.split(","))
        for value in values:
            if known and value not in known:
                raise argparse.ArgumentTypeError(f"{value!r} is not one of {', '.join(map(str, known))}")
            if values.count(value) > 1:
                raise argparse.ArgumentTypeError(f"{value!r} stands there twice")
        return values

    return parse


def existing_file(words: str) -> Path:
    """A file that can be read."""
    if not Path(words).is_file():
        raise argparse.ArgumentTypeError(f"there is no file {words}")
    return Path(words)


def new_file(words: str) -> Path:
    """A file to be written, in a folder that is there: a long run is not to end in an error."""
    if not Path(words).parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {Path(words).parent}")
    return Path(words)


def parser(about: str | None) -> argparse.ArgumentParser:
    """A parser with the flags that every command has for its outcome."""
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=new_file, metavar="FILE", help="write all figures here")
    made.add_argument("--write", type=Path, metavar="FILE", help="a document with a place for this table")
    return made


def add_picture(made: argparse.ArgumentParser) -> None:
    made.add_argument("--svg", type=new_file, metavar="FILE", help="draw the figures here")


def add_engine(made: argparse.ArgumentParser) -> None:
    """Flags of a command that runs an engine in its own process."""
    made.add_argument("--model", default=MODEL, help="registered name or directory; %(default)s")
    made.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    made.add_argument("--num-threads", type=positive, help="of the model; default: torch's own")
    made.add_argument("--kernels", default="auto", choices=["auto", "native", "torch"])
    made.add_argument("--quantization", default="none", choices=["none", "int8"])


def add_workload(made: argparse.ArgumentParser) -> None:
    made.add_argument("--workload", type=existing_file, default=WORKLOAD, metavar="FILE")
    made.add_argument("--limit", type=positive, metavar="N", help="only the first N jobs")


def add_ground(made: argparse.ArgumentParser) -> None:
    """Flags of a command that runs whole engines, each in a process of its own."""
    add_workload(made)
    made.add_argument("--model", default=MODEL, help="registered name or directory; %(default)s")
    made.add_argument("--num-threads", type=positive, default=os.cpu_count() or 1, help="of every engine; %(default)s")
    made.add_argument("--timeout-s", type=above_zero, default=900.0, help="of one run, its start included; %(default)g")


def add_quiet(made: argparse.ArgumentParser) -> None:
    """Flags of a command that repeats what others disturb."""
    made.add_argument("--tries", type=positive, default=3, help="of a run that others disturb; %(default)s")
    made.add_argument(
        "--most-other-cores",
        type=above_zero,
        default=DISTURBED_CORES,
        help="that others may use before a run is said to be disturbed; %(default)g",
    )


@contextmanager
def told() -> Iterator[None]:
    """What jitney refuses on purpose ends the command with one line, not with a traceback."""
    try:
        yield
    except JitneyError as error:
        raise SystemExit(f"error: {error}") from None


def say(words: str) -> None:
    """Progress, for whoever waits; the figures alone go to standard output."""
    print(words, file=sys.stderr, flush=True)


def leave_behind(asked: argparse.Namespace, place: str, block: str, figures: object) -> None:
    """Print the table, write it to its place, and the figures as JSON, if asked for."""
    print(block)
    page.write(asked.write, place, block)
    if asked.json is not None:
        write_json(asked.json, figures)


def write_json(path: Path, figures: object) -> None:
    path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
