"""The decoders of a tokenizer.json, followed one token at a time.

`tokenizers` decodes whole answers; its stream (`DecodeStream`) compares decoded strings, keeps everything back for
ever once an answer holds bytes that are no character, keeps back a U+FFFD that the model meant, does more work with
every token that it keeps back, and fails where a decoder treats the last token as special. So each step of a decoder
is followed here by a state of its own, with work per token that does not depend on the tokens before.

A step takes pieces (at first: tokens) and gives pieces; what they spell together is the text. Two differ from
`tokenizers`, because what has been shown cannot be taken back: in a run of fallback bytes that is partly invalid
each bad byte is one U+FFFD and good characters stay (there, all of the run is blanked), and a run of fallback bytes
is as many pieces as it has characters.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable
from typing import Any, Protocol

from tokenizers import Regex, decoders

from jitney.errors import ModelError

REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


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


def steps_of(decoder: dict[str, Any] | None) -> tuple[Step, ...]:
    """The steps of the `decoder` of a tokenizer.json. Raises ModelError for one that cannot be followed."""
    if decoder is None:  # `tokenizers` then puts a space between two tokens
        return (PieceByPiece(lambda piece, first: piece if first else " " + piece),)
    found: list[Step] = []
    is_whole = False
    for spec in _flat(decoder):
        kind = str(spec.get("type"))
        try:
            step = _WHOLE[kind](spec) if is_whole else _STEPS[kind](spec)
        except (KeyError, TypeError, ValueError):
            behind = " behind one that makes one piece of everything" if is_whole else ""
            raise ModelError(
                f"tokenizer.json has a decoder {kind}{behind} that cannot be followed token by token; "
                f"these can: {', '.join(_STEPS)}"
            ) from None
        if step is not None:
            found.append(step)
        is_whole = is_whole or kind in ("Fuse", "ByteLevel")
    return tuple(found)


def _flat(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder.get("type") != "Sequence":
        return [decoder]
    return [step for inner in decoder["decoders"] for step in _flat(inner)]


def _byte_level(spec: dict[str, Any]) -> Step:
    return Bytes(_bytes_of_letters, "replace")


def _bytes_of_letters(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF[character] for character in token)
    except KeyError:  # an added token that was never written in that alphabet
        return token.encode("utf-8", "replace")


def _byte_fallback(spec: dict[str, Any]) -> Step:
    return Bytes(_fallback_byte, _PER_BYTE)


def _fallback_byte(token: str) -> bytes | None:
    return bytes([int(token[3:5], 16)]) if _BYTE_TOKEN.fullmatch(token) else None


def _replace(spec: dict[str, Any]) -> Step:
    content = str(spec["content"])
    if "String" in spec["pattern"]:
        literal = str(spec["pattern"]["String"])
        return PieceByPiece(lambda piece, first: piece.replace(literal, content))
    # Its dialect of regular expressions is not Python's, so `tokenizers` itself replaces.
    decoder = decoders.Replace(Regex(spec["pattern"]["Regex"]), content)
    return PieceByPiece(lambda piece, first: str(decoder.decode([piece])))


def _replace_in_whole(spec: dict[str, Any]) -> Step:
    if len(spec["pattern"]["String"]) != 1:
        raise ValueError("what is replaced could lie in two pieces")
    return _replace(spec)


def _metaspace(spec: dict[str, Any]) -> Step:
    mark = str(spec["replacement"])
    lead = " " if spec.get("prepend_scheme", "always") == "never" else ""
    return PieceByPiece(lambda piece, first: piece.replace(mark, lead if first else " "))


def _word_piece(spec: dict[str, Any]) -> Step:
    decoder = decoders.WordPiece(str(spec["prefix"]), bool(spec["cleanup"]))

    def spell(piece: str, first: bool) -> str:
        # It joins its pieces: behind a letter stands what the piece is in the middle of a text.
        return str(decoder.decode([piece])) if first else str(decoder.decode(["x", piece]))[1:]

    return PieceByPiece(spell)


def _bpe(spec: dict[str, Any]) -> Step:
    suffix = str(spec["suffix"])
    if not suffix:
        raise ValueError("every character would be the end of a word")
    return WordEnds(suffix)


def _strip_each(spec: dict[str, Any]) -> Step:
    trim = _trim(spec)
    return PieceByPiece(lambda piece, first: "".join(trim.feed().push(piece)))


def _trim(spec: dict[str, Any]) -> Trim:
    return Trim(str(spec["content"]), int(spec["start"]), int(spec["stop"]))


Make = Callable[[dict[str, Any]], Step | None]
_STEPS: dict[str, Make] = {
    "ByteLevel": _byte_level,
    "ByteFallback": _byte_fallback,
    "Replace": _replace,
    "Metaspace": _metaspace,
    "WordPiece": _word_piece,
    "BPEDecoder": _bpe,
    "Strip": _strip_each,
    "Fuse": lambda spec: None,
}
_WHOLE: dict[str, Make] = {"Replace": _replace_in_whole, "Strip": _trim, "Fuse": lambda spec: None}
"""Where all pieces are one already: what can be said of it before it has ended."""


def _byte_alphabet() -> dict[str, int]:
    """Character → byte, GPT-2's table: printable bytes stand for themselves, the others follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _blank_each(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT * (error.end - error.start), error.end


_PER_BYTE = "jitney.one-per-byte"
codecs.register_error(_PER_BYTE, _blank_each)
