"""The batch on a terminal: who sits where, who joined and left at which step, tokens per second."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from jitney.keys import JobId
from jitney.workers import WorkerView

NUM_MOVES_SHOWN = 8
RATE_WINDOW_S = 2.0


@dataclass(slots=True)
class Rider:
    """A job as the page shows it."""

    number: int
    prompt: str
    text: str = ""
    num_tokens: int = 0
    joined_step: int | None = None
    left_step: int | None = None
    reason: str = ""


@dataclass(slots=True)
class BatchPage:
    """State of the page; `see` takes a worker's view in, `render` draws.

    A rider keeps the seat it was first seen in; the engine itself knows no seat numbers.
    """

    num_seats: int
    riders: dict[JobId, Rider]
    seats: list[JobId | None] = field(default_factory=list)
    moves: list[str] = field(default_factory=list)
    step: int = 0
    _counts: deque[tuple[float, int]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.seats = [None] * self.num_seats

    def see(self, view: WorkerView) -> list[str]:
        """Take a view in; the joins and leaves that are new, oldest first, as sentences."""
        self.step = max(self.step, view.step)
        moves: list[tuple[int, int, str]] = []
        for departure in view.departures:
            rider = self.riders.get(JobId(departure.job))
            if rider is not None and rider.left_step is None:
                moves += self._join(rider, departure.joined_step)
                rider.left_step, rider.reason = departure.left_step, departure.reason
                what = f"step {departure.left_step:>4}  #{rider.number:<2} left    "
                moves.append(
                    (departure.left_step, 1, f"{what} {departure.num_output_tokens} tokens, {departure.reason}")
                )
        for seat in view.seats:
            rider = self.riders.get(JobId(seat.job))
            if rider is not None:
                moves += self._join(rider, seat.joined_step)
        self._seat(view)
        self._counts.append((time.monotonic(), view.num_generated_tokens))
        while len(self._counts) > 2 and self._counts[-1][0] - self._counts[0][0] > RATE_WINDOW_S:
            self._counts.popleft()
        lines = [line for _, _, line in sorted(moves)]
        self.moves += lines
        return lines

    def _join(self, rider: Rider, step: int) -> list[tuple[int, int, str]]:
        if rider.joined_step is not None:
            return []
        rider.joined_step = step
        return [(step, 0, f"step {step:>4}  #{rider.number:<2} joined   {rider.prompt}")]

    def _seat(self, view: WorkerView) -> None:
        sitting = {JobId(seat.job) for seat in view.seats}
        self.seats = [job if job in sitting else None for job in self.seats]
        for job in (JobId(seat.job) for seat in view.seats):
            if job in self.riders and job not in self.seats and None in self.seats:
                self.seats[self.seats.index(None)] = job

    @property
    def tokens_per_s(self) -> float:
        """Over the last two seconds."""
        if len(self._counts) < 2:
            return 0.0
        (start, first), (end, last) = self._counts[0], self._counts[-1]
        return (last - first) / (end - start) if end > start else 0.0

    def render(self) -> Group:
        table = Table(expand=True, show_edge=False, pad_edge=False)
        table.add_column("seat", width=4)
        table.add_column("job", width=4)
        table.add_column("joined", justify="right", width=8)
        table.add_column("tokens", justify="right", width=6)
        table.add_column("answer so far", no_wrap=True, ratio=1)
        for number, job in enumerate(self.seats, 1):
            rider = self.riders[job] if job is not None else None
            if rider is None:
                table.add_row(str(number), "", "", "", Text("free", style="dim"))
            else:
                tail = " ".join(rider.text.split())[-60:]
                joined = f"step {rider.joined_step}"
                table.add_row(str(number), f"#{rider.number}", joined, str(rider.num_tokens), Text(tail))
        waiting = sum(rider.joined_step is None for rider in self.riders.values())
        done = sum(rider.left_step is not None for rider in self.riders.values())
        title = f"step {self.step}   {self.tokens_per_s:5.0f} tokens/s   {waiting} waiting   {done} done"
        moves = Text("\n".join(self.moves[-NUM_MOVES_SHOWN:]), style="dim", no_wrap=True, overflow="ellipsis")
        return Group(Panel(table, title=title, title_align="left"), moves)
