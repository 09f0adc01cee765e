"""A comparison as a picture: each policy's seats over time, on one axis."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from jitney_worker.simulate.palette import Palette
from jitney_worker.simulate.run import Comparison, JobRun, PolicyRun
from jitney_worker.simulate.ticks import round_ticks

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
_FONT = "font-family=\"system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', Helvetica, Arial, sans-serif\""


def svg(comparison: Comparison) -> str:
    """The picture. Solid: computing. Hatched: the job has ended and its seat is held. Grey: an empty seat."""
    picture = _Picture(comparison)
    body = "\n".join(picture.lines())
    title = escape(f"{comparison.scenario.name}: seats over time under {len(comparison.runs)} policies")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {picture.height}" '
        f'width="{_WIDTH}" height="{picture.height}" role="img" aria-label="{title}" {_FONT}>\n'
        f"{body}\n</svg>\n"
    )


class _Picture:
    """Where everything goes. Pixels throughout."""

    def __init__(self, comparison: Comparison) -> None:
        self._comparison = comparison
        self._last_step = _last_step(comparison)
        self._palette = Palette(comparison.scenario)
        self._row = max(_MIN_ROW, min(_MAX_ROW, _MAX_ROWS_HEIGHT // comparison.num_seats))
        rows = sum(run.num_seats for run in comparison.runs)
        panels = len(comparison.runs)
        self._axis_y = _TOP + panels * _PANEL_HEAD + rows * (self._row + _GAP) + (panels - 1) * _PANEL_GAP
        self._legend_lines = _legend_lines(
            [*self._palette.legend, ("url(#held0)", "ended, seat held"), (_EMPTY, "empty seat")]
        )
        self.height = self._axis_y + _FOOT + (len(self._legend_lines) - 1) * _LEGEND_LINE

    def _x(self, step: float) -> float:
        return round(_LEFT + min(step / self._last_step, 1.0) * (_WIDTH - _LEFT - _RIGHT), 2)

    def lines(self) -> Iterator[str]:
        yield from self._definitions()
        yield f'<rect width="{_WIDTH}" height="{self.height}" rx="8" fill="#ffffff"/>'
        yield from self._title()
        y = _TOP
        for run in self._comparison.runs:
            yield from self._head(run, y)
            yield from self._rows(run, y + _PANEL_HEAD)
            y += _PANEL_HEAD + run.num_seats * (self._row + _GAP) + _PANEL_GAP
        yield from self._axis()
        yield from self._legend()

    def _definitions(self) -> Iterator[str]:
        yield "<defs>"
        for number, colour in enumerate(self._palette.colours):
            yield (
                f'<pattern id="held{number}" width="7" height="7" patternUnits="userSpaceOnUse" '
                f'patternTransform="rotate(45)"><rect width="7" height="7" fill="{colour}" fill-opacity="0.10"/>'
                f'<rect width="2" height="7" fill="{colour}" fill-opacity="0.45"/></pattern>'
            )
        yield "</defs>"

    def _title(self) -> Iterator[str]:
        comparison = self._comparison
        num_tokens = sum(job.num_output_tokens for job in comparison.scenario.jobs)
        yield _text(_LEFT, 32, comparison.scenario.title, size=19, weight=600)
        facts = (
            f"{len(comparison.scenario.jobs)} jobs, {num_tokens:,} tokens, {comparison.num_seats} seats, "
            f"{comparison.step_s * 1000:g} ms a step"
        )
        yield _text(_LEFT, 53, facts, fill="#5f6673")

    def _ticks(self) -> list[tuple[float, float]]:
        """Where the axis has marks, and their seconds."""
        step_s = self._comparison.step_s
        return [(self._x(s / step_s), s) for s in round_ticks(self._last_step * step_s, _MAX_TICKS)]

    def _axis(self) -> Iterator[str]:
        for x, seconds in self._ticks():
            yield _text(x, self._axis_y + 20, f"{seconds:g} s", anchor="middle", size=12, fill="#5f6673")

    def _head(self, run: PolicyRun, y: float) -> Iterator[str]:
        figures = (
            f"all done {run.total_s:,.1f} s · {run.tokens_per_s:,.1f} tokens/s · "
            f"mean {run.mean_completion_s:,.1f} s · seats busy {run.busy_share:.0%}"
        )
        cut = f" (goes on to {run.total_s:,.1f} s)" if run.num_steps > self._last_step else ""
        yield _text(_LEFT, y + 19, run.policy + cut, size=15, weight=600)
        yield _text(_WIDTH - _RIGHT, y + 19, figures, anchor="end", fill="#3c4350")

    def _rows(self, run: PolicyRun, y: float) -> Iterator[str]:
        """Seats, jobs in them, and the line at which all is done."""
        height = run.num_seats * (self._row + _GAP) - _GAP
        for x, _ in self._ticks():
            yield f'<path d="M{x} {y - 3}v{height + 6}" stroke="#e3e6eb"/>'
        for seat in range(run.num_seats):
            top = y + seat * (self._row + _GAP)
            if self._row >= 12 or seat % 8 == 7:
                middle = top + self._row / 2 + 4
                yield _text(_LEFT - 10, middle, f"seat {seat + 1}", anchor="end", size=12, fill="#5f6673")
            yield self._rect(_LEFT, top, self._x(run.num_steps) - _LEFT, _EMPTY)
        for job in run.jobs:
            if job.start_step < self._last_step:
                yield from self._bar(job, run, y + job.seat * (self._row + _GAP))
        if run.num_steps <= self._last_step:
            yield f'<path d="M{self._x(run.num_steps)} {y - 3}v{height + 6}" stroke="#1d2330" stroke-width="1.5"/>'

    def _bar(self, run: JobRun, of: PolicyRun, top: float) -> Iterator[str]:
        number = self._palette.number(run.job)
        start, end, free = self._x(run.start_step), self._x(run.end_step), self._x(run.free_step)
        tip = (
            f"{run.job.name}: {run.job.num_output_tokens:,} tokens, steps {run.start_step:,} to {run.end_step:,}, "
            f"done {run.end_step * of.step_s:,.2f} s, {run.completion_s:,.2f} s after it came"
        )
        yield f"<g><title>{escape(tip)}</title>"
        if free > end:
            yield self._rect(end, top, free - end, f"url(#held{number})")
        # A hair of white between neighbours; a bar too narrow for that is drawn whole rather than not at all.
        width = max(round(end - start - 1, 2), 0.7)
        yield self._rect(start, top, width, self._palette.colours[number], radius=min(3.0, width / 4))
        label = run.job.name
        if width >= len(label) * _MIN_LABEL_PX + 6 and self._row >= 14:
            yield _text(start + width / 2, top + self._row / 2 + 5, label, anchor="middle", weight=600, fill="#ffffff")
        yield "</g>"

    def _rect(self, x: float, y: float, width: float, fill: str, *, radius: float = 0.0) -> str:
        corners = f' rx="{radius:g}"' if radius else ""
        return f'<rect x="{x:g}" y="{y:g}" width="{width:.2f}" height="{self._row}"{corners} fill="{fill}"/>'

    def _legend(self) -> Iterator[str]:
        for number, line in enumerate(self._legend_lines):
            y = self._axis_y + 42 + number * _LEGEND_LINE
            for x, fill, words in line:
                yield f'<rect x="{x:g}" y="{y:g}" width="20" height="14" rx="2" fill="{fill}"/>'
                yield _text(x + 27, y + 12, words, size=12, fill="#3c4350")


def _last_step(comparison: Comparison) -> int:
    """Where the axis ends. A policy that takes very much longer is cut off there, or the others would be slivers."""
    longest, *others = sorted((run.num_steps for run in comparison.runs), reverse=True)
    return longest if longest <= _MAX_STRETCH * others[0] else others[0]


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
