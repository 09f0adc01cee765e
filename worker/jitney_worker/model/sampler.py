"""Choosing tokens: greedy, temperature, top-k, top-p and seeds, each row by its own parameters, the batch at once.

Order as in vLLM: temperature, then top-k, then top-p of what top-k left. What a row gets depends on its logits and
parameters alone. Greedy rows cost one argmax, whoever samples beside them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as ListLike
from dataclasses import dataclass

import torch
from torch import Tensor

from jitney_worker.engine.protocol import RowFailure, Sampled, TokenLogprobs
from jitney_worker.model.noise import NOISE_REACH, gumbel

SAMPLER_VERSION = 1
"""Part of the fingerprint: raise it when the same logits, parameters and seed may give another token."""

MIN_TEMPERATURE = 1e-3
"""Below it a row is greedy: logit / T could overflow float32."""


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """How one row of logits is sampled. top_k < 1 or >= vocabulary, and top_p >= 1, switch the filter off.

    key: from `noise_key`. num_logprobs: as in `SequenceParams`.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    key: int = 0
    num_logprobs: int | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE

    def is_filtered(self, vocab_size: int) -> bool:
        """True if top-k or top-p can remove a token."""
        return 0 < self.top_k < vocab_size or self.top_p < 1.0


def sample(logits: Tensor, rows: ListLike[SamplingRow]) -> list[Sampled | RowFailure]:
    """One token per row of float32 logits [R, vocab].

    A row with NaN, +Inf or nothing but -Inf fails alone; the others do not notice.
    """
    top, token_ids = logits.max(dim=-1)  # NaN wins a maximum; of equal values the lowest id does
    usable = top.isfinite().tolist()
    drawn = [i for i, row in enumerate(rows) if usable[i] and not row.is_greedy]
    for filtered in (False, True):
        some = [i for i in drawn if rows[i].is_filtered(logits.shape[-1]) is filtered]
        if some:
            token_ids[some] = _draw(logits[some], top[some], [rows[i] for i in some], filtered)
    chosen = token_ids.tolist()
    logprobs = _logprobs(logits, rows, usable, chosen)
    return [Sampled(chosen[i], logprobs.get(i)) if usable[i] else _failure(float(top[i])) for i in range(len(rows))]


def _failure(top: float) -> RowFailure:
    what = "NaN" if math.isnan(top) else "+Inf" if top > 0 else "only -Inf"
    return RowFailure("bad_logits", f"the model produced {what} among the logits of this sequence")


@dataclass(frozen=True, slots=True)
class Candidates:
    """Tokens that can still win, flat and sorted by (row, id). values: logit / T, float32; tops: of each row."""

    rows: Tensor
    token_ids: Tensor
    values: Tensor
    tops: Tensor

    def where(self, keep: Tensor) -> Candidates:
        return Candidates(self.rows[keep], self.token_ids[keep], self.values[keep], self.tops)


def _draw(logits: Tensor, top: Tensor, rows: list[SamplingRow], filtered: bool) -> Tensor:
    """Gumbel-max over each row's allowed tokens; token ids [R]."""
    device = logits.device
    temperatures = torch.tensor([row.temperature for row in rows], device=device)
    scaled = logits / temperatures[:, None]
    tops = top / temperatures
    row_ids, token_ids = (scaled >= (tops - NOISE_REACH)[:, None]).nonzero(as_tuple=True)
    candidates = Candidates(row_ids, token_ids, scaled[row_ids, token_ids], tops)
    if filtered:
        candidates = _filter(candidates, _mass(scaled, tops), rows, logits.shape[-1])
    keys = torch.tensor([row.key for row in rows], device=device)
    scores = candidates.values.double() + gumbel(keys[candidates.rows], candidates.token_ids)
    return _argmax_by_row(candidates, scores, len(rows))


def _argmax_by_row(candidates: Candidates, scores: Tensor, num_rows: int) -> Tensor:
    best = scores.new_full((num_rows,), -math.inf).scatter_reduce_(0, candidates.rows, scores, "amax")
    winners = candidates.where(scores == best[candidates.rows])
    nobody = torch.iinfo(torch.int64).max
    ids = winners.token_ids.new_full((num_rows,), nobody)
    return ids.scatter_reduce_(0, winners.rows, winners.token_ids, "amin")


def _mass(scaled: Tensor, tops: Tensor) -> Tensor:
    """Sum over the whole vocabulary of exp(scaled - top), float64 [R]: the unit in which top-p counts."""
    return (scaled - tops[:, None]).exp_().sum(dim=-1, dtype=torch.float64)


