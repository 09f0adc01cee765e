"""`jitney trace` as it is typed. What it prints of a real run is in test_record_document."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from jitney.errors import BadRecord
from jitney_worker.engine.witness import Came, Dropped, Joined, Left, Row, Step
from jitney_worker.record.cli import trace
from jitney_worker.record.lines import Began
from jitney_worker.record.recorder import Recorder

BEGAN = Began("w", "q", "m", "continuous", 2, 64, 8, 16, 1.5)

app = typer.Typer()
app.command()(trace)


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)), env={"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "400"})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Two steps, in which #1 takes its seat, is taken out, and #2, which was begun elsewhere, sits down after it."""
    recorder = Recorder(tmp_path / "run.jsonl", BEGAN, str, max_bytes=1 << 20)
    recorder.keep(Came(1, "one/0", 1, 0, 9))
    first = (Joined(1, 0, 0, False),)
    recorder.keep(Step(1, 1, 0, 0, (), first, (Row(1, 0, 0, 1, 1, 0),), (), 0, 1, 0, 7))
    recorder.keep(Came(2, "two/0", 20, 4, 30))
    recorder.keep(Came(3, "three/0", 20, 0, 30))
    recorder.keep(Dropped(1, 0))
    recorder.keep(Dropped(3, None))
    second = (Joined(2, 0, 16, True),)
    left = (Left(2, 0, "stop", 5),)
    recorder.keep(Step(2, 8, 0, 3, (), second, (Row(2, 0, 16, 24, 1, 3),), left, 0, 2, 0, 6))
    recorder.close()
    return tmp_path / "run.jsonl"


def test_the_trace_of_a_step_tells_who_came_and_who_was_taken_out(path: Path) -> None:
    result = invoke("--step", 2, path)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[3:10] == [
        "left       #1 from seat 1: taken out (cancelled, out of time, handed back or taken over)",
        "           #3 while it waited: taken out (cancelled, out of time, handed back or taken over)",
        "came       #2 two/0: 20 prompt tokens, 4 said before by another worker, up to 30 new",
        "           #3 three/0: 20 prompt tokens, up to 30 new",
        "preempted  nobody",
        "joined     #2 to seat 1, again: 16 tokens from the cache",
        "budget     8 of 64 tokens: 8 prefill (3 of them again), 0 decode",
    ]
    assert "   1  #2    tokens 17 to 24, 3 again (prefill)    1" in lines
    assert lines[-1] == "then left  #2 from seat 1 after 5 tokens: stop"


def test_a_trace_without_a_step_says_what_the_run_came_to(path: Path) -> None:
    lines = invoke(path).stdout.splitlines()
    assert lines[:3] == [
        "worker w, model m: continuous, 2 seats, 64 tokens a step at most",
        "steps 1 to 2: 3 came in",
        "9 tokens computed, 2 gained; 0 preemptions, 3 tokens computed again for them",
    ]
    assert len(lines) == 7


def test_a_trace_of_several_steps_has_a_line_for_each(path: Path) -> None:
    lines = invoke("--steps", "2-9", path).stdout.splitlines()
    assert len(lines) == 2
    assert " ".join(lines[1].split()) == "2 8 8 0 3 1/2 0 2 0 6 #2 joins, #2 leaves (stop)"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--step", 3], "step 3 is not in the record, which has steps 1 to 2"),
        (["--steps", "5-9"], "steps 5-9 are not in the record, which has steps 1 to 2"),
    ],
)
def test_a_trace_of_what_is_not_there_is_refused(path: Path, arguments: list[object], complaint: str) -> None:
    result = invoke(*arguments, path)
    assert isinstance(result.exception, BadRecord)
    assert str(result.exception) == complaint


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--steps", "five"], "'five' is not of the form A-B, as in 12-30"),
        (["--step", 1, "--steps", "1-2"], "--step and --steps exclude each other"),
        (["--run", 2], "the file holds 1 run(s), counted from 1"),
        (["--run", 0], "the file holds 1 run(s), counted from 1"),
    ],
)
def test_a_trace_that_is_asked_for_wrongly_is_refused(path: Path, arguments: list[object], complaint: str) -> None:
    result = invoke(*arguments, path)
    assert result.exit_code == 2
    assert complaint in result.stderr


def test_a_trace_of_a_file_that_is_not_there_is_refused_in_a_sentence(tmp_path: Path) -> None:
    result = invoke(tmp_path / "none.jsonl")
    assert isinstance(result.exception, BadRecord)
    assert str(result.exception).endswith("none.jsonl cannot be read: No such file or directory")
