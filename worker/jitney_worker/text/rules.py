"""Stop strings and structures for the engine: which token ends a sequence, and which may come next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from jitney_worker.text.spelling import PLAIN_TEXT, Speller, TextOptions
from jitney_worker.text.structures import Structure
from jitney_worker.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class _Rules:
    """Of one sequence; None: it has none of that kind."""

    speller: Speller | None
    structure: Structure | None


class StopRules:
    """The engine's `TextRules`. It spells with the same `Speller` as the publisher, so both agree on every token.

    The token that completes a stop string is part of the answer: it counts in usage and is in the log.

    Threads: `register` and `forget` may be called by any one; all others by the engine's.
    They meet only in `_registered`, one dict operation each.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._registered: dict[str, _Rules] = {}
        self._started: dict[str, _Rules] = {}

    def register(
        self,
        sequence_id: str,
        stop: Sequence[str],
        end_ids: Iterable[int] = (),
        options: TextOptions = PLAIN_TEXT,
        structure: Structure | None = None,
    ) -> None:
        """Before the sequence is added: say which strings end it (none: nothing is kept), and which ids do.

        options: those of the publisher's speller, for a stop string is looked for in the text that is shown.
        structure: its state after the output that the sequence comes with; from now on it is the engine thread's.
        """
        if stop or structure is not None:
            speller = Speller(self._tokenizer, stop, end_ids, options) if stop else None
            self._registered[sequence_id] = _Rules(speller, structure)

    def forget(self, sequence_id: str) -> None:
        """The sequence will not be added, or is being aborted."""
        self._registered.pop(sequence_id, None)

    def start(self, sequence_id: str, output_ids: Sequence[int]) -> None:
        """The sequence enters the engine with the output of earlier attempts."""
        # It can have been forgotten on its way here; then its abort follows, and it needs no rules till then.
        rules = self._registered.pop(sequence_id, None)
        if rules is not None:
            if rules.speller is not None:
                rules.speller.replay(output_ids)
            self._started[sequence_id] = rules

    def mask(self, sequence_id: str) -> bytes | None:
        """Which tokens may come next, as `Structure.mask`; None if all may."""
        rules = self._started.get(sequence_id)
        return None if rules is None or rules.structure is None else rules.structure.mask()

    def failure(self, sequence_id: str) -> str | None:
        """Why its structure cannot go on; None if it can, or there is none."""
        rules = self._started.get(sequence_id)
        return None if rules is None or rules.structure is None else rules.structure.failure

    def advance(self, sequence_id: str, token_id: int) -> Literal["stop"] | None:
        """One more token; `stop` if a stop string is complete, or the structure is whole and nothing can follow."""
        rules = self._started.get(sequence_id)
        if rules is None:
            return None
        is_whole = rules.structure is not None and rules.structure.advance(token_id)
        speller = rules.speller
        is_stopped = speller is not None and (speller.stopped or speller.push(token_id).stopped)
        return "stop" if is_whole or is_stopped else None

    def drop(self, sequence_id: str) -> None:
        """The sequence has left the engine."""
        self._started.pop(sequence_id, None)
