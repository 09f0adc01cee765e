"""When a seat may be filled: the one difference between the policies."""

from __future__ import annotations

from typing import Protocol

from jitney_worker.engine.sequence import Sequence, SequenceId
from jitney_worker.engine.settings import EngineSettings


class Seats(Protocol):
    """Who may sit down. `num_running` is always the number of sequences that are being computed.

    can_be_taken: whether somebody of a more urgent band may have the seat of another one.
    """

    can_be_taken: bool

    def open_step(self, num_running: int, first_waiting: Sequence | None) -> None:
        """A step begins."""
        ...

    def admits(self, sequence: Sequence, num_taken: int) -> bool:
        """True if there is a seat for this one now. num_taken: seats in use, or kept for somebody in this step."""
        ...

    def seat(self, sequence: Sequence) -> None:
        """It has sat down, or a seat is kept for it while a sibling computes its prompt."""
        ...

    def close_step(self, *, budget_left: int) -> None:
        """No more join in this step; tokens of the budget may be left."""
        ...

    def keeps(self, sequence_id: SequenceId) -> bool:
        """True if the seat of one that is not being computed is nobody else's yet."""
        ...

    def num_free(self, num_running: int, num_waiting: int) -> int:
        """Seats that neither running nor waiting sequences will need."""
        ...


class ContinuousSeats:
    """A seat is free as soon as its sequence has ended, or somebody more urgent needs it."""

    can_be_taken = True

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs

    def open_step(self, num_running: int, first_waiting: Sequence | None) -> None:
        pass

    def admits(self, sequence: Sequence, num_taken: int) -> bool:
        return num_taken < self._max_num_seqs

    def seat(self, sequence: Sequence) -> None:
        pass

    def close_step(self, *, budget_left: int) -> None:
        pass

    def keeps(self, sequence_id: SequenceId) -> bool:
        return False

    def num_free(self, num_running: int, num_waiting: int) -> int:
        return max(0, self._max_num_seqs - num_running - num_waiting)


class StaticSeats:
    """Seats are filled when all are empty, and held until the slowest of that batch has ended.

    A batch stays open over several steps if only the token budget kept others from joining. A preempted
    member keeps its seat and may return to it. Ended members keep theirs too, and compute nothing.
    A batch of which nobody runs is over, unless a preempted member is next in line: if somebody else were
    waited for behind it, neither would ever start.
    """

    can_be_taken = False

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._batch: set[SequenceId] = set()
        self._open = True

    def open_step(self, num_running: int, first_waiting: Sequence | None) -> None:
        if num_running == 0 and (first_waiting is None or first_waiting.id not in self._batch):
            self._batch.clear()
            self._open = True

    def admits(self, sequence: Sequence, num_taken: int) -> bool:
        if sequence.id in self._batch:
            return True
        return self._open and len(self._batch) < self._max_num_seqs

    def seat(self, sequence: Sequence) -> None:
        self._batch.add(sequence.id)

    def close_step(self, *, budget_left: int) -> None:
        self._open = not self._batch or (self._open and budget_left == 0)

    def keeps(self, sequence_id: SequenceId) -> bool:
        return sequence_id in self._batch

    def num_free(self, num_running: int, num_waiting: int) -> int:
        return max(0, self._max_num_seqs - num_waiting) if num_running == 0 else 0


def seats_for(settings: EngineSettings) -> Seats:
    """The seats of the policy."""
    if settings.policy == "static":
        return StaticSeats(settings.max_num_seqs)
    return ContinuousSeats(settings.max_num_seqs)
