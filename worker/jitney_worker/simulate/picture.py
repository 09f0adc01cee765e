"""A timeline as a picture: each lane's seats over time, on one axis."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from jitney_worker.simulate.run import Comparison
from jitney_worker.simulate.ticks import round_ticks
from jitney_worker.simulate.timeline import Lane, Stay, Timeline, of_comparison

_WIDTH = 1000
_LEFT, _RIGHT = 76, 24
_TOP = 76
_GAP = 4
_MAX_ROW, _MIN_ROW, _MAX_ROWS_HEIGHT = 30, 8, 480
_PANEL_HEAD, _PANEL_GAP = 30, 22
_FOOT = 78
_LEGEND_LINE = 24
_MAX_STRETCH = 3
_MAX_TICKS = 11
_MIN_LABEL_PX = 9.0
"""Pixels that one letter of a bar's label takes, edges included."""

_EMPTY = "#f0f2f5"
_FREE = "url(#free)"
_PREEMPTED = "#b3001b"
_FONT = "font-family=\"system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', Helvetica, Arial, sans-serif\""


def svg(comparison: Comparison) -> str:
    """A comparison's picture: a lane for each policy."""
    return draw(of_comparison(comparison))


def draw(timeline: Timeline) -> str:
    """The picture.

    Solid: computing and saying something; pale: reading a prompt, or once more what was lost. Hatched: the job has
    ended and its seat is held. Dotted: an empty seat. A red edge with a flag: preempted.
    """
    picture = _Picture(timeline)
    body = "\n".join(picture.lines())
    title = escape(f"{timeline.title}: seats over time")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {picture.height}" '
        f'width="{_WIDTH}" height="{picture.height}" role="img" aria-label="{title}" {_FONT}>\n'
        f"{body}\n</svg>\n"
    )


