"""A record read back: what happened between each two forward passes, and during them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from jitney.errors import BadRecord
from jitney_worker.engine.witness import Came, Dropped, Left, Step
from jitney_worker.record.lines import LINE, Began, Full, Line


@dataclass(frozen=True, slots=True)
class Boundary:
    """From the end of one forward pass to the end of the next one.

    at_s: when that one was over, in seconds since the record began. ended: who left with the pass before.
    came, dropped: since that pass. step: the next pass, and what was decided for it.
    """

    at_s: float
    ended: tuple[Left, ...]
    came: tuple[Came, ...]
    dropped: tuple[Dropped, ...]
    step: Step


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """One run of one worker. came: everybody that ever came in, by number.

    first_came_s: when the first of them did. last_came, last_dropped: after the last step.
    is_cut: the run went on when its record had reached its bound.
    """

    began: Began
    boundaries: tuple[Boundary, ...]
    came: dict[int, Came]
    first_came_s: float = 0.0
    last_came: tuple[Came, ...] = ()
    last_dropped: tuple[Dropped, ...] = ()
    is_cut: bool = False

    @property
    def steps(self) -> tuple[Step, ...]:
        return tuple(boundary.step for boundary in self.boundaries)

    def before(self, step: int) -> Boundary:
        """What led to this step. Raises BadRecord, with the steps that there are."""
        for boundary in self.boundaries:
            if boundary.step.step == step:
                return boundary
        raise BadRecord(f"step {step} is not in the record, which has {self.range}")

    @property
    def range(self) -> str:
        """The steps that there are, in words."""
        if not self.boundaries:
            return "no step"
        return f"steps {self.boundaries[0].step.step} to {self.boundaries[-1].step.step}"


@dataclass(slots=True)
class _Reader:
    began: Began
    boundaries: list[Boundary] = field(default_factory=list)
    first_came_s: float = 0.0
    everybody: dict[int, Came] = field(default_factory=dict)
    came: list[Came] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)
    is_cut: bool = False

    def take(self, line: Line) -> None:
        match line.entry:
            case Came() as came:
                self.first_came_s = self.first_came_s or line.at_s
                self.everybody[came.number] = came
                self.came.append(came)
            case Dropped() as dropped:
                self.dropped.append(dropped)
            case Step() as step:
                ended = self.boundaries[-1].step.left if self.boundaries else ()
                self.boundaries.append(Boundary(line.at_s, ended, tuple(self.came), tuple(self.dropped), step))
                self.came, self.dropped = [], []
            case Full():
                self.is_cut = True

    def run(self) -> RecordedRun:
        return RecordedRun(
            self.began,
            tuple(self.boundaries),
            self.everybody,
            self.first_came_s,
            tuple(self.came),
            tuple(self.dropped),
            self.is_cut,
        )


def read_runs(path: Path) -> list[RecordedRun]:
    """All runs in a file, the oldest first; a worker that is started again goes on in the same one.

    A line that a killed worker did not finish is left out. Raises BadRecord for anything else, OSError for a file
    that cannot be read.
    """
    readers: list[_Reader] = []
    for number, line in _lines(path):
        if isinstance(line.entry, Began):
            readers.append(_Reader(line.entry))
        elif not readers:
            raise BadRecord(f"{path.name} line {number}: a record begins with `began`, not with {line.entry.kind!r}")
        else:
            readers[-1].take(line)
    if not readers:
        raise BadRecord(f"{path.name} holds no record: a worker writes one with --record FILE")
    return [reader.run() for reader in readers]


def _lines(path: Path) -> Iterator[tuple[int, Line]]:
    unread: tuple[int, ValidationError] | None = None
    for number, raw in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            line = LINE.validate_json(raw)
        except ValidationError as error:
            if unread is not None:
                raise _bad(path, *unread) from None
            unread = number, error
            continue
        if unread is not None and not isinstance(line.entry, Began):
            raise _bad(path, *unread)
        unread = None
        yield number, line
    if unread is not None and (unread[0] == 1 or unread[1].errors()[0]["type"] != "json_invalid"):
        raise _bad(path, *unread)


def _bad(path: Path, number: int, error: ValidationError) -> BadRecord:
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return BadRecord(f"{path.name} line {number}: {where + ': ' if where else ''}{first['msg']}")
