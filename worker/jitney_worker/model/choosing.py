"""From hidden states to tokens: logits only for the rows that need them."""

from __future__ import annotations

import math
from collections.abc import Sequence as ListLike
from typing import Protocol, runtime_checkable

from torch import Tensor

from jitney_worker.engine.protocol import RowFailure, Sampled
from jitney_worker.model.decoder import Decoder
from jitney_worker.model.sampler import SamplingRow, row_failure, sample


@runtime_checkable
class GreedyHead(Protocol):
    """A decoder that finds the largest logits without writing them down."""

    def greedy(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Of rows [R, hidden]: the lowest id among the largest logits, and that logit; NaN if one is among them."""
        ...


def choose(decoder: Decoder, hidden: Tensor, rows: ListLike[SamplingRow]) -> list[Sampled | RowFailure]:
    """One token for each row of hidden states [R, hidden], as `sample` chooses from their logits."""
    if not rows:
        return []
    plain = [i for i, row in enumerate(rows) if _wants_the_top_alone(row)]
    if not plain or not isinstance(decoder, GreedyHead):
        return sample(decoder.logits(hidden), rows)
    if len(plain) == len(rows):
        return _greedy(decoder, hidden)
    others = [i for i, row in enumerate(rows) if not _wants_the_top_alone(row)]
    chosen = dict(zip(plain, _greedy(decoder, hidden[plain]), strict=True))
    chosen |= zip(others, sample(decoder.logits(hidden[others]), [rows[i] for i in others]), strict=True)
    return [chosen[i] for i in range(len(rows))]


def _wants_the_top_alone(row: SamplingRow) -> bool:
    return row.is_greedy and row.edits is None and row.num_logprobs is None


def _greedy(decoder: GreedyHead, hidden: Tensor) -> list[Sampled | RowFailure]:
    token_ids, tops = decoder.greedy(hidden)
    return [
        Sampled(token_id) if math.isfinite(top) else row_failure(top)
        for token_id, top in zip(token_ids.tolist(), tops.tolist(), strict=True)
    ]
