"""Which tokens a sequence holds, and how often: what the penalties ask. Counted once per token, never twice."""

from __future__ import annotations

from collections.abc import Sequence as ListLike

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]

FIRST_ROOM = 256


class Tally:
    """Different tokens of one sequence in the order of their first appearance, with their number in the output.

    A function of the token ids alone, so a sequence that was preempted or handed over is counted anew to the same.
    Only the first call looks at everything: ids are only ever appended to a sequence.

    num_prompt: tokens at the start that are not output. counts_prompt: they are among `ids` all the same.
    """

    def __init__(self, *, num_prompt: int, counts_prompt: bool) -> None:
        self._num_prompt = num_prompt
        self._num_seen = 0 if counts_prompt else num_prompt
        self._places: dict[int, int] = {}
        self._ids: Ids = np.empty(FIRST_ROOM, dtype=np.int64)
        self._counts: Ids = np.zeros(FIRST_ROOM, dtype=np.int64)

    @property
    def ids(self) -> Ids:
        """The tokens, each once. A view: good until the next `advance`."""
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> Ids:
        """How often the output holds each of `ids`."""
        return self._counts[: len(self._places)]

    def advance(self, token_ids: ListLike[int]) -> None:
        """Count what has come since the last call. token_ids: the whole sequence."""
        for position in range(self._num_seen, len(token_ids)):
            place = self._place(token_ids[position])
            self._counts[place] += position >= self._num_prompt
        self._num_seen = max(self._num_seen, len(token_ids))

    def _place(self, token_id: int) -> int:
        place = self._places.get(token_id)
        if place is None:
            place = self._places[token_id] = len(self._places)
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[place] = token_id
        return place
