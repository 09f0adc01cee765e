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
class ChoosingHead(Protocol):
    """A decoder that draws tokens itself, so that logits need not leave it."""

    def choose(self, hidden: Tensor, rows: ListLike[SamplingRow]) -> tuple[list[int], list[float]]:
        """Of rows [R, hidden] without edits and logprobs: a token by the rules of sampler.py, and the largest logit.

        NaN wins; where the largest logit is not finite, the token means nothing.
        """
        ...


def choose(decoder: Decoder, hidden: Tensor, rows: ListLike[SamplingRow]) -> list[Sampled | RowFailure]:
    """One token for each row of hidden states [R, hidden], as `sample` chooses from their logits."""
    if not rows:
        return []
    plain = [i for i, row in enumerate(rows) if row.edits is None and row.num_logprobs is None]
    if not plain or not isinstance(decoder, ChoosingHead):
        return sample(decoder.logits(hidden), rows)
    if len(plain) == len(rows):
        return _chosen(decoder, hidden, rows)
    others = [i for i, row in enumerate(rows) if row.edits is not None or row.num_logprobs is not None]
    found = dict(zip(plain, _chosen(decoder, hidden[plain], [rows[i] for i in plain]), strict=True))
    found |= zip(others, sample(decoder.logits(hidden[others]), [rows[i] for i in others]), strict=True)
    return [found[i] for i in range(len(rows))]


def _chosen(decoder: ChoosingHead, hidden: Tensor, rows: ListLike[SamplingRow]) -> list[Sampled | RowFailure]:
    return [
        Sampled(token_id) if math.isfinite(top) else row_failure(top)
        for token_id, top in zip(*decoder.choose(hidden, rows), strict=True)
    ]