def _filter(candidates: Candidates, mass: Tensor, rows: list[SamplingRow], vocab_size: int) -> Candidates:
    """Keep the top-k, and of those the smallest leading set whose probability reaches top-p. Ties: lower ids first.

    What top-p reaches for is the probability of the whole vocabulary, or of the top-k (of them the candidates: what
    lies further below the top than the noise reaches is less than vocab_size * exp(-19.5) of it).
    """
    device = mass.device
    no_limit = torch.iinfo(torch.int64).max
    limits = [row.top_k if 0 < row.top_k < vocab_size else no_limit for row in rows]
    top_k = torch.tensor(limits, device=device)[:, None]
    top_p = torch.tensor([min(row.top_p, 1.0) for row in rows], dtype=torch.float64, device=device)[:, None]
    limited = top_k < no_limit
    candidates = _narrow(candidates, mass[:, None] * top_p, top_k)
    weights, order, counts = _sorted_weights(candidates, len(rows))
    ranks = torch.arange(weights.shape[1], device=device)
    weights = weights.masked_fill(ranks >= top_k, 0.0)
    total = torch.where(limited, weights.sum(dim=1, keepdim=True), mass[:, None])
    before = weights.cumsum(dim=1) - weights
    allowed = (ranks < torch.minimum(counts[:, None], top_k)) & ((before < top_p * total) | (ranks == 0))
    return candidates.where(order[allowed].sort().values)


def _narrow(candidates: Candidates, wanted_mass: Tensor, wanted_count: Tensor) -> Candidates:
    """Drop what lies whole unit steps deeper below the top than top-k (or, without it, top-p) can need.

    It spares the sort thousands of tokens; it must never drop one that the filter would keep, hence the margin.
    wanted_mass, wanted_count: [R, 1].
    """
    num_rows, num_steps = len(wanted_mass), int(NOISE_REACH) + 2
    depths = (candidates.tops[candidates.rows] - candidates.values).long()
    cells = candidates.rows * num_steps + depths
    weights = (candidates.values - candidates.tops[candidates.rows]).double().exp_()
    shape = (num_rows, num_steps)
    mass = weights.new_zeros(num_rows * num_steps).index_add_(0, cells, weights).view(shape).cumsum(1)
    count = torch.bincount(cells, minlength=num_rows * num_steps).view(shape).cumsum(1)
    limited = wanted_count < torch.iinfo(torch.int64).max
    enough = torch.where(limited, count >= wanted_count, mass > wanted_mass * (1 + 1e-6))
    steps_needed = (~enough).sum(dim=1)
    return candidates.where(depths <= steps_needed[candidates.rows])


def _sorted_weights(candidates: Candidates, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Per row and best first: exp(value - top) as float64 [R, most], flat indices [R, most]; counts [R]."""
    counts = torch.bincount(candidates.rows, minlength=num_rows)
    first = counts.cumsum(0) - counts
    places = torch.arange(len(candidates.rows), device=counts.device) - first[candidates.rows]
    dense = candidates.values.new_full((num_rows, int(counts.max())), -math.inf)
    dense[candidates.rows, places] = candidates.values
    values, order = dense.sort(dim=1, descending=True, stable=True)
    weights = (values - candidates.tops[:, None]).double().exp_()
    return weights, order + first[:, None], counts


def _logprobs(
    logits: Tensor, rows: ListLike[SamplingRow], usable: list[bool], chosen: list[int]
) -> dict[int, TokenLogprobs]:
    """Log probabilities of the rows that ask for them, under the unfiltered distribution at temperature 1."""
    asked = [i for i, row in enumerate(rows) if row.num_logprobs is not None and usable[i]]
    found: dict[int, TokenLogprobs] = {}
    for i in asked:
        row_logprobs = logits[i].log_softmax(dim=-1)
        top = _top(logits[i], row_logprobs, rows[i].num_logprobs or 0)
        found[i] = TokenLogprobs(float(row_logprobs[chosen[i]]), top)
    return found


def _top(logits: Tensor, logprobs: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    """The most probable tokens, equal ones by id (`topk` alone would break ties as it likes)."""
    count = min(count, logits.shape[0])
    if count < 1:
        return ()
    least = logits.topk(count).values[-1]
    token_ids = (logits >= least).nonzero()[:, 0]
    order = logits[token_ids].argsort(descending=True, stable=True)[:count]
    best = token_ids[order]
    return tuple(zip(best.tolist(), logprobs[best].tolist(), strict=True))
