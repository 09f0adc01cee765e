"""What a token id stands for, and how ids become text one at a time."""

from __future__ import annotations

from collections.abc import Sequence

from jitney.text.decoders import steps_of
from jitney.text.files import TokenizerFiles
from jitney.text.steps import Step


class Pieces:
    """One tokenizer's ids as bytes and as text. Immutable, for any number of threads."""

    def __init__(self, files: TokenizerFiles) -> None:
        """Raises ModelError for a decoder that cannot be followed."""
        self._tokens = files.tokens()
        self._special = frozenset(token.id for token in files.added if token.special)
        self._steps: tuple[Step, ...] = steps_of(files.spec.get("decoder"))

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def token(self, token_id: int) -> str | None:
        """The token as it stands in the vocabulary; None for an id that is not in it."""
        return self._tokens[token_id] if 0 <= token_id < len(self._tokens) else None

    def is_text(self, token_id: int) -> bool:
        """True if it spells something by itself: not a special token, nor a part of a character."""
        spelled = b"" if self.is_special(token_id) else self.bytes_of(token_id)
        return spelled != b"" and "\ufffd" not in spelled.decode("utf-8", "replace")

    def bytes_of(self, token_id: int) -> bytes:
        """What the token stands for by itself, a leading space kept; empty for an unknown id."""
        piece: str | bytes | None = self.token(token_id)
        if piece is None:
            return b""
        for step in () if self.is_special(token_id) else self._steps:
            if isinstance(piece, bytes):
                break  # what follows joins and trims, which a single token knows nothing of
            piece = step.middle(piece)
        return piece if isinstance(piece, bytes) else piece.encode("utf-8", "replace")

    def stream(self, *, skip_special_tokens: bool = True) -> PieceStream:
        """A new text. Special tokens are not part of it unless they are asked for."""
        return PieceStream(self, self._steps, self._special if skip_special_tokens else frozenset())


class PieceStream:
    """Ids in, text out as soon as it is certain."""

    def __init__(self, pieces: Pieces, steps: tuple[Step, ...], hidden: frozenset[int]) -> None:
        self._pieces, self._hidden = pieces, hidden
        self._feeds = [step.feed() for step in steps]

    def push(self, *token_ids: int) -> str:
        tokens = [self._pieces.token(token_id) for token_id in token_ids if token_id not in self._hidden]
        pieces = [token for token in tokens if token is not None]
        for feed in self._feeds:
            pieces = [shown for piece in pieces for shown in feed.push(piece)]
        return "".join(pieces)

    def follow(self, token_ids: Sequence[int]) -> None:
        """At the start: this text goes on where one of these tokens ends, so a space between the two is a part of it.

        Decoders drop the space before a text's first word. An unfinished character is not carried over: what a text
        of bytes spells never depends on what came before.
        """
        for token_id in reversed(token_ids):
            if self._pieces.is_text(token_id):
                self.push(token_id)
                return

    def flush(self) -> str:
        """At the end: text that waited for a next token, and what there is of an unfinished character."""
        pieces: list[str] = []
        for feed in self._feeds:
            pieces = [*(shown for piece in pieces for shown in feed.push(piece)), *feed.flush()]
        return "".join(pieces)
