"""What every client saw, when, and when the faults were: kept in memory, and as JSON lines for people."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TextIO

from jitney.messages import Event

Kind = Literal["accepted", "refused", "event", "broken", "lost", "logged", "billed", "fault", "worker"]


@dataclass(frozen=True, slots=True)
class Line:
    """One observation.

    name: of the request, the same however often it is submitted. reader: who saw it ("" = nobody's reading).
    payload: an event's bytes as they came. text: an error, a fault, or what a worker said.
    """

    at: float
    kind: Kind
    name: str = ""
    job: str = ""
    reader: str = ""
    payload: str = ""
    text: str = ""

    @property
    def event(self) -> Event:
        return Event.decode(self.payload)


@dataclass(slots=True)
class Ledger:
    """One run's lines, in order of time. path: where they are written too."""

    path: Path | None = None
    lines: list[Line] = field(default_factory=list)
    _file: TextIO | None = None

    def add(self, kind: Kind, **fields: Any) -> Line:
        line = Line(time.monotonic(), kind, **fields)
        self.lines.append(line)
        if self.path is not None:
            if self._file is None:
                self._file = self.path.open("w")
            shown = {name: value for name, value in asdict(line).items() if value != ""}
            self._file.write(json.dumps(shown) + "\n")
        return line

    def accepted(self, name: str, job: str) -> None:
        """The queue said yes."""
        self.add("accepted", name=name, job=job)

    def refused(self, name: str, error: object) -> None:
        """The queue said no, or nothing: the request will be submitted again, or given up."""
        self.add("refused", name=name, text=f"{error!r}")

    def saw(self, name: str, job: str, reader: str, payload: bytes | str) -> None:
        """A reader was given an event."""
        text = payload.decode() if isinstance(payload, bytes) else payload
        self.add("event", name=name, job=job, reader=reader, payload=text)

    def broken(self, name: str, job: str, reader: str, error: object) -> None:
        """A reader's connection ended before the job; it comes back with its cursor."""
        self.add("broken", name=name, job=job, reader=reader, text=f"{error!r}")

    def lost(self, name: str, job: str, reader: str, error: object) -> None:
        """A reader was told that nothing more will come: the job or its log is gone."""
        self.add("lost", name=name, job=job, reader=reader, text=f"{error!r}")

    def logged(self, name: str, job: str, payload: bytes) -> None:
        """An event of the job's log, as the queue keeps it: what a reader who comes late would be given."""
        self.add("logged", name=name, job=job, reader="log", payload=payload.decode())

    def billed(self, name: str, job: str, num_tokens: int) -> None:
        """An entry of the queue's usage ledger: a job that ended, and the tokens it is charged for."""
        self.add("billed", name=name, job=job, text=str(num_tokens))

    def fault(self, text: str) -> None:
        self.add("fault", text=text)

    def of(self, *kinds: Kind) -> Iterator[Line]:
        return (line for line in self.lines if line.kind in kinds)

    @property
    def first_fault_at(self) -> float | None:
        return next((line.at for line in self.of("fault")), None)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
