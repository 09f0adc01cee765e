"""The decoders of a tokenizer.json, followed one token at a time.

`tokenizers` decodes whole answers; its stream (`DecodeStream`) compares decoded strings, keeps everything back for
ever once an answer holds bytes that are no character, keeps back a U+FFFD that the model meant, does more work with
every token that it keeps back, and fails where a decoder treats the last token as special. So each step of a decoder
is followed here by a state of its own (see `steps`).

Two things differ from `tokenizers`, because what has been shown cannot be taken back: in a run of fallback bytes that
is partly invalid each bad byte is one U+FFFD and good characters stay (there, all of the run is blanked), and a run
of fallback bytes is as many pieces as it has characters.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from tokenizers import Regex, decoders

from jitney.errors import ModelError
from jitney.text.steps import Bytes, PieceByPiece, Step, Trim, WordEnds

REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


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


@lru_cache(maxsize=1 << 15)
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
