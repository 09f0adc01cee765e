"""The newest events of a running job's log, byte for byte as its owner wrote them.

A server that comes back without its last seconds has lost the end of a log that readers have heard already.
Whoever wrote that end writes it again; computed anew, the tokens might be cut into other events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

MAX_EVENTS: Final = 512
"""Ten times what a server that flushes once a second loses of a log at fifty steps a second."""

MAX_BYTES: Final = 256 * 1024
"""Bounds events that carry log probabilities: a full batch keeps no more than so much for each of its jobs."""


class LogTail:
    """Events of one claim, in order and without a gap; the oldest are forgotten.

    next_seq: seq of the event that will be kept next.
    """

    def __init__(self, next_seq: int) -> None:
        self.next_seq = next_seq
        self._events: deque[bytes] = deque()
        self._num_bytes = 0

    def extend(self, first_seq: int, events: Sequence[bytes]) -> None:
        """Keep what is being written now; it need not have arrived yet."""
        assert first_seq == self.next_seq, f"the log goes on with {self.next_seq}, not with {first_seq}"
        self._events.extend(events)
        self._num_bytes += sum(map(len, events))
        self.next_seq += len(events)
        while len(self._events) > MAX_EVENTS or self._num_bytes > MAX_BYTES:
            self._num_bytes -= len(self._events.popleft())

    def after(self, seq: int) -> list[bytes]:
        """All events after `seq`. Empty if there is none, or if the next one is not kept (any more)."""
        num_missing = self.next_seq - 1 - seq
        if not 0 < num_missing <= len(self._events):
            return []
        return list(self._events)[-num_missing:]
