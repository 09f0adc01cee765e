"""Where a reader stands in a job's log, and how it tells whether a log is still the one it has read.

A server that comes back with less than it had confirmed has forgotten the end of some logs. They grow again,
perhaps with their tokens cut into other events, so that the number of an event says nothing any more: what
was read stands at a number, but another event stands there now. Two things give that away: the very bytes
of the last event read, and the position at which each choice goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jitney.errors import InvalidJob
from jitney.messages import Event


def check_cursor(cursor: int) -> None:
    """Raises InvalidJob for what is no seq."""
    if not isinstance(cursor, int) or cursor < 0:
        raise InvalidJob(f"cursor={cursor!r:.40} must be the seq of an event, or 0 for all of them", param="cursor")


@dataclass(frozen=True, slots=True)
class Message:
    """An event and the very bytes it travelled in."""

    event: Event
    payload: bytes


def parse(payload: bytes) -> Message | None:
    """The message in one payload; None for bytes that are no event (anybody may publish)."""
    try:
        event = Event.decode(payload)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return Message(event, payload) if type(event.seq) is int else None


@dataclass(frozen=True, slots=True)
class Step:
    """What of some messages follows on what was read. objection: why the next one does not; None if all do."""

    taken: list[Message]
    objection: str | None = None


class Position:
    """One reader's place in one log. Pure; it moves only forwards.

    cursor: seq of the last event read, or what the caller says it was; 0 = none. Of a reader that begins
    in the middle, the place of each choice is known from the first event it sees of that choice.
    """

    def __init__(self, cursor: int = 0) -> None:
        self.cursor = cursor
        self._payload: bytes | None = None
        self._has_whole = cursor == 0
        self._next_index: dict[int, int] = {}

    def recognise(self, page: Sequence[Message]) -> str | None:
        """Why a page that was read from the cursor on (its event included) is of another log; None if it is not.

        An empty page is for the caller to judge: that log may still grow. The event at a cursor that a
        caller gave is taken on trust, and remembered.
        """
        if self.cursor == 0 or not page:
            return None
        if page[0].event.seq != self.cursor:
            return f"no longer has event {self.cursor}, which was read"
        if self._payload is None:
            self._remember(page[0])
        return self._other(page[0])

    def take(self, messages: Sequence[Message]) -> Step:
        """Move on over the messages that follow, up to a terminal one; those that were read before are left out."""
        taken: list[Message] = []
        for message in messages:
            objection = self._objection(message.event) or self._other(message)
            if objection is not None:
                return Step(taken, objection)
            if message.event.seq <= self.cursor:
                continue
            self.cursor = message.event.seq
            self._remember(message)
            taken.append(message)
            if message.event.is_terminal:
                break
        return Step(taken)

    def _objection(self, event: Event) -> str | None:
        if event.seq > self.cursor + 1:
            return f"has a hole after event {self.cursor}"
        if event.type != "tokens" or event.seq <= self.cursor:
            return None
        expected = self._next_index.get(event.choice, 0 if self._has_whole else event.index)
        if event.index == expected:
            return None
        return f"goes on with token {event.index} of choice {event.choice} after {expected} of them were read"

    def _other(self, message: Message) -> str | None:
        if message.event.seq != self.cursor or self._payload in (None, message.payload):
            return None
        return f"has another event {self.cursor} than the one that was read"

    def _remember(self, message: Message) -> None:
        event = message.event
        self._payload = message.payload
        if event.type == "tokens":
            self._next_index[event.choice] = event.index + len(event.token_ids)
