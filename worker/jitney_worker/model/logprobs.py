"""Log probabilities of tokens that were chosen or given, and of the most probable ones beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as ListLike
from dataclasses import replace
from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor

from jitney_worker.engine.protocol import TokenLogprobs

ROWS_AT_ONCE_ON_CPU = 8
"""Rows of 50,000 logits that a processor's cache holds, with what is derived from them."""

PROMPT_ROWS_AT_ONCE = 64


def token_logprobs(logits: Tensor, token_ids: ListLike[int], counts: ListLike[int]) -> list[TokenLogprobs]:
    """For each row of float32 logits [R, vocab]: of its token, and of its `count` most probable ones, equal ones by id.

    Natural logarithms under the softmax of the row as it is, that is, at temperature 1.
    """
    at_once = ROWS_AT_ONCE_ON_CPU if logits.device.type == "cpu" else max(1, len(token_ids))
    found: list[TokenLogprobs] = []
    for first in range(0, len(token_ids), at_once):
        some = slice(first, first + at_once)
        found += _some_logprobs(logits[some], token_ids[some], counts[some])
    return found


def given_logprobs(
    to_logits: Callable[[Tensor], Tensor], hidden: Tensor, token_ids: ListLike[int], count: int
) -> list[TokenLogprobs]:
    """The same, with ranks, for tokens of a prompt: hidden states [N, width] of those before each.

    A few rows of logits at a time: those of a whole prompt could be larger than the model.
    """
    found: list[TokenLogprobs] = []
    for first in range(0, len(token_ids), PROMPT_ROWS_AT_ONCE):
        some = slice(first, first + PROMPT_ROWS_AT_ONCE)
        following, logits = token_ids[some], to_logits(hidden[some])
        logprobs = token_logprobs(logits, following, [count] * len(following))
        ranks = _ranks(logits, following)
        found += (replace(one, rank=rank) for one, rank in zip(logprobs, ranks, strict=True))
    return found


def _ranks(logits: Tensor, token_ids: ListLike[int]) -> list[int]:
    own = logits.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])
    ranks: list[int] = (logits >= own).sum(dim=-1).tolist()
    return ranks


def _some_logprobs(logits: Tensor, token_ids: ListLike[int], counts: ListLike[int]) -> Iterator[TokenLogprobs]:
    totals = logits.logsumexp(dim=-1)
    chosen = logits.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])[:, 0] - totals
    tops = _tops(logits, totals, [min(count, logits.shape[1]) for count in counts])
    return (TokenLogprobs(own, tops.get(row, ())) for row, own in enumerate(chosen.tolist()))


def _tops(logits: Tensor, totals: Tensor, counts: list[int]) -> dict[int, tuple[tuple[int, float], ...]]:
    """(token id, logprob) by row, the most probable first. `topk` alone would break ties as it likes."""
    most = max(counts)
    if most < 1:
        return {}
    leading = logits.topk(most).values
    places = torch.tensor([max(0, count - 1) for count in counts], device=logits.device)
    least = leading.gather(1, places[:, None])
    rows, ids = (logits >= least).nonzero(as_tuple=True)
    values = logits[rows, ids] - totals[rows]
    order = values.argsort(descending=True, stable=True)
    order = order[rows[order].argsort(stable=True)]
    found = zip(rows[order].tolist(), ids[order].tolist(), values[order].tolist(), strict=True)
    return {
        row: tuple((token_id, value) for _, token_id, value in group)[: counts[row]]
        for row, group in groupby(found, key=itemgetter(0))
    }
