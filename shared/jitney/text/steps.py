"""What the steps of a decoder do with pieces that arrive one at a time.

A step takes pieces (at first: tokens) and gives pieces; what they spell together is the text. Each has a state of
its own, and its work for a piece does not depend on how many came before.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from typing import Protocol


class Feed(Protocol):
    """One step's state in one text."""

    def push(self, piece: str) -> list[str]:
        """The pieces that are certain with this one."""
        ...

    def flush(self) -> list[str]:
        """At the end of the text: what was held back, once."""
        ...


class Step(Protocol):
    """One step of a decoder. Immutable."""

    def feed(self) -> Feed:
        """A new text."""
        ...

    def middle(self, piece: str) -> str | bytes:
        """What a piece stands for by itself, in the middle of a text."""
        ...


Spell = Callable[[str, bool], str]
"""(piece, is it the first of its text) → what it spells."""


class PieceByPiece:
    """A step that looks at one piece at a time, and at whether it is the first."""

    def __init__(self, spell: Spell) -> None:
        self._spell = spell

    def feed(self) -> Feed:
        return _PieceByPieceFeed(self._spell)

    def middle(self, piece: str) -> str:
        return self._spell(piece, False)


class _PieceByPieceFeed:
    def __init__(self, spell: Spell) -> None:
        self._spell, self._first = spell, True

    def push(self, piece: str) -> list[str]:
        first, self._first = self._first, False
        return [self._spell(piece, first)]

    def flush(self) -> list[str]:
        return []


class WordEnds:
    """BPEDecoder: a suffix marks the end of a word, a space in the text unless it is the end of the text."""

    def __init__(self, suffix: str) -> None:
        self.suffix = suffix

    def feed(self) -> Feed:
        return _WordEndsFeed(self.suffix)

    def middle(self, piece: str) -> str:
        return piece.replace(self.suffix, " ")


class _WordEndsFeed:
    def __init__(self, suffix: str) -> None:
        self._suffix = suffix
        self._held: list[str] = []

    def push(self, piece: str) -> list[str]:
        word, *ends = piece.split(self._suffix)
        shown = " ".join(self._held) + word
        # All ends of one token are held back: they are spaces only if another token follows.
        self._held = ["", *ends] if ends else []
        return [shown]

    def flush(self) -> list[str]:
        held, self._held = self._held, []
        return ["".join(held)] if held else []


class Bytes:
    """Pieces that stand for bytes, and become text as soon as a character is whole.

    bytes_of: the bytes of a piece, or None if it is text by itself, which ends a run of bytes.
    errors: the codec's error handler.
    """

    def __init__(self, bytes_of: Callable[[str], bytes | None], errors: str) -> None:
        self._bytes_of, self._errors = bytes_of, errors

    def feed(self) -> Feed:
        return _BytesFeed(self._bytes_of, codecs.getincrementaldecoder("utf-8")(self._errors))

    def middle(self, piece: str) -> str | bytes:
        content = self._bytes_of(piece)
        return piece if content is None else content


class _BytesFeed:
    def __init__(self, bytes_of: Callable[[str], bytes | None], decoder: codecs.IncrementalDecoder) -> None:
        self._bytes_of, self._decoder = bytes_of, decoder

    def push(self, piece: str) -> list[str]:
        content = self._bytes_of(piece)
        if content is None:
            return [*self.flush(), piece]
        text = self._decoder.decode(content)
        return [text] if text else []

    def flush(self) -> list[str]:
        text = self._decoder.decode(b"", final=True)
        return [text] if text else []


class Trim:
    """Strip, of a whole text: up to `start` times `content` at its start, up to `stop` times at its end."""

    def __init__(self, content: str, start: int, stop: int) -> None:
        self.content, self.start, self.stop = content, start, stop

    def feed(self) -> Feed:
        return _TrimFeed(self.content, self.start, self.stop)

    def middle(self, piece: str) -> str:
        return piece


class _TrimFeed:
    def __init__(self, content: str, start: int, stop: int) -> None:
        self._content, self._start, self._stop = content, start, stop
        self._num_held = 0

    def push(self, piece: str) -> list[str]:
        while piece and self._start:
            if piece[0] != self._content:
                self._start = 0
                break
            piece, self._start = piece[1:], self._start - 1
        if not self._stop:
            return [piece]
        text = self._content * self._num_held + piece
        self._num_held = min(self._stop, len(text) - len(text.rstrip(self._content)))
        return [text[: len(text) - self._num_held]]

    def flush(self) -> list[str]:
        self._num_held = 0
        return []
