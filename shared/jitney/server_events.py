"""Server-sent events out of bytes that are cut anywhere. Pure.

Source: WHATWG HTML, section 9.2.6, "Interpreting an event stream". Lines may end in LF or CRLF; a CR alone, which
nobody writes, ends none. Data is kept as the bytes it came in.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Frame:
    """What stood between two blank lines. data: None for a comment alone, the sign of life of a silent stream.

    has_id: it carried an id of its own.
    """

    data: bytes | None
    has_id: bool


class Frames:
    """Takes the pieces of one stream, gives the frames that are complete. What an end leaves incomplete is dropped."""

    def __init__(self) -> None:
        self._pending = bytearray()
        self._data: list[bytes] = []
        self._has_id = False
        self._is_begun = False
        self._num_complete = 0

    @property
    def is_whole(self) -> bool:
        """Whether what has come so far ends with a complete frame."""
        return self._num_complete > 0 and not self._pending and not self._is_begun

    def feed(self, piece: bytes) -> list[Frame]:
        """The frames that this piece completes."""
        frames = list[Frame]()
        # Only the new piece is searched: an event of megabytes arrives in hundreds of pieces.
        start = len(self._pending)
        self._pending += piece
        if self._pending.find(b"\n", start) < 0:
            return frames
        *lines, rest = self._pending.split(b"\n")
        self._pending = rest
        for line in lines:
            text = bytes(line.removesuffix(b"\r"))
            if text:
                self._take(text)
            elif self._is_begun:
                frames.append(self._frame())
        return frames

    def _take(self, line: bytes) -> None:
        self._is_begun = True
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
        elif name == b"id":
            self._has_id = True

    def _frame(self) -> Frame:
        frame = Frame(b"\n".join(self._data) if self._data else None, self._has_id)
        self._data, self._has_id, self._is_begun = [], False, False
        self._num_complete += 1
        return frame
