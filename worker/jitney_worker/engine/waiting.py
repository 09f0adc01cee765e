"""Sequences that wait for a seat, the soonest first."""

from __future__ import annotations

import heapq

from jitney_worker.engine.sequence import Rank, Sequence, SequenceId


class WaitingQueue:
    """A heap by rank. Push, pop and removal cost O(log n) each, however many wait.

    A removed sequence stays in the heap as an empty shell until it comes up, or until shells outnumber the rest.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, Sequence]] = []
        self._live: dict[SequenceId, Sequence] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, sequence_id: SequenceId) -> bool:
        return sequence_id in self._live

    def push(self, sequence: Sequence) -> None:
        """Enter a newcomer or a preempted sequence; the rank alone says where."""
        self._live[sequence.id] = sequence
        heapq.heappush(self._heap, (sequence.rank, sequence))

    def first(self) -> Sequence | None:
        """The one that is due next, or None."""
        while self._heap:
            sequence = self._heap[0][1]
            if self._live.get(sequence.id) is sequence:
                return sequence
            heapq.heappop(self._heap)
        return None

    def pop(self) -> Sequence:
        """Take out what `first` returns. Raises IndexError if nobody waits."""
        sequence = self.first()
        if sequence is None:
            raise IndexError("nobody is waiting")
        heapq.heappop(self._heap)
        del self._live[sequence.id]
        return sequence

    def remove(self, sequence_id: SequenceId) -> Sequence | None:
        """Take a sequence out wherever it stands; None if it does not wait."""
        sequence = self._live.pop(sequence_id, None)
        if len(self._heap) > 64 + 2 * len(self._live):
            self._heap = [(waiting.rank, waiting) for waiting in self._live.values()]
            heapq.heapify(self._heap)
        return sequence

    def sequences(self) -> list[Sequence]:
        """All that wait, in no order."""
        return list(self._live.values())
