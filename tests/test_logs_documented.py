"""docs/LOGS.md is the list of all events that the code can log, with level and fields; held against the code itself."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from jitney.redaction import SECRET_FIELDS
from jitney_worker.runtime.server_watch import CHECKS

ROOT = Path(__file__).parent.parent
ROOMS = ("shared/jitney", "api/jitney_api", "worker/jitney_worker")
LEVELS = {"debug", "info", "warning", "error", "exception"}
PASSED_ON = {"_pause": ("warning", {"error", "failures"})}
"""A method that logs under the name it is given: level and fields."""
CELERYS_LOG = "get_logger(__name__)"
"""Where this stands, it is Celery's own log that is written to, as Celery writes it."""
OF_FINDINGS = {event: ({"error", "warning"}, {"found", "advice"}) for _, event in CHECKS}


@dataclass(frozen=True)
class Logged:
    event: str
    level: str
    fields: frozenset[str]


def is_logger(node: ast.expr) -> bool:
    """`log`, `_log`, `self._log`, `logger()`."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "logger"
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name in ("log", "_log")


def names_in(node: ast.expr, assigned: dict[str, ast.expr]) -> list[str]:
    """The names that an argument can stand for: a constant, one of two, or what was assigned just before."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.IfExp):
        return names_in(node.body, assigned) + names_in(node.orelse, assigned)
    if isinstance(node, ast.Name) and node.id in assigned:
        return names_in(assigned[node.id], assigned)
    return []


def fields_of(call: ast.Call, assigned: dict[str, ast.expr]) -> frozenset[str]:
    fields = {keyword.arg for keyword in call.keywords if keyword.arg}
    for keyword in call.keywords:
        spread = keyword.value
        if keyword.arg is None and isinstance(spread, ast.Name) and isinstance(assigned.get(spread.id), ast.Dict):
            keys = assigned[spread.id].keys  # type: ignore[attr-defined]
            fields |= {key.value for key in keys if isinstance(key, ast.Constant)}
    return frozenset(fields - {"exc_info"})


def logged_in(source: str) -> Iterator[Logged]:
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        assigned = {
            target.id: node.value
            for node in ast.walk(function)
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for call in ast.walk(function):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.args):
                continue
            names = names_in(call.args[0], assigned)
            if call.func.attr in LEVELS and is_logger(call.func.value):
                level = "error" if call.func.attr == "exception" else call.func.attr
                assert names or function.name in ("_pause", "_say"), f"an event without a name: {ast.unparse(call)}"
                for name in names:
                    yield Logged(name, level, fields_of(call, assigned))
            elif call.func.attr in PASSED_ON:
                level, fields = PASSED_ON[call.func.attr]
                for name in names:
                    yield Logged(name, level, frozenset(fields))


def logged() -> dict[str, tuple[set[str], set[str]]]:
    """Every event: its levels, and all fields that any place gives it."""
    found: dict[str, tuple[set[str], set[str]]] = dict(OF_FINDINGS)
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            source = path.read_text()
            if CELERYS_LOG in source:
                continue
            for one in logged_in(source):
                levels, fields = found.setdefault(one.event, (set(), set()))
                levels.add(one.level)
                fields |= one.fields
    return found


def documented() -> dict[str, tuple[set[str], set[str]]]:
    rows = re.findall(
        r"^\| `(\w+)` \| ([a-z, ]+) \| (.*?) \| .+ \|$", (ROOT / "docs/LOGS.md").read_text(), re.MULTILINE
    )
    table = {event: (set(levels.split(", ")), set(re.findall(r"`(\w+)`", fields))) for event, levels, fields in rows}
    assert len(table) == len(rows), "an event stands twice"
    return table


def test_logs_of_the_page_are_those_of_the_code() -> None:
    code, page = logged(), documented()
    assert len(code) > 40
    assert sorted(page) == sorted(code)
    assert {event: page[event] for event in code} == code


def test_logs_name_the_job_wherever_there_is_one() -> None:
    about_a_job = {event: fields for event, (_, fields) in logged().items() if event.startswith("job_")}
    assert len(about_a_job) >= 8
    assert [event for event, fields in about_a_job.items() if not fields & {"job", "rq_job", "rq_queue"}] == []


def test_logs_have_no_field_that_would_be_withheld() -> None:
    assert {event: fields & SECRET_FIELDS for event, (_, fields) in logged().items() if fields & SECRET_FIELDS} == {}


def test_logs_reader_sees_names_however_they_are_given() -> None:
    source = """
def f(self):
    name = "a" if self.x else "b"
    said = {"job": 1}
    self._log.info(name, **said, n=2)
    logger(part="p").exception("c")
    self._pause("d", 1)
"""
    assert {(one.event, one.level, *sorted(one.fields)) for one in logged_in(source)} == {
        ("a", "info", "job", "n"),
        ("b", "info", "job", "n"),
        ("c", "error"),
        ("d", "warning", "error", "failures"),
    }
    with pytest.raises(AssertionError, match="without a name"):
        list(logged_in("def f(event):\n    log.info(event)\n"))
