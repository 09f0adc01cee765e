"""Control tokens, and how a user's text is kept from becoming one.

Inside, the tokenizer knows every control token only under a *secret name* drawn when it was loaded. Text
can never spell one. What may: a chat template's own text, and a raw prompt, whose control tokens are
renamed just before they are encoded. What the user of a chat spelled is first taken out by `Masks`, so
that nothing is renamed in it, and put back afterwards, when nothing will be.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from jitney.text.files import AddedToken

_SHAPE = re.compile(r"<[|｜].+[|｜]>", re.DOTALL)
"""How models write control tokens, flagged as special or not: <|fim_prefix|> and its like."""

_NOTHING = r"(?!)"


class TokenSet:
    """A set of token strings to look for in text; of two that start at one place the longer one counts."""

    def __init__(self, tokens: Iterable[AddedToken]) -> None:
        longest_first = sorted(tokens, key=lambda token: -len(token.content))
        self.pattern = re.compile(f"({'|'.join(map(_expression, longest_first)) or _NOTHING})")
        self._joined = "\0".join(["", *(token.content for token in longest_first), ""])
        self._longest = max((len(token.content) for token in longest_first), default=0)

    def is_fragment(self, text: str) -> bool:
        """True if `text` could be a part of a token whose other parts stand beside it."""
        return len(text) < self._longest and text in self._joined

    def head(self, text: str) -> int:
        """How many characters at the start of `text` could be the end of a token."""
        return next((n for n in self._lengths(text) if text[:n] + "\0" in self._joined), 0)

    def tail(self, text: str) -> int:
        """How many characters at the end of `text` could be the start of a token."""
        return next((n for n in self._lengths(text) if "\0" + text[-n:] in self._joined), 0)

    def _lengths(self, text: str) -> range:
        return range(min(len(text), self._longest - 1), 0, -1)


class ControlTokens:
    """The tokens that only a template, or a raw prompt, may write.

    These are the special ones, those shaped <|…|>, and those that the template itself writes (it gives
    them a meaning), unless they are white space. Other added tokens are ordinary vocabulary.
    """

    def __init__(self, added: Sequence[AddedToken], template_literals: str = "") -> None:
        self.tokens = tuple(token for token in added if _is_control(token, template_literals))
        self.every = TokenSet(self.tokens)
        self.special = TokenSet(token for token in self.tokens if token.special)
        nonce = secrets.token_hex(16)
        self._names = {token.content: f"<|{nonce}:{token.id}|>" for token in self.tokens}

    def rename(self, text: str) -> str:
        """`text` with every control token under its secret name."""
        return self.every.pattern.sub(lambda match: self._names[match[0]], text)

    def renamed_spec(self, spec: dict[str, Any]) -> dict[str, Any]:
        """tokenizer.json with the secret names instead of the public ones; ids and flags stay."""
        # With this normaliser a normalised token would be found only at the start of a word.
        found_anywhere = {"normalized": False} if _prepends(spec.get("normalizer")) else {}
        added = [
            {**entry, "content": self._names[entry["content"]], **found_anywhere}
            if entry["content"] in self._names
            else entry
            for entry in spec.get("added_tokens") or ()
        ]
        return {**spec, "model": self._renamed_model(spec["model"]), "added_tokens": added}

    def _renamed_model(self, model: dict[str, Any]) -> dict[str, Any]:
        """The vocabulary proper: many hold their control tokens once more, where plain text could reach them."""
        vocab: Any = model.get("vocab") or {}
        if isinstance(vocab, list):
            vocab = [[self._names.get(token, token), score] for token, score in vocab]
        else:
            vocab = {self._names.get(token, token): number for token, number in vocab.items()}
        renamed = {**model, "vocab": vocab}
        if "merges" in model:
            renamed["merges"] = [merge for merge in model["merges"] if not self._is_named(merge)]
        if model.get("unk_token") in self._names:
            renamed["unk_token"] = self._names[model["unk_token"]]
        return renamed

    def _is_named(self, merge: str | list[str]) -> bool:
        """True if this pair of the vocabulary makes, or is made of, a control token."""
        left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        return left in self._names or right in self._names or left + right in self._names


class Masks:
    """Stand-ins for what a user spelled, unique to one rendering.

    A stand-in is a row of digits, which no filter of a template changes (case, white space, JSON). A user
    cannot write one: its first 30 digits are drawn for this rendering.
    """

    def __init__(self) -> None:
        self._nonce = f"{secrets.randbelow(10**30):030d}"
        self._hidden: dict[str, str] = {}

    @property
    def mark(self) -> str:
        """A row of digits that stands for nothing: to find a place again in what a template wrote."""
        return f"{self._nonce}{999_999:06d}"

    def hide(self, text: str, tokens: TokenSet) -> str:
        """`text` without any of the tokens, nor any part of one that its neighbours could complete."""
        if not text:
            return text
        if tokens.is_fragment(text):
            return self._stand_in(text)
        # The odd pieces are tokens. Of the others only the outer ends can grow together with something else.
        pieces = tokens.pattern.split(text)
        pieces[1::2] = map(self._stand_in, pieces[1::2])
        head = tokens.head(pieces[0])
        pieces[:1] = [self._stand_in(pieces[0][:head]), pieces[0][head:]]
        cut = len(pieces[-1]) - tokens.tail(pieces[-1])
        pieces[-1:] = [pieces[-1][:cut], self._stand_in(pieces[-1][cut:])]
        return "".join(pieces)

    def hide_whole(self, text: str, tokens: TokenSet) -> str:
        """As `hide`, whole tokens only: for names of fields, which templates look up and JSON quotes."""
        return tokens.pattern.sub(lambda match: self._stand_in(match[0]), text)

    def reveal(self, text: str) -> str:
        """`text` with what was hidden."""
        if not self._hidden:
            return text
        back = {stand_in: literal for literal, stand_in in self._hidden.items()}
        return re.sub(rf"{self._nonce}\d{{6}}", lambda match: back.get(match[0], match[0]), text)

    def _stand_in(self, literal: str) -> str:
        if not literal:
            return literal
        return self._hidden.setdefault(literal, f"{self._nonce}{len(self._hidden):06d}")


def _expression(token: AddedToken) -> str:
    escaped = re.escape(token.content)
    return rf"(?<!\w){escaped}(?!\w)" if token.single_word else escaped


def _is_control(token: AddedToken, template_literals: str) -> bool:
    if token.special or _SHAPE.fullmatch(token.content):
        return True
    return not token.content.isspace() and token.content in template_literals


def _prepends(normalizer: dict[str, Any] | None) -> bool:
    steps = (normalizer or {}).get("normalizers") or [normalizer or {}]
    return any(step.get("type") == "Prepend" for step in steps)
