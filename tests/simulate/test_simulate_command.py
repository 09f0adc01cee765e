"""`jitney simulate` as it is typed: what it prints, and the files it writes."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from jitney_worker.simulate.cli import simulate
from jitney_worker.simulate.picture import svg
from jitney_worker.simulate.run import simulate_policies
from jitney_worker.simulate.scenarios import HUNDRED_JOBS, WORKED_EXAMPLE, Scenario, ScenarioJob

SVG = "{http://www.w3.org/2000/svg}"

app = typer.Typer()
app.command()(simulate)


def invoke(*arguments: str, width: int = 80) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": str(width), "NO_COLOR": "1", "TERM": "dumb"})


def test_it_prints_seats_jobs_and_policies_of_the_worked_example_on_eighty_columns() -> None:
    result = invoke()
    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert max(map(len, result.stdout.splitlines())) <= 80
    for line in (
        "5 jobs · 400 tokens · 4 seats · 50 ms a step",
        "step time 1 2 3 4 waits 1 2 3 4 waits",
        "0 0.0 s A B C D E A B C D E",
        "20 1.0 s A (B) C D E A E C D",
        "50 2.5 s A (B) (C) D E A · · D",
        "100 5.0 s (A) (B) (C) D E · · · D",
        "200 10.0 s E · · · · · · ·",
        "D 200 18.5 s 0–200 10.0 s 0–200 10.0 s",
        "E 30 20.0 s 200–230 11.5 s 20–50 2.5 s 4.6×",
        "naive 1 400 20.0 s 20.0 11.6 s 100%",
        "static 4 230 11.5 s 34.8 6.0 s 43%",
        "continuous 4 200 10.0 s 40.0 4.2 s 50%",
    ):
        assert line in lines


def test_it_says_what_the_tail_of_the_hundred_jobs_adds() -> None:
    result = invoke("--scenario", "hundred-jobs", width=200)
    assert "142.0 s instead of 250.0 s (1.76 times the tokens per second)" in result.stdout
    assert "it would take 2,750 steps; it takes 90 more" in result.stdout
    assert "…" not in result.stdout


def test_it_writes_the_figures_as_json(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    result = invoke("--scenario", "worked-example", "--json", str(path))
    assert (result.exit_code, result.stderr) == (0, f"wrote {path}\n")
    assert json.loads(path.read_text()) == simulate_policies(WORKED_EXAMPLE, num_seats=4, step_s=0.05).wire()


def test_seats_and_the_length_of_a_step_can_be_chosen(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    assert invoke("--seats", "5", "--step-ms", "10", "--json", str(path)).exit_code == 0
    figures = json.loads(path.read_text())
    assert figures["static"]["total_s"] == figures["continuous"]["total_s"] == 2.0
    assert figures["static"]["jobs"]["E"] == {"start_step": 0, "end_step": 30, "completion_s": 0.3}


def test_it_reads_a_scenario_from_a_file_whatever_the_names_in_it(tmp_path: Path) -> None:
    path, page = tmp_path / "jobs.jsonl", tmp_path / "page.html"
    path.write_text('{"name": "[red]<b>&", "max_tokens": 3}\n{"name": "late", "max_tokens": 2, "arrival_s": 0.4}\n')
    result = invoke("--scenario", str(path), "--html", str(page), width=100)
    assert result.exit_code == 0
    assert "[red]<b>&" in result.stdout
    assert "arrives" in result.stdout
    assert "<b>&" not in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            ["--scenario", "nope"],
            "'nope' is neither a scenario (worked-example, hundred-jobs, sixteen-jobs) nor a file",
        ),
        (["--seats", "0"], "'--seats'"),
        (["--step-ms", "0"], "'--step-ms'"),
        (["--json", "/nowhere/at/all.json"], "/nowhere/at/all.json cannot be written: No such file or directory"),
    ],
)
def test_a_wrong_argument_is_refused_with_a_sentence(arguments: list[str], complaint: str) -> None:
    result = invoke(*arguments, width=400)
    assert result.exit_code == 2
    assert complaint in result.stderr
    assert "Traceback" not in result.stderr


def test_a_wrong_line_of_a_file_is_refused_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "jobs.jsonl"
    path.write_bytes(b'{"name": "a", "max_tokens": 3}\n{"name": "b", "max_tokens": -3}\n')
    result = invoke("--scenario", str(path), width=400)
    assert result.exit_code == 2
    assert "jobs.jsonl line 2: max_tokens" in result.stderr
    path.write_bytes(b"\xff\xfe")
    assert invoke("--scenario", str(path), width=400).exit_code == 2


def bars(picture: ElementTree.Element) -> dict[str, list[dict[str, float | str]]]:
    """Rectangles of each job, by the first words of its tip; those of the three policies in turn."""
    found: dict[str, list[dict[str, float | str]]] = {}
    for group in picture.iter(f"{SVG}g"):
        name = (group.findtext(f"{SVG}title") or "").split(":")[0]
        for rect in group.iter(f"{SVG}rect"):
            shape = {key: float(rect.attrib[key]) for key in ("x", "y", "width")}
            found.setdefault(name, []).append({**shape, "fill": rect.attrib["fill"]})
    return found


def test_the_picture_shows_the_late_job_in_the_seat_that_came_free() -> None:
    picture = ElementTree.fromstring(svg(simulate_policies(WORKED_EXAMPLE, num_seats=4, step_s=0.05)))
    shapes = bars(picture)
    naive_b, static_held_b, static_b, continuous_b = shapes["B"]
    naive_e, static_e, continuous_e = shapes["E"]
    per_step = 900 / 400
    assert continuous_e["x"] == pytest.approx(76 + 20 * per_step)
    assert continuous_e["width"] == pytest.approx(30 * per_step - 1, abs=0.01)
    assert continuous_e["y"] == continuous_b["y"]
    assert static_e["x"] == pytest.approx(76 + 200 * per_step)
    assert str(static_held_b["fill"]).startswith("url(#held")
    assert static_held_b["x"] == pytest.approx(76 + 20 * per_step)
    assert static_held_b["width"] == pytest.approx(180 * per_step)
    assert naive_b["y"] == naive_e["y"]
    assert static_b["fill"] == continuous_b["fill"] == naive_b["fill"]
    assert "url(#held" in str(static_held_b["fill"])


def test_nothing_in_the_picture_reaches_beyond_its_edges() -> None:
    late = Scenario("late", "late", tuple(ScenarioJob(f"j{n}", 1 + 37 * n % 91, arrival_step=n) for n in range(60)))
    for scenario, seats in ((HUNDRED_JOBS, 4), (late, 20), (late, 64)):
        picture = ElementTree.fromstring(svg(simulate_policies(scenario, num_seats=seats, step_s=0.05)))
        width, height = float(picture.attrib["width"]), float(picture.attrib["height"])
        for rect in picture.findall(f".//{SVG}g/{SVG}rect"):
            start, length = float(rect.attrib["x"]), float(rect.attrib["width"])
            assert 76 <= start < width - 24, "a bar beyond the end of the axis is left out"
            assert start + length <= width - 23
            assert float(rect.attrib["y"]) + float(rect.attrib["height"]) < height
        for text in picture.iter(f"{SVG}text"):
            assert 0 < float(text.attrib["y"]) < height
            if text.attrib["text-anchor"] == "start":
                assert float(text.attrib["x"]) + 6 * len(text.text or "") < width


class Page(HTMLParser):
    """Counts tags, and notes whatever would be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows = 0
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "rect", "path", "img", "link"):
            self.open.append(tag)
        self.rows += tag == "tr"
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass


def test_the_page_is_whole_and_fetches_nothing(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    assert (
        invoke("--scenario", "sixteen-jobs", "--html", str(path), "--svg", str(tmp_path / "picture.svg")).exit_code == 0
    )
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    page.close()
    assert page.open == []
    assert page.rows == 1 + 3 + 1 + 16
    assert page.fetched == []
    assert (tmp_path / "picture.svg").read_text(encoding="utf-8").strip() in path.read_text(encoding="utf-8")
