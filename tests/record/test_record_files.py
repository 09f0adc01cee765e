"""The file that a worker writes its record to: whole lines, readable whatever happened to the writer."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jitney.errors import BadRecord, SettingsError
from jitney_worker.engine.sequence import SequenceId
from jitney_worker.engine.settings import EngineSettings
from jitney_worker.engine.witness import Came, Dropped, Row, Step
from jitney_worker.record.lines import Began
from jitney_worker.record.reading import read_runs
from jitney_worker.record.recorder import Recorder

BEGAN = Began.of(EngineSettings(max_model_len=64, num_blocks=8), worker="w", queue="q", model="m", at=1.5)


def step(number: int, row: Row) -> Step:
    return Step(number, 0, 1, 0, (), (), (row,), (), 0, 1, 0, 7)


def written(path: Path, num_steps: int = 3) -> Recorder:
    recorder = Recorder(path, BEGAN, lambda name: name.upper(), max_bytes=1 << 20)
    recorder.keep(Came(1, SequenceId("a"), 3, 0, 9))
    for number in range(1, num_steps + 1):
        recorder.keep(step(number, Row(1, 0, number, number + 1, 1, 0)))
    return recorder


def test_a_record_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    recorder = written(path)
    recorder.keep(Dropped(1, 0))
    recorder.close()
    (run,) = read_runs(path)
    assert run.began == BEGAN
    assert run.came == {1: Came(1, "A", 3, 0, 9)}
    assert run.steps == tuple(step(number, Row(1, 0, number, number + 1, 1, 0)) for number in (1, 2, 3))
    assert run.before(1).came == (Came(1, "A", 3, 0, 9),)
    assert run.last_dropped == (Dropped(1, 0),)


def test_a_record_cut_at_any_byte_is_read_up_to_its_last_whole_line(tmp_path: Path) -> None:
    path, cut = tmp_path / "run.jsonl", tmp_path / "cut.jsonl"
    written(path).close()
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    ends = {at + near for at in range(len(whole)) if whole[at : at + 1] == b"\n" for near in (0, 1)}
    for length in sorted({*range(first, len(whole) + 1, 13), *ends} - set(range(first))):
        cut.write_bytes(whole[:length])
        (run,) = read_runs(cut)
        # The last line counts as soon as all of its JSON is there, with or without the end of the line.
        num_lines = whole[:length].count(b"\n") + (whole[length : length + 1] == b"\n")
        assert len(run.steps) == max(0, num_lines - 2)


def test_a_worker_that_is_killed_leaves_every_step_of_its_record(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    code = (
        "import os, sys; sys.path[:0] = sys.argv[2:]\n"
        "from pathlib import Path; from test_record_files import written\n"
        "recorder = written(Path(sys.argv[1]), num_steps=50)\n"
        "os.kill(os.getpid(), 9)"
    )
    here = str(Path(__file__).parent)
    died = subprocess.run([sys.executable, "-c", code, str(path), here], check=False, timeout=60)
    assert died.returncode == -signal.SIGKILL
    (run,) = read_runs(path)
    assert [one.step for one in run.steps] == list(range(1, 51))


def test_a_second_run_goes_on_in_the_same_record_after_a_line_that_was_torn(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    written(path).close()
    path.write_bytes(path.read_bytes()[:-20])
    written(path, num_steps=1).close()
    first, second = read_runs(path)
    assert (len(first.steps), len(second.steps)) == (2, 1)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "run.jsonl holds no record: a worker writes one with --record FILE"),
        ("nonsense\n", "run.jsonl line 1: Invalid JSON"),
        ('{"name": "A", "max_tokens": 3}\n', "run.jsonl line 1: at_s: Field required"),
        (
            '{"at_s": 0.1, "entry": {"kind": "full"}}\n',
            "run.jsonl line 1: a record begins with `began`, not with 'full'",
        ),
        ('{"at_s": 0.1, "entry": {"kind": "left"}}\n', "run.jsonl line 1: entry: Input tag 'left' found using 'kind'"),
    ],
)
def test_what_is_no_record_is_refused_with_its_line(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    with pytest.raises(BadRecord) as refused:
        read_runs(path)
    assert str(refused.value).startswith(complaint)


def test_a_broken_line_in_the_middle_of_a_record_is_refused_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    written(path).close()
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([*lines[:3], lines[3][:40], *lines[4:]]) + b"\n")
    with pytest.raises(BadRecord, match=r"run.jsonl line 4: Invalid JSON"):
        read_runs(path)


def test_a_field_that_a_record_does_not_have_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    written(path).close()
    path.write_bytes(path.read_bytes().replace(b'"num_waiting"', b'"num_waitng"', 1))
    with pytest.raises(BadRecord, match=r"line 3: entry\.step\.num_waiting: Field required"):
        read_runs(path)


def test_a_record_that_another_worker_writes_is_refused_until_that_one_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    first = written(path)
    with pytest.raises(SettingsError, match=r"worker\.record=.* is being written by another worker: give each a file"):
        written(path)
    assert len(read_runs(path)) == 1
    first.close()
    written(path).close()
    assert len(read_runs(path)) == 2


def test_a_record_on_a_full_disk_ends_and_raises_nothing() -> None:
    """/dev/full takes an open and refuses every write, as a disk does that has no room left."""
    recorder = Recorder(Path("/dev/full"), BEGAN, str, max_bytes=1 << 20)
    recorder.keep(step(1, Row(1, 0, 0, 1, 1, 0)))
    recorder.close()
