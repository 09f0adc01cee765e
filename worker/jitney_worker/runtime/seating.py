"""Which seat is whose. The engine knows no seat numbers: whoever joins takes the lowest free one here."""

from __future__ import annotations

from collections import deque
from typing import Final

from jitney.workers import Move
from jitney_worker.engine.movements import Movement
from jitney_worker.engine.protocol import EngineSnapshot
from jitney_worker.engine.sequence import SequenceId
from jitney_worker.runtime.choice import named

NUM_MOVES_KEPT: Final = 64


class Seating:
    """Plays the engine's movements, one snapshot after the other. moves: the last of them, with the seats."""

    def __init__(self) -> None:
        self.moves: deque[Move] = deque(maxlen=NUM_MOVES_KEPT)
        self._numbers: dict[SequenceId, int] = {}

    def number(self, id: SequenceId) -> int:
        """Of its seat; 0 for somebody who has none."""
        return self._numbers.get(id, 0)

    def see(self, snapshot: EngineSnapshot, at: float) -> None:
        """at: Unix seconds, for the moves in it."""
        for movement in snapshot.movements:
            self._play(movement, at)
        # What fell out of the engine's ring was never told: who sits is true all the same.
        sitting = {seat.id for seat in snapshot.seats}
        for id in self._numbers.keys() - sitting:
            del self._numbers[id]
        for seat in snapshot.seats:
            self._seat(seat.id)

    def _play(self, movement: Movement, at: float) -> None:
        id = movement.id
        number = self._seat(id) if movement.kind == "joined" else self._numbers.pop(id, 0)
        name = named(id)
        self.moves.append(
            Move(kind=movement.kind, step=movement.step, job=name.job_id, choice=name.choice, seat=number, at=at)
        )

    def _seat(self, id: SequenceId) -> int:
        if id not in self._numbers:
            taken = set(self._numbers.values())
            self._numbers[id] = next(number for number in range(1, len(taken) + 2) if number not in taken)
        return self._numbers[id]
