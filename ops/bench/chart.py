"""Lines over an axis, by hand, as SVG: for figures that a table alone does not show."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from jitney_worker.simulate.ticks import round_ticks

WIDTH = 1000
_LEFT, _RIGHT, _TOP, _GAP = 70, 22, 70, 46
_PLOT_HEIGHT = 300
_PANEL_HEAD = 34
_FOOT = 46
_LEGEND_LINE = 24
_MAX_TICKS = 7
_COLOURS = (
    "#2f6fdb",
    "#e07b39",
    "#2a9d6f",
    "#9b5fc0",
    "#c9473f",
    "#8a6d3b",
    "#d45d9a",
    "#4a8fa8",
    "#7a8b2f",
    "#5b6472",
)
_INK, _FAINT, _RULE = "#1d2330", "#5f6673", "#e3e6eb"
_FONT = "font-family=\"system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', Helvetica, Arial, sans-serif\""


@dataclass(frozen=True, slots=True)
class Series:
    """One line. is_limit: a bound that was worked out, drawn with dashes and without marks.

    is_joined: False for marks alone, where there is nothing between one and the next.
    """

    name: str
    points: tuple[tuple[float, float], ...]
    is_limit: bool = False
    is_joined: bool = True


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes. x_ticks: (value, words) where numbers alone would not do, and with no words where the axis is
    to reach further than the points; log: a decade is a distance.

    The vertical axis begins at 0, or if it is logarithmic at a power of ten.
    """

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    x_ticks: tuple[tuple[float, str], ...] = ()
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """Panels side by side, with one legend: the same name has the same colour in all of them."""

    title: str
    subtitle: str
    panels: tuple[Panel, ...]


def svg(chart: Chart) -> str:
    """The picture. Raises ValueError for a chart in which no line has a point."""
    if not any(line.points for panel in chart.panels for line in panel.series):
        raise ValueError(f"nothing to draw in {chart.title!r}")
    picture = _Picture(chart)
    body = "\n".join(picture.lines())
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {picture.height}" width="{WIDTH}" '
        f'height="{picture.height}" role="img" aria-label="{escape(chart.title)}" {_FONT}>\n{body}\n</svg>\n'
    )


def write(path: Path | None, chart: Chart) -> None:
    """Into a file, if one was asked for."""
    if path is not None:
        path.write_text(svg(chart), encoding="utf-8")


class _Picture:
    """Where everything goes. Pixels throughout."""

    def __init__(self, chart: Chart) -> None:
        self._chart = chart
        names = dict.fromkeys(line.name for panel in chart.panels for line in panel.series)
        self._colours = {name: _COLOURS[number % len(_COLOURS)] for number, name in enumerate(names)}
        self._limits = {line.name for panel in chart.panels for line in panel.series if line.is_limit}
        self._legend = self._legend_lines()
        self._axis_y = _TOP + _PANEL_HEAD + _PLOT_HEIGHT
        self.height = self._axis_y + _FOOT + 14 + len(self._legend) * _LEGEND_LINE

    def lines(self) -> Iterator[str]:
        yield f'<rect width="{WIDTH}" height="{self.height}" rx="8" fill="#ffffff"/>'
        yield _text(24, 32, self._chart.title, size=19, weight=600)
        yield _text(24, 53, self._chart.subtitle, fill=_FAINT)
        count = len(self._chart.panels)
        width = (WIDTH - _LEFT - _RIGHT - (count - 1) * (_LEFT + _GAP - 24)) / count
        for number, panel in enumerate(self._chart.panels):
            left = _LEFT + number * (width + _LEFT + _GAP - 24)
            yield from _Axes(panel, left, _TOP + _PANEL_HEAD, width, self._colours).lines()
        yield from self._legend_marks()

    def _legend_lines(self) -> list[list[tuple[float, str]]]:
        """(x, name) of each entry, wrapped at the right edge."""
        lines: list[list[tuple[float, str]]] = [[]]
        x = 24.0
        for name in self._colours:
            width = 34 + len(name) * 6.7 + 24
            if x + width > WIDTH - _RIGHT and lines[-1]:
                lines.append([])
                x = 24.0
            lines[-1].append((x, name))
            x += width
        return lines

    def _legend_marks(self) -> Iterator[str]:
        for number, line in enumerate(self._legend):
            y = self._axis_y + _FOOT + 14 + number * _LEGEND_LINE
            for x, name in line:
                yield _stroke([(x, y), (x + 24, y)], self._colours[name], dashed=name in self._limits)
                yield _text(x + 31, y + 4, name, size=12, fill="#3c4350")


