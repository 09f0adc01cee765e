"""Pictures: well formed, every point where it belongs, nothing drawn outside."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from ops.bench.chart import WIDTH, Chart, Panel, Series, svg

SVG = "{http://www.w3.org/2000/svg}"


def drawn(*panels: Panel) -> ElementTree.Element:
    return ElementTree.fromstring(svg(Chart("a < b & c", "under it", panels)))


def circles(picture: ElementTree.Element) -> list[tuple[float, float]]:
    return [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in picture.iter(f"{SVG}circle")]


def test_points_stand_in_proportion_on_linear_axes() -> None:
    line = Series("one", ((0.0, 0.0), (5.0, 10.0), (10.0, 20.0)))
    (x0, y0), (x1, y1), (x2, y2) = circles(drawn(Panel("p", "x", "y", (line,))))
    assert x1 - x0 == pytest.approx(x2 - x1)
    assert y0 - y1 == pytest.approx(y1 - y2)
    assert x0 < x1 < x2
    assert y0 > y1 > y2


def test_equal_factors_are_equal_distances_on_logarithmic_axes() -> None:
    line = Series("one", ((1.0, 10.0), (4.0, 100.0), (16.0, 1_000.0)))
    (x0, y0), (x1, y1), (x2, y2) = circles(drawn(Panel("p", "x", "y", (line,), log_x=True, log_y=True)))
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.02)
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.02)


def test_what_has_no_logarithm_is_refused() -> None:
    with pytest.raises(ValueError, match="no place on a logarithmic axis"):
        drawn(Panel("p", "x", "y", (Series("one", ((0.0, 1.0),)),), log_x=True))


def test_a_chart_without_a_point_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        drawn(Panel("p", "x", "y", (Series("one", ()),)))


def test_a_limit_is_dashed_and_has_no_marks() -> None:
    picture = drawn(
        Panel(
            "p", "x", "y", (Series("measured", ((1.0, 2.0),)), Series("bound", ((1.0, 1.0), (2.0, 1.0)), is_limit=True))
        )
    )
    assert len(circles(picture)) == 1
    dashed = [p for p in picture.iter(f"{SVG}path") if "stroke-dasharray" in p.attrib]
    assert len(dashed) == 2  # the line, and its sample in the legend


def test_marks_alone_are_not_joined() -> None:
    line = Series("one", ((1.0, 2.0), (2.0, 3.0)), is_joined=False)
    picture = drawn(Panel("p", "x", "y", (line,)))
    assert len(circles(picture)) == 2
    assert len([p for p in picture.iter(f"{SVG}path") if p.attrib.get("fill") == "none"]) == 1  # in the legend


def test_a_tick_without_words_makes_room() -> None:
    line = Series("one", ((1.0, 2.0), (2.0, 3.0)))
    narrow, wide = (
        drawn(Panel("p", "x", "y", (line,), ((1.0, "a"), (2.0, "b"), *more))) for more in ((), ((4.0, ""),))
    )
    assert circles(wide)[1][0] < circles(narrow)[1][0]
    assert "" not in {text.text for text in wide.iter(f"{SVG}text")}


def test_panels_share_colours_and_one_legend_and_stay_inside() -> None:
    lines = tuple(Series(f"a line with quite a long name {n}", ((0.0, n + 1.0), (9.0, n + 2.0))) for n in range(6))
    picture = drawn(*(Panel(f"panel {n}", "x", "y", lines) for n in range(3)))
    words = [text.text for text in picture.iter(f"{SVG}text")]
    assert [words.count(line.name) for line in lines] == [1] * 6
    colours = [c.attrib["fill"] for c in picture.iter(f"{SVG}circle")]
    assert len(set(colours)) == 6
    assert colours[:12] == colours[12:24] == colours[24:]
    height = float(picture.attrib["height"])
    assert all(0 < x < WIDTH and 0 < y < height for x, y in circles(picture))
    texts = [(float(t.attrib["x"]), float(t.attrib["y"])) for t in picture.iter(f"{SVG}text")]
    assert all(0 < x < WIDTH and 0 < y < height for x, y in texts)


def test_words_are_escaped() -> None:
    picture = drawn(Panel("p & q", "x", "<y>", (Series("a<b", ((1.0, 1.0),)),)))
    words = [text.text for text in picture.iter(f"{SVG}text")]
    assert {"a < b & c", "p & q", "<y>", "a<b"} <= set(words)


def test_ticks_that_are_given_are_the_only_ones() -> None:
    line = Series("one", ((0.0, 100.0), (1.0, 300.0)))
    picture = drawn(Panel("p", "x", "y", (line,), ((0.0, "left"), (1.0, "a long word at the very edge"))))
    texts = {text.text: text for text in picture.iter(f"{SVG}text")}
    assert texts["left"].attrib["text-anchor"] == "middle"
    assert texts["a long word at the very edge"].attrib["text-anchor"] == "end"
    assert "0.5" not in texts
