"""docs/between-two-steps.md: every command in it, run on the record that lies beside it, prints what stands there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from jitney_worker.record.cli import trace
from jitney_worker.record.reading import read_runs
from jitney_worker.simulate.picture import draw
from jitney_worker.simulate.timeline import of_record

DOCS = Path(__file__).parent.parent.parent / "docs"
PAGE = DOCS / "between-two-steps.md"
BLOCKS = re.findall(
    r"^```\n\$ jitney trace (.*?)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
)

app = typer.Typer()
app.command()(trace)


@pytest.mark.parametrize(("arguments", "printed"), BLOCKS, ids=[arguments for arguments, _ in BLOCKS])
def test_the_page_of_the_trace_shows_what_the_command_prints(
    arguments: str, printed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(DOCS.parent)
    result = CliRunner().invoke(app, shlex.split(arguments))
    assert result.exit_code == 0
    assert result.stdout == printed


def test_the_page_of_the_trace_has_its_commands() -> None:
    assert len(BLOCKS) == 4


def test_the_picture_of_the_page_is_the_timeline_of_its_record() -> None:
    (run,) = read_runs(DOCS / "between-two-steps.jsonl")
    assert (DOCS / "between-two-steps.svg").read_text(encoding="utf-8") == draw(of_record(run))


def test_the_record_of_the_page_shows_what_the_page_says_of_it() -> None:
    (run,) = read_runs(DOCS / "between-two-steps.jsonl")
    assert len(run.steps) == 79
    assert len(run.came) == 7
    freed = run.before(17)
    assert [(left.number, left.seat) for left in freed.ended] == [(2, 1)]
    assert [(one.number, one.seat, one.num_cached_tokens) for one in freed.step.joined] == [(5, 1, 32)]
    assert run.before(26).step.num_free_blocks + run.before(26).step.num_cached_blocks == 0
    assert [one.number for one in run.before(27).step.preempted] == [5]
    assert run.before(48).step.num_recomputed_tokens == 17