class _Axes:
    """One panel, from (left, top), `width` wide."""

    def __init__(self, panel: Panel, left: float, top: float, width: float, colours: dict[str, str]) -> None:
        self._panel, self._left, self._top, self._width, self._colours = panel, left, top, width, colours
        xs = [x for line in panel.series for x, _ in line.points] + [x for x, _ in panel.x_ticks]
        ys = [y for line in panel.series for _, y in line.points]
        self._x_range = _log_range(xs, exact=True) if panel.log_x else (min(0.0, *xs), max(xs))
        self._y_range = _log_range(ys) if panel.log_y else (0.0, max(ys) * 1.08 or 1.0)

    def lines(self) -> Iterator[str]:
        bottom = self._top + _PLOT_HEIGHT
        yield _text(self._left, self._top - 14, self._panel.title, size=14, weight=600)
        for value in _ticks(*self._y_range, is_log=self._panel.log_y):
            y = self._y(value)
            yield f'<path d="M{self._left:g} {y:g}h{self._width:g}" stroke="{_RULE}"/>'
            yield _text(self._left - 8, y + 4, _words(value), size=12, anchor="end", fill=_FAINT)
        for value, words in self._x_ticks():
            if not words:
                continue
            x = self._x(value)
            yield f'<path d="M{x:g} {bottom:g}v5" stroke="{_FAINT}"/>'
            anchor = "end" if x + len(words) * 3.4 > WIDTH - 4 else "middle"
            yield _text(x, bottom + 19, words, size=12, anchor=anchor, fill=_FAINT)
        yield _text(self._left + self._width / 2, bottom + 38, self._panel.x_label, anchor="middle", fill="#3c4350")
        yield _text(self._left + self._width, self._top - 14, self._panel.y_label, size=12, anchor="end", fill=_FAINT)
        for line in self._panel.series:
            yield from self._line(line)

    def _x_ticks(self) -> Sequence[tuple[float, str]]:
        if self._panel.x_ticks:
            return self._panel.x_ticks
        return [(value, _words(value)) for value in _ticks(*self._x_range, is_log=self._panel.log_x)]

    def _line(self, line: Series) -> Iterator[str]:
        colour = self._colours[line.name]
        points = [(self._x(x), self._y(y)) for x, y in line.points]
        if points and line.is_joined:
            yield _stroke(points, colour, dashed=line.is_limit)
        for (x, y), (given_x, given_y) in zip(points, line.points, strict=True):
            if not line.is_limit:
                tip = escape(f"{line.name}: {given_y:,.4g} at {given_x:,.4g}")
                yield f'<circle cx="{x:g}" cy="{y:g}" r="4" fill="{colour}"><title>{tip}</title></circle>'

    def _x(self, value: float) -> float:
        return round(self._left + _share(value, *self._x_range, is_log=self._panel.log_x) * self._width, 2)

    def _y(self, value: float) -> float:
        share = _share(value, *self._y_range, is_log=self._panel.log_y)
        return round(self._top + (1 - share) * _PLOT_HEIGHT, 2)


def _share(value: float, low: float, high: float, *, is_log: bool) -> float:
    """Where a value lies between the ends of an axis: 0 to 1."""
    if is_log:
        value, low, high = math.log10(value), math.log10(low), math.log10(high)
    return (value - low) / (high - low) if high > low else 0.5


def _log_range(values: Sequence[float], *, exact: bool = False) -> tuple[float, float]:
    """The values' own ends, or the powers of ten around them. Raises ValueError for what has no logarithm."""
    low, high = min(values), max(values)
    if low <= 0:
        raise ValueError(f"{low} has no place on a logarithmic axis")
    if exact:
        return low, high
    return 10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high) + 1e-9)


def _ticks(low: float, high: float, *, is_log: bool) -> list[float]:
    if not is_log:
        return [value for value in round_ticks(high, _MAX_TICKS) if value >= low]
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    return [10.0**power for power in range(first, last + 1)]


def _words(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:g}"


def _stroke(points: Sequence[tuple[float, float]], colour: str, *, dashed: bool) -> str:
    path = "L".join(f"{x:g} {y:g}" for x, y in points)
    dashes = ' stroke-dasharray="6 5"' if dashed else ""
    return f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2.2" stroke-linejoin="round"{dashes}/>'


def _text(
    x: float, y: float, words: str, *, size: int = 13, weight: int = 400, anchor: str = "start", fill: str = _INK
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" font-weight="{weight}" '
        f'text-anchor="{anchor}" fill="{fill}">{escape(words)}</text>'
    )
