"""Log probabilities as they stand in an event."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

from jitney_worker.text.tokenizer import Tokenizer

LOWEST: Final = -9999.0
"""Stands for minus infinity, for which JSON has no word; OpenAI's own number."""


class Logprobs(Protocol):
    """Of one token: its own log probability, and the most probable ids with theirs, best first.

    rank: how many tokens are at least as probable; None where nobody counted.
    """

    @property
    def logprob(self) -> float: ...

    @property
    def top(self) -> Sequence[tuple[int, float]]: ...
    @property
    def rank(self) -> int | None: ...


class LogprobSpeller:
    """Turns ids and their log probabilities into what stands in an event. For any number of threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._pieces = tokenizer.pieces

    def __call__(self, token_ids: Sequence[int], logprobs: Sequence[Logprobs]) -> list[dict[str, Any]]:
        """One entry for each token: {token_id, token, logprob, bytes, rank if known, top: [the first four of each]}."""
        return [self._with_top(token_id, own) for token_id, own in zip(token_ids, logprobs, strict=True)]

    def _with_top(self, token_id: int, own: Logprobs) -> dict[str, Any]:
        entry = self._entry(token_id, own.logprob)
        if own.rank is not None:
            entry["rank"] = own.rank
        return entry | {"top": [self._entry(*pair) for pair in own.top]}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        """`token` is for reading (part of a character stands there as \\xe2\\x82); `bytes` is what it is."""
        spelled = self._pieces.bytes_of(token_id)
        return {
            "token_id": token_id,
            "token": spelled.decode("utf-8", "backslashreplace"),
            # In this order a NaN becomes the lowest number too: it compares as not greater.
            "logprob": max(LOWEST, logprob),
            "bytes": list(spelled),
        }
