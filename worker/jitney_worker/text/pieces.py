"""What a token id stands for, and how ids become text one at a time.

`tokenizers` has a stream for this (`DecodeStream`), which compares decoded strings. It keeps everything
back for ever once an answer contains bytes that are no character, keeps back a U+FFFD that the model
meant, and does more work with every token that it keeps back. So the two decoders that language models
use are followed here byte by byte; `DecodeStream` remains for any other.

* ByteLevel: every token is bytes; a run that cannot be UTF-8 becomes one U+FFFD.
* Metaspace, with byte fallback or without: a token is text with ▁ for a space, or one byte <0xE2>.
  An invalid byte becomes one U+FFFD. (`Tokenizer.decode` blanks the good characters of the same run of
  bytes too; these have long been shown here, so they stay.)
"""

from __future__ import annotations

import codecs
import re
from abc import ABC, abstractmethod
from typing import Any, Protocol

import orjson
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import DecodeStream

from jitney_worker.text.files import TokenizerFiles

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
REPLACEMENT = "\ufffd"


class PieceStream(Protocol):
    """Ids in, text out as soon as it is certain."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str:
        """Text of an unfinished character, at the end."""
        ...


class Pieces(ABC):
    """One tokenizer's ids as bytes. Immutable, for any number of threads. Special tokens are not text."""

    def __init__(self, files: TokenizerFiles) -> None:
        self._tokens = files.tokens()
        self._special = frozenset(token.id for token in files.added if token.special)

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def token(self, token_id: int) -> str | None:
        """The token as it stands in the vocabulary; None for an id that is not in it."""
        return self._tokens[token_id] if 0 <= token_id < len(self._tokens) else None

    def bytes_of(self, token_id: int) -> bytes:
        """What the token stands for by itself, a leading space kept; empty for an unknown id."""
        token = self.token(token_id)
        if token is None:
            return b""
        return token.encode("utf-8", "replace") if self.is_special(token_id) else self._bytes(token)

    @abstractmethod
    def _bytes(self, token: str) -> bytes: ...

    @abstractmethod
    def stream(self) -> PieceStream: ...


class BytePieces(Pieces):
    """ByteLevel: each character of a token stands for one byte."""

    def _bytes(self, token: str) -> bytes:
        try:
            return bytes(_BYTE_OF[character] for character in token)
        except KeyError:  # an added token that was never written in that alphabet
            return token.encode("utf-8", "replace")

    def visible(self, token_id: int) -> bytes:
        token = None if self.is_special(token_id) else self.token(token_id)
        return b"" if token is None else self._bytes(token)

    def stream(self) -> PieceStream:
        return _ByteStream(self)


class _ByteStream:
    def __init__(self, pieces: BytePieces) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._pieces.visible(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class SpacePieces(Pieces):
    """Metaspace: `mark` stands for a space, <0xE2> for a byte if there is byte fallback.

    lead: what becomes of a space at the very start of an answer. "keep" it, "strip" one, or "drop" every
    mark of the first token.
    """

    def __init__(self, files: TokenizerFiles, *, mark: str, lead: str, byte_fallback: bool) -> None:
        super().__init__(files)
        self.mark, self.lead, self.byte_fallback = mark, lead, byte_fallback

    def byte(self, token: str) -> bytes | None:
        """The byte that a fallback token stands for."""
        return bytes([int(token[3:5], 16)]) if self.byte_fallback and _BYTE_TOKEN.fullmatch(token) else None

    def _bytes(self, token: str) -> bytes:
        return self.byte(token) or token.replace(self.mark, " ").encode("utf-8", "replace")

    def stream(self) -> PieceStream:
        return _SpaceStream(self)


class _SpaceStream:
    def __init__(self, pieces: SpacePieces) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")(_PER_BYTE)
        self._first_token = pieces.lead == "drop"
        self._first_text = pieces.lead == "strip"

    def push(self, token_id: int) -> str:
        token = None if self._pieces.is_special(token_id) else self._pieces.token(token_id)
        if token is None:
            return ""
        byte = self._pieces.byte(token)
        if byte is not None:
            text = self._decoder.decode(byte)
        else:
            text = self._decoder.decode(b"", final=True)
            text += token.replace(self._pieces.mark, "" if self._first_token else " ")
        self._first_token = False
        return self._from_start(text)

    def flush(self) -> str:
        return self._from_start(self._decoder.decode(b"", final=True))

    def _from_start(self, text: str) -> str:
        if text and self._first_text:
            self._first_text = False
            return text.removeprefix(" ")
        return text


class OtherPieces(Pieces):
    """Any other decoder: what `tokenizers` makes of it, with its stream's delays."""

    def __init__(self, files: TokenizerFiles) -> None:
        super().__init__(files)
        self.tokenizer = FastTokenizer.from_buffer(orjson.dumps(files.spec))

    def _bytes(self, token: str) -> bytes:
        return token.encode("utf-8", "replace")

    def stream(self) -> PieceStream:
        return _WindowStream(self)


class _WindowStream:
    def __init__(self, pieces: OtherPieces) -> None:
        self._pieces = pieces
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._num_shown = 0

    def push(self, token_id: int) -> str:
        if self._pieces.is_special(token_id) or self._pieces.token(token_id) is None:
            return ""
        self._ids.append(token_id)
        text = self._stream.step(self._pieces.tokenizer, token_id) or ""
        self._num_shown += len(text)
        return text

    def flush(self) -> str:
        return str(self._pieces.tokenizer.decode(self._ids))[self._num_shown :]


def pieces_of(files: TokenizerFiles) -> Pieces:
    """The decoder that tokenizer.json asks for."""
    decoder = files.spec.get("decoder") or {}
    steps: list[dict[str, Any]] = decoder.get("decoders") or [decoder]
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return BytePieces(files)
    if kinds == ["Metaspace"]:
        mark = str(steps[0].get("replacement", "▁"))
        lead = "keep" if steps[0].get("prepend_scheme", "always") == "never" else "drop"
        return SpacePieces(files, mark=mark, lead=lead, byte_fallback=False)
    if kinds in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
        mark = steps[0].get("pattern", {}).get("String")
        strips = [(step.get("content"), step.get("start"), step.get("stop")) for step in steps[3:]]
        if mark and steps[0].get("content") == " " and strips in ([], [(" ", 1, 0)]):
            return SpacePieces(files, mark=mark, lead="strip" if strips else "keep", byte_fallback=True)
    return OtherPieces(files)


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
