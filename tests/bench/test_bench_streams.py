"""The bench of streams: what it counts, and that it would notice a stream that is lost, doubled or mixed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ops.bench import page, streams
from ops.bench.streams_reader import Heard
from ops.bench.streams_wave import check
from ops.bench.streams_worker import Script

from jitney.errors import ServerError

SMALL = ["--readers", "6", "--slow", "1", "--events", "60", "--every-s", "0.05", "--requests", "3"]


def test_a_small_run_counts_every_event_cuts_the_slow_reader_and_writes_its_place(tmp_path: Path) -> None:
    document, figures = tmp_path / "results.md", tmp_path / "streams.json"
    document.write_text("<!-- streams: written by python -m ops.bench.streams -->\n<!-- end of streams -->\n")
    streams.main([*SMALL, "--write", str(document), "--json", str(figures)])
    start, end = page.find_place(document.read_text(), "streams")
    block = document.read_text()[start:end]
    assert "6 readers of one API process, 60 events to each" in block
    assert "In the second wave 1 of them took nothing" in " ".join(block.split())
    found = json.loads(figures.read_text())
    first, second, third = found["waves"]
    assert (first["num_cut"], second["num_slow"], second["num_cut"]) == (0, 1, 1)
    for one in (first, second, third, found["bare"]):
        assert one["num_open_at_once"] == 6
        assert 0 < one["num_events"] <= 6 * (60 + 2), "each event once, after the moment when all were open"
        assert len(one["memory_mb"]) == 4
    assert len(found["first_byte_ms"]["overhead"]) == 3
    assert min(found["first_byte_ms"]["to_worker"] + found["first_byte_ms"]["to_reader"]) > 0


def whole(script: Script) -> Heard:
    return Heard(script, text=script.whole, is_done=True, ids=[2, 3, 4])


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"text": "a/0;a/1;"}, "heard 8 characters of 12; the first wrong one is 8"),
        ({"text": "a/0;a/1;a/1;a/2;"}, "heard 16 characters of 12; the first wrong one is 10"),
        ({"text": "a/0;b/1;a/2;"}, "heard 12 characters of 12; the first wrong one is 4"),
        ({"ids": [2, 4, 3]}, "ids out of order"),
        ({"ids": [2, 3, 3]}, "ids out of order"),
        ({"is_done": False}, "was not told that it is the end"),
    ],
)
def test_a_stream_that_is_lost_doubled_mixed_or_cut_ends_the_run(changed: dict[str, object], complaint: str) -> None:
    good, bad = whole(Script("b", 3)), whole(Script("a", 3))
    check([good, bad], num_not_cut=0)
    for name, value in changed.items():
        setattr(bad, name, value)
    with pytest.raises(ServerError, match=f"1 of 2 readers did not hear their answer: a.*{complaint}"):
        check([good, bad], num_not_cut=0)


def test_a_slow_reader_that_was_not_cut_ends_the_run() -> None:
    with pytest.raises(ServerError, match="2 readers that took nothing were not cut off"):
        check([whole(Script("a", 3))], num_not_cut=2)


def test_a_script_travels_as_a_prompt() -> None:
    script = Script("a", 3, every_s=0.5, padding=2, is_stamped=True)
    assert Script.of(script.prompt) == script
    assert script.whole == "a/0;..a/1;..a/2;.."


def test_more_slow_readers_than_readers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        streams.arguments(["--readers", "5", "--slow", "5"])
    assert "--slow 5 must be less than --readers 5" in capsys.readouterr().err
