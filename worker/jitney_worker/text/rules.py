"""Stop strings for the engine: which token ends a sequence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from jitney_worker.text.spelling import PLAIN_TEXT, Speller, TextOptions
from jitney_worker.text.tokenizer import Tokenizer


class StopRules:
    """The engine's `TextRules`. It spells with the same `Speller` as the publisher, so both agree on every token.

    The token that completes a stop string is part of the answer: it counts in usage and is in the log.

    Threads: `register` and `forget` may be called by any one; `start`, `advance` and `drop` by the engine's.
    They meet only in `_registered`, one dict operation each.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._registered: dict[str, Speller] = {}
        self._spellers: dict[str, Speller] = {}

    def register(
        self,
        sequence_id: str,
        stop: Sequence[str],
        end_ids: Iterable[int] = (),
        options: TextOptions = PLAIN_TEXT,
    ) -> None:
        """Before the sequence is added: say which strings end it (none: nothing is kept), and which ids do.

        options: those of the publisher's speller, for a stop string is looked for in the text that is shown.
        """
        if stop:
            self._registered[sequence_id] = Speller(self._tokenizer, stop, end_ids, options)

    def forget(self, sequence_id: str) -> None:
        """The sequence will not be added, or is being aborted."""
        self._registered.pop(sequence_id, None)

    def start(self, sequence_id: str, output_ids: Sequence[int]) -> None:
        """The sequence enters the engine with the output of earlier attempts."""
        # It can have been forgotten on its way here; then its abort follows, and it needs no rules till then.
        speller = self._registered.pop(sequence_id, None)
        if speller is not None:
            speller.replay(output_ids)
            self._spellers[sequence_id] = speller

    def advance(self, sequence_id: str, token_id: int) -> Literal["stop"] | None:
        """One more token; `stop` if a stop string is complete."""
        speller = self._spellers.get(sequence_id)
        if speller is None:
            return None
        return "stop" if speller.stopped or speller.push(token_id).stopped else None

    def drop(self, sequence_id: str) -> None:
        """The sequence has left the engine."""
        self._spellers.pop(sequence_id, None)
