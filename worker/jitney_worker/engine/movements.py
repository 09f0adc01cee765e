"""The last times that a seat changed hands, kept for whoever looks at the batch now and then."""

from __future__ import annotations

from collections import deque
from typing import Final, Literal, NamedTuple

from jitney_worker.engine.sequence import SequenceId

NUM_KEPT: Final = 256
"""Of a full batch that changes hands four times between two looks."""

Kind = Literal["joined", "preempted", "left"]


class Movement(NamedTuple):
    """In the step of this number it joined, lost its seat before it was computed, or was there for the last time."""

    step: int
    kind: Kind
    id: SequenceId


class Movements:
    """A ring that never grows. num_noted: how many there were, those that have fallen out included."""

    def __init__(self) -> None:
        self.num_noted = 0
        self._ring: deque[Movement] = deque(maxlen=NUM_KEPT)

    def note(self, step: int, kind: Kind, id: SequenceId) -> None:
        self.num_noted += 1
        self._ring.append(Movement(step, kind, id))

    def since(self, num_seen: int) -> tuple[Movement, ...]:
        """Those after the first `num_seen`, oldest first; of too many, the youngest."""
        num_new = min(self.num_noted - num_seen, len(self._ring))
        return tuple(self._ring)[len(self._ring) - num_new :]
