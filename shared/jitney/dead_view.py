"""A dead letter as people and programs read it. What strangers wrote is shown escaped, never sent to a terminal raw."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import orjson

from jitney.follower import parse
from jitney.keys import JobId
from jitney.queue import Queue
from jitney.records import DeadJob

MAX_ERROR_CHARS: Final = 100
_HEADINGS: Final = ("ID", "BURIED", "BAND", "TENANT", "REASON", "TOKENS", "LAST ERROR")
_UNSEEN: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Zl", "Zp"})
"""Unicode categories that move the cursor, change the order of what is read, or show nothing."""


@dataclass(frozen=True, slots=True)
class Letter:
    """A buried entry with all that Redis still has of it. texts: what the log says, by choice; None without a log."""

    queue: str
    dead: DeadJob
    body: bytes | None = None
    texts: tuple[str, ...] | None = None


async def read_letter(queue: Queue, dead: DeadJob) -> Letter:
    """Raises what Redis raises."""
    body = await queue.dead_body(dead)
    return Letter(queue.name, dead, body, await _texts(queue, dead) if dead.id else None)


async def _texts(queue: Queue, dead: DeadJob) -> tuple[str, ...] | None:
    said: dict[int, list[str]] = {}
    cursor = 0
    while payloads := await queue.read_log(JobId(dead.id), cursor):
        for message in map(parse, payloads):
            if message is not None and message.event.type == "tokens":
                said.setdefault(message.event.choice, []).append(str(message.event.text))
        cursor += len(payloads)
    if payloads is None:
        return None
    return tuple("".join(said[choice]) for choice in sorted(said))


def as_json(letter: Letter, *, whole: bool) -> bytes:
    """One object. whole: with the job and its text, not the line of a list alone."""
    dead = letter.dead
    fields: dict[str, Any] = {
        "id": dead.id or None,
        "entry_id": dead.entry_id,
        "queue": letter.queue,
        "buried_at": dead.buried_at,
        "band": dead.band,
        "tenant": dead.tenant,
        "reason": dead.reason,
        "error": last_error(dead),
        "num_tokens": dead.num_tokens,
    }
    if whole:
        fields |= {
            "job": _loads(letter.body),
            "job_bytes": None if letter.body is None or _loads(letter.body) is not None else escaped(letter.body),
            "texts": letter.texts,
            "kept": {name: escaped(value) for name, value in dead.fields.items()},
        }
    return orjson.dumps(fields)


def as_table(letters: Sequence[Letter]) -> list[str]:
    """A heading and one line for each."""
    rows = [_HEADINGS, *(_row(letter.dead) for letter in letters)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS) - 1)]
    return [
        "  ".join((*(word.ljust(width) for word, width in zip(row, widths, strict=False)), row[-1])) for row in rows
    ]


def _row(dead: DeadJob) -> tuple[str, ...]:
    error = error_line(dead)
    if len(error) > MAX_ERROR_CHARS:
        error = error[: MAX_ERROR_CHARS - 1] + "…"
    return (
        name_of(dead),
        when(dead.buried_at),
        printable(dead.band),
        printable(dead.tenant),
        printable(dead.reason),
        str(dead.num_tokens),
        error,
    )


def as_page(letter: Letter) -> list[str]:
    """Everything there is, for a person."""
    dead = letter.dead
    facts = {
        "id": dead.id or "(it names no job)",
        "entry": dead.entry_id,
        "queue": letter.queue,
        "buried": when(dead.buried_at),
        "band": dead.band,
        "tenant": dead.tenant,
        "reason": dead.reason,
        "last error": error_line(dead),
        "tokens": str(dead.num_tokens),
    } | {name: escaped(value) for name, value in dead.fields.items()}
    lines = [f"{printable(name):<12} {printable(value)}" for name, value in facts.items() if value]
    lines += ["", "job:", *_job_lines(letter.body)]
    if letter.texts is None:
        return [*lines, "", "text so far: the log is gone"]
    for choice, text in enumerate(letter.texts or ("",)):
        lines += ["", f"text so far (choice {choice}):", *(printable(line) for line in text.split("\n"))]
    return lines


def _job_lines(body: bytes | None) -> list[str]:
    if body is None:
        return ["(not there)"]
    fields = _loads(body)
    if fields is None:
        return [escaped(body)]
    return [printable(line) for line in orjson.dumps(fields, option=orjson.OPT_INDENT_2).decode().split("\n")]


def last_error(dead: DeadJob) -> Any:
    """The error of the last attempt that named one, else of the terminal event; escaped text where it is no JSON."""
    if dead.last_error:
        known = _loads(dead.last_error)
        return escaped(dead.last_error) if known is None else known
    message = parse(dead.event)
    return None if message is None else message.event.error


def error_line(dead: DeadJob) -> str:
    error = last_error(dead)
    if isinstance(error, dict):
        return printable(": ".join(str(error[name]) for name in ("code", "message") if error.get(name)))
    return "" if error is None else printable(str(error))


def name_of(dead: DeadJob) -> str:
    """The id of the job, or of the entry when it names none."""
    return printable(dead.id or dead.entry_id)


def when(seconds: float) -> str:
    """Local time, with its distance from UTC."""
    return datetime.fromtimestamp(seconds).astimezone().isoformat(sep=" ", timespec="seconds")


def printable(text: str) -> str:
    """`text` on one line, with what a terminal would obey or hide written out."""
    return "".join(
        char.encode("unicode_escape", "surrogatepass").decode() if unicodedata.category(char) in _UNSEEN else char
        for char in text
    )


def escaped(value: bytes) -> str:
    """Any bytes as text."""
    return printable(value.decode("utf-8", "backslashreplace"))


def _loads(value: bytes | None) -> dict[str, Any] | None:
    """The JSON object; None for whatever else it is."""
    if value is None:
        return None
    try:
        fields = orjson.loads(value)
    except orjson.JSONDecodeError:
        return None
    return fields if isinstance(fields, dict) else None
