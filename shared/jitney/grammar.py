"""Structures as grammars of `llguidance`, and whether it can follow them. The library is imported when it is needed.

A structure is bounded by its size, by the library's own limits, and by a trial: it is first read in a process that is
ended when it takes too much memory or time, for a thread cannot be. A short text may also nest thousands of rules,
through references, and the library recurses into them: on a thread's usual stack of 8 MiB that ends the process. So
whatever it reads, it reads on a stack that 64 KiB of text cannot fill.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from jitney import grammar_trial
from jitney.errors import InvalidJob
from jitney.structured import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLParserLimits

COMPILE_TIMEOUT_S: Final = 10.0
STACK_BYTES: Final = 256 << 20
"""Of address space; memory is taken as far as it is used. The deepest structures of 64 KiB use some 40 MiB."""

TRIAL_MEMORY_BYTES: Final = 1 << 30
"""Of address space, its stack included."""

MAX_REASON_CHARS: Final = 300

_NO_FORCING: Final = '%llguidance {"no_forcing":true}'
"""Text that can only go on in one way may still be cut into tokens in any way: the library's own way to cut it asks the
tokenizer, which for some vocabularies puts a space before every text."""

COMPACT: Final = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}

_starting = threading.Lock()
_looking = ThreadPoolExecutor(2, "jitney-trials")
Made = TypeVar("Made")


def is_available() -> bool:
    """True if `llguidance` is installed: it comes with a worker and an API, and to a client with the extra `guided`."""
    return find_spec("llguidance") is not None


def lark_of(asked: StructuredOutputs) -> str:
    """The structure in the library's dialect of Lark. It must be there for a regex alone."""
    return f"{_lark_of(asked)}\n{_NO_FORCING}"


def _lark_of(asked: StructuredOutputs) -> str:
    if asked.regex is not None:
        from llguidance import regex_to_lark

        return f"start: /{regex_to_lark(asked.regex)}/"
    if asked.grammar is not None:
        return asked.grammar
    if asked.choice is not None:  # one terminal, which costs the parser one item however many there are
        return f"start: CHOICE\nCHOICE: {' | '.join(map(json.dumps, asked.choice))}"
    schema = {"type": "object"} if asked.json_schema is None else json.loads(asked.json_schema)
    return f"start: %json {json.dumps({**schema, 'x-guidance': COMPACT})}"


PARSER_LIMITS: Final[dict[str, Any]] = {
    "max_items_in_row": 1_000,
    "step_max_items": 4_000,
    "max_lexer_states": 50_000,
    "verbose_errors": False,
}
"""What one structure may cost.

The whole batch waits for a step of the most ambiguous grammar: some 50 ms with these, half a second by default. An
object may have some 250 properties that are not required. A lexer's state takes one or two kilobytes.
"""


@lru_cache(maxsize=1)
def parser_limits() -> LLParserLimits:
    """`PARSER_LIMITS`, as the library takes them."""
    from llguidance import LLParserLimits

    return LLParserLimits(**PARSER_LIMITS)


def refuse(asked: StructuredOutputs, complaint: str) -> InvalidJob:
    """The error for a structure that the library cannot follow, in its words."""
    return InvalidJob(
        f"{asked.field} cannot be followed: {reason(complaint)}", param=asked.field, code="unsupported_structure"
    )


def reason(complaint: str) -> str:
    """What the library complains of, in one line: the first, or what it names the error, without places in a text that
    nobody wrote."""
    lines = complaint.strip().splitlines() or ["no reason is given"]
    named = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    found = re.sub(r"^(at )?\d+\(\d+\): |failed to compile JSON schema: ", "", named[0] if named else lines[0])
    return found if len(found) <= MAX_REASON_CHARS else found[: MAX_REASON_CHARS - 3] + "..."


def on_deep_stack(compiles: Callable[[], Made], asked: StructuredOutputs) -> Made:
    """What `compiles` returns, from a thread of its own, which is waited for.

    Raises InvalidJob if that takes longer than COMPILE_TIMEOUT_S.
    """
    made: list[Made] = []
    broke: list[BaseException] = []

    def run() -> None:
        try:
            made.append(compiles())
        except BaseException as error:  # what the library does to a thread, down to panics that are no Exception
            broke.append(error)

    thread = threading.Thread(target=run, name="jitney-grammar", daemon=True)
    with _starting:  # the size is the whole process', and threads of others keep theirs
        usual = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
    thread.join(COMPILE_TIMEOUT_S)
    if made:
        return made[0]
    if broke:
        raise refuse(asked, f"{type(broke[0]).__name__}: {broke[0]}")
    raise refuse(asked, f"it takes longer than {COMPILE_TIMEOUT_S:g} s to compile: make it smaller")


@lru_cache(maxsize=256)
def _complaint(asked: StructuredOutputs) -> str:
    """In the library's words, or ours; empty if there is none. Kept, so that who asks again costs nothing."""
    trial = {
        "lark": lark_of(asked),
        "limits": PARSER_LIMITS,
        "stack_bytes": STACK_BYTES,
        "memory_bytes": TRIAL_MEMORY_BYTES,
        "cpu_s": math.ceil(COMPILE_TIMEOUT_S),
    }
    try:
        done = subprocess.run(
            [sys.executable, "-P", str(Path(grammar_trial.__file__))],
            input=json.dumps(trial).encode(),
            capture_output=True,
            timeout=COMPILE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it takes longer than {COMPILE_TIMEOUT_S:g} s to compile: make it smaller"
    if done.returncode != 0:
        return "it takes too much memory or time to compile: make it smaller"
    return done.stdout.decode("utf-8", "replace")


def check(asked: StructuredOutputs) -> None:
    """Raise InvalidJob for what cannot be followed by any tokenizer; nothing where the library is not installed.

    Looked at in a process of its own, so that a structure that would take all memory takes nobody along.
    """
    if is_available() and (complaint := _complaint(asked)):
        raise refuse(asked, complaint)


async def off_loop(call: Callable[..., Made], *args: object) -> Made:
    """`call` on one of two threads that are there for structures alone: others' work must not wait behind them."""
    return await asyncio.get_running_loop().run_in_executor(_looking, call, *args)


async def check_early(asked: StructuredOutputs | None) -> None:
    """`check`, off the event loop."""
    if asked is not None:
        await off_loop(check, asked)
