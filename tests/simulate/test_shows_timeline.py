"""What picture and animation are drawn from; and the picture's own marks: preemptions, reading, idle seats, PNG."""

from __future__ import annotations

import struct
from pathlib import Path
from xml.etree import ElementTree

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from jitney.errors import BadRecord
from jitney_worker.record.reading import RecordedRun, read_runs
from jitney_worker.simulate.cli import simulate
from jitney_worker.simulate.palette import COLOURS
from jitney_worker.simulate.picture import draw
from jitney_worker.simulate.raster import ZOOM, png
from jitney_worker.simulate.run import simulate_policies
from jitney_worker.simulate.scenarios import SIXTEEN_JOBS
from jitney_worker.simulate.timeline import of_comparison, of_record, window

RECORD = Path(__file__).parents[2] / "docs" / "between-two-steps.jsonl"
SVG = "{http://www.w3.org/2000/svg}"

app = typer.Typer()
app.command()(simulate)


@pytest.fixture(scope="module")
def record() -> RecordedRun:
    return read_runs(RECORD)[-1]


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "300", "NO_COLOR": "1", "TERM": "dumb"})


def test_the_timeline_of_the_kept_record_shows_its_seats_step_by_step(record: RecordedRun) -> None:
    (lane,) = of_record(record).lanes
    for step in record.steps:
        shown = {seat: stay.label for seat, stay in enumerate(lane.seats_in(step.step)) if stay is not None}
        assert shown == {row.seat: f"#{row.number}" for row in step.rows}


def test_the_timeline_of_a_policy_shows_the_seats_that_compute() -> None:
    comparison = simulate_policies(SIXTEEN_JOBS, num_seats=4, step_s=0.05)
    for run, lane in zip(comparison.runs, of_comparison(comparison).lanes, strict=True):
        for step in range(1, run.num_steps + 1):
            computes = [None if one is None or one.end_step < step else one.job.name for one in run.seats_at(step - 1)]
            assert [stay and stay.label for stay in lane.seats_in(step)] == computes


def test_sixteen_jobs_have_sixteen_colours() -> None:
    timeline = of_comparison(simulate_policies(SIXTEEN_JOBS, num_seats=4, step_s=0.05))
    assert len({timeline.colours[job.colour] for job in timeline.jobs}) == 16


def _luminance(colour: str) -> float:
    """Relative luminance, as in WCAG 2.2."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("colour", COLOURS)
def test_white_words_show_on_every_colour_and_every_colour_on_the_dark_page(colour: str) -> None:
    assert 1.05 / (_luminance(colour) + 0.05) >= 4.5
    assert (_luminance(colour) + 0.05) / (_luminance("#1b1f27") + 0.05) >= 3.0


def test_the_picture_of_a_record_shows_who_was_preempted_and_when(record: RecordedRun) -> None:
    picture = ElementTree.fromstring(draw(of_record(record)))
    flagged = [
        (group.findtext(f"{SVG}title") or "").split(";")
        for group in picture.iter(f"{SVG}g")
        if group.findall(f"{SVG}path")
    ]
    assert [(words[0].split(" ")[0], words[-1].strip()) for words in flagged] == [
        ("#5", "preempted"),
        ("#4", "preempted"),
    ]
    words = [text.text for text in picture.iter(f"{SVG}text")]
    assert {"preempted", "empty seat", "reading its prompt, or once more what it lost"} <= set(words)
    assert "ended, seat held" not in words, "a legend for what is not in the picture"


def test_a_window_shows_its_steps_alone(record: RecordedRun) -> None:
    whole = of_record(record)
    (lane,) = window(whole, 27, 48).lanes
    for step in range(27, 49):
        assert [stay and stay.label for stay in lane.seats_in(step)] == [
            stay and stay.label for stay in whole.lanes[0].seats_in(step)
        ]
    assert lane.seats_in(26) == lane.seats_in(49) == [None] * 4
    picture = ElementTree.fromstring(draw(window(whole, 27, 48)))
    for rect in picture.findall(f".//{SVG}g/{SVG}rect"):
        assert 76 <= float(rect.attrib["x"]) <= float(rect.attrib["x"]) + float(rect.attrib["width"]) <= 977


def test_a_recorded_run_is_written_as_picture_and_page(tmp_path: Path, record: RecordedRun) -> None:
    svg, image, page = tmp_path / "seats.svg", tmp_path / "seats.png", tmp_path / "page.html"
    result = invoke("--record", RECORD, "--svg", svg, "--png", image, "--html", page)
    assert (result.exit_code, result.stderr) == (0, f"wrote {svg}\nwrote {image}\nwrote {page}\n")
    assert "2 preemptions, 28 tokens computed again for them" in result.stdout
    assert svg.read_text(encoding="utf-8") == draw(of_record(record))
    assert draw(of_record(record)).strip() in page.read_text(encoding="utf-8")
    assert image.read_bytes() == png(svg.read_text(encoding="utf-8"))


def test_the_png_shows_the_svg_at_twice_its_size(record: RecordedRun) -> None:
    picture = draw(of_record(record))
    root, image = ElementTree.fromstring(picture), png(picture)
    assert image.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", image[16:24])
    assert (width, height) == (ZOOM * float(root.attrib["width"]), ZOOM * float(root.attrib["height"]))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--record", RECORD, "--seats", "3"], "a recorded run has its own: --seats is for scenarios"),
        (["--record", RECORD, "--scenario", "sixteen-jobs"], "a recorded run has its own: --scenario is for scenarios"),
        (["--record", RECORD, "--step-ms", "3"], "a recorded run has its own: --step-ms is for scenarios"),
        (["--record", RECORD, "--steps", "80-90"], "'80-90' is no range A-B within steps 1 to 79"),
        (["--steps", "9-3"], "'9-3' is no range A-B within steps 1 to 400"),
    ],
)
def test_what_cannot_be_shown_is_refused_with_a_sentence(arguments: list[object], complaint: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert complaint in result.stderr


def test_a_record_without_a_step_has_nothing_that_it_shows(tmp_path: Path) -> None:
    path = tmp_path / "young.jsonl"
    path.write_bytes(RECORD.read_bytes().splitlines(keepends=True)[0])
    result = invoke("--record", path)
    assert isinstance(result.exception, BadRecord)
    assert str(result.exception) == "young.jsonl holds no step yet: there is nothing to show"