class _Picture:
    """Where everything goes. Pixels throughout."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._first_step = min(lane.first_step for lane in timeline.lanes)
        self._last_step = max(_last_step(timeline), self._first_step + 1)
        most_seats = max(lane.num_seats for lane in timeline.lanes)
        self._row = max(_MIN_ROW, min(_MAX_ROW, _MAX_ROWS_HEIGHT // most_seats))
        rows = sum(lane.num_seats for lane in timeline.lanes)
        panels = len(timeline.lanes)
        self._axis_y = _TOP + panels * _PANEL_HEAD + rows * (self._row + _GAP) + (panels - 1) * _PANEL_GAP
        self._legend_lines = _legend_lines(list(_legend(timeline)))
        self.height = self._axis_y + _FOOT + (len(self._legend_lines) - 1) * _LEGEND_LINE

    def _x(self, step: float) -> float:
        share = (step - self._first_step) / (self._last_step - self._first_step)
        return round(_LEFT + min(share, 1.0) * (_WIDTH - _LEFT - _RIGHT), 2)

    def lines(self) -> Iterator[str]:
        yield from self._definitions()
        yield f'<rect width="{_WIDTH}" height="{self.height}" rx="8" fill="#ffffff"/>'
        yield _text(_LEFT, 32, self._timeline.title, size=19, weight=600)
        yield _text(_LEFT, 53, self._timeline.facts, fill="#5f6673")
        y = _TOP
        for lane in self._timeline.lanes:
            yield from self._head(lane, y)
            yield from self._rows(lane, y + _PANEL_HEAD)
            y += _PANEL_HEAD + lane.num_seats * (self._row + _GAP) + _PANEL_GAP
        yield from self._axis()
        yield from self._legend()

    def _definitions(self) -> Iterator[str]:
        yield "<defs>"
        yield (
            f'<pattern id="free" width="6" height="6" patternUnits="userSpaceOnUse"><rect width="6" height="6" '
            f'fill="{_EMPTY}"/><circle cx="3" cy="3" r="0.9" fill="#b6bdc9"/></pattern>'
        )
        for number, colour in enumerate(self._timeline.colours):
            yield (
                f'<pattern id="held{number}" width="7" height="7" patternUnits="userSpaceOnUse" '
                f'patternTransform="rotate(45)"><rect width="7" height="7" fill="#ffffff"/>'
                f'<rect width="7" height="7" fill="{colour}" fill-opacity="0.10"/>'
                f'<rect width="2" height="7" fill="{colour}" fill-opacity="0.45"/></pattern>'
            )
        yield "</defs>"

    def _ticks(self) -> list[tuple[float, str]]:
        """Where the axis has marks, and what stands under them."""
        step_s, first = self._timeline.step_s, self._first_step
        if step_s is None:
            steps = round_ticks(self._last_step, _MAX_TICKS * self._last_step // (self._last_step - first))
            return [(self._x(step), f"{step:,.0f}") for step in steps if step >= first and step == int(step)]
        return [(self._x(s / step_s), f"{s:g} s") for s in round_ticks(self._last_step * step_s, _MAX_TICKS)]

    def _axis(self) -> Iterator[str]:
        for x, words in self._ticks():
            yield _text(x, self._axis_y + 20, words, anchor="middle", size=12, fill="#5f6673")
        if self._timeline.step_s is None:
            yield _text(_LEFT - 10, self._axis_y + 20, "step", anchor="end", size=12, fill="#5f6673")

    def _head(self, lane: Lane, y: float) -> Iterator[str]:
        step_s = self._timeline.step_s or 1.0
        cut = f" (goes on to {lane.num_steps * step_s:,.1f} s)" if lane.num_steps > self._last_step else ""
        yield _text(_LEFT, y + 19, lane.name + cut, size=15, weight=600)
        yield _text(_WIDTH - _RIGHT, y + 19, lane.figures, anchor="end", fill="#3c4350")

    def _rows(self, lane: Lane, y: float) -> Iterator[str]:
        """Seats, jobs in them, and the line at which all is done."""
        height = lane.num_seats * (self._row + _GAP) - _GAP
        for x, _ in self._ticks():
            yield f'<path d="M{x} {y - 3}v{height + 6}" stroke="#e3e6eb"/>'
        for seat in range(lane.num_seats):
            top = y + seat * (self._row + _GAP)
            if self._row >= 12 or seat % 8 == 7:
                middle = top + self._row / 2 + 4
                yield _text(_LEFT - 10, middle, f"seat {seat + 1}", anchor="end", size=12, fill="#5f6673")
            yield self._rect(_LEFT, top, self._x(lane.num_steps) - _LEFT, _FREE)
        for stay in lane.stays:
            if stay.start_step < self._last_step:
                yield from self._bar(stay, y + stay.seat * (self._row + _GAP))
        if lane.num_steps <= self._last_step:
            yield f'<path d="M{self._x(lane.num_steps)} {y - 3}v{height + 6}" stroke="#1d2330" stroke-width="1.5"/>'

    def _bar(self, stay: Stay, top: float) -> Iterator[str]:
        start, word, end = self._x(stay.start_step), self._x(stay.word_step), self._x(stay.end_step)
        yield f"<g><title>{escape(stay.tip)}</title>"
        if stay.free_step > stay.end_step:
            yield self._rect(end, top, self._x(stay.free_step) - end, f"url(#held{stay.colour})")
        # A hair of white between neighbours; a bar too narrow for that is drawn whole rather than not at all.
        width = max(round(end - start - 1, 2), 0.7)
        colour = self._timeline.colours[stay.colour]
        yield self._rect(start, top, width, colour, radius=min(3.0, width / 4))
        if word > start:
            yield self._rect(start, top, min(word - start, width), "#ffffff", opacity=0.55)
        if width >= len(stay.label) * _MIN_LABEL_PX + 6 and self._row >= 14:
            middle = start + width / 2
            pale = middle < word
            fill = "#1d2330" if pale else "#ffffff"
            yield _text(middle, top + self._row / 2 + 5, stay.label, anchor="middle", weight=600, fill=fill)
        if stay.is_preempted:
            mark = f"M{end - 1:g} {top + self._row + 2:g}v-{self._row + 4}l9 4.5l-9 4.5"
            yield f'<path d="{mark}" fill="none" stroke="#ffffff" stroke-width="5.5" stroke-linejoin="round"/>'
            yield f'<path d="{mark}" fill="{_PREEMPTED}" stroke="{_PREEMPTED}" stroke-width="2.5"/>'
        yield "</g>"

    def _rect(self, x: float, y: float, width: float, fill: str, *, radius: float = 0.0, opacity: float = 1.0) -> str:
        more = (f' rx="{radius:g}"' if radius else "") + (f' fill-opacity="{opacity:g}"' if opacity < 1 else "")
        return f'<rect x="{x:g}" y="{y:g}" width="{width:.2f}" height="{self._row}"{more} fill="{fill}"/>'

    def _legend(self) -> Iterator[str]:
        for number, line in enumerate(self._legend_lines):
            y = self._axis_y + 42 + number * _LEGEND_LINE
            for x, fill, words in line:
                yield f'<rect x="{x:g}" y="{y:g}" width="20" height="14" rx="2" fill="{fill}"/>'
                yield _text(x + 27, y + 12, words, size=12, fill="#3c4350")


def _last_step(timeline: Timeline) -> int:
    """Where the axis ends. A lane that is very much longer is cut off there, or the others would be slivers."""
    longest, *others = sorted((lane.num_steps for lane in timeline.lanes), reverse=True)
    return longest if not others or longest <= _MAX_STRETCH * others[0] else others[0]


def _legend(timeline: Timeline) -> Iterator[tuple[str, str]]:
    """(fill, words)"""
    for colour, words in timeline.legend:
        yield timeline.colours[colour], words
    if timeline.shows_reading:
        yield f"{timeline.colours[0]}73", "reading its prompt, or once more what it lost"
    if timeline.shows_held:
        yield "url(#held0)", "ended, seat held"
    if timeline.shows_preempted:
        yield _PREEMPTED, "preempted"
    yield _FREE, "empty seat"


def _legend_lines(entries: list[tuple[str, str]]) -> list[list[tuple[float, str, str]]]:
    """(x, fill, words) of each entry, wrapped at the right edge."""
    lines: list[list[tuple[float, str, str]]] = [[]]
    x = float(_LEFT)
    for fill, words in entries:
        width = 27 + len(words) * 6.6
        if x + width > _WIDTH - _RIGHT and lines[-1]:
            lines.append([])
            x = float(_LEFT)
        lines[-1].append((x, fill, words))
        x += width + 26
    return lines


def _text(
    x: float, y: float, words: str, *, size: int = 13, weight: int = 400, anchor: str = "start", fill: str = "#1d2330"
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" font-weight="{weight}" '
        f'text-anchor="{anchor}" fill="{fill}">{escape(words)}</text>'
    )
