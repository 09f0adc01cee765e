"""Which tokens of each row can still be drawn: what the noise can reach, min_p, top-k and top-p."""

from __future__ import annotations

import math
from collections.abc import Sequence as ListLike
from dataclasses import dataclass

import torch
from torch import Tensor

from jitney_worker.model.noise import NOISE_REACH

OFF = torch.iinfo(torch.int64).max
FILTER_REACHES = (6.0, 12.0, NOISE_REACH)


@dataclass(frozen=True, slots=True)
class Candidates:
    """Tokens that can still win, flat and sorted by (row, id). values: logit / T, float32; tops: of each row."""

    rows: Tensor
    token_ids: Tensor
    values: Tensor
    tops: Tensor

    def weights(self) -> Tensor:
        """exp(value - top), float64."""
        return (self.values - self.tops[self.rows]).double().exp_()

    def where(self, keep: Tensor) -> Candidates:
        return Candidates(self.rows[keep], self.token_ids[keep], self.values[keep], self.tops)


def within(scaled: Tensor, tops: Tensor, reach: float | Tensor) -> Candidates:
    """Every token at most `reach` (of all rows, or of each) below its row's top.

    Flat indices, because two-dimensional ones are slow.
    """
    places = (scaled >= (tops - reach)[:, None]).view(-1).nonzero().view(-1)
    rows = places.div(scaled.shape[1], rounding_mode="floor")
    return Candidates(rows, places - rows * scaled.shape[1], scaled.view(-1).index_select(0, places), tops)


@dataclass(frozen=True, slots=True)
class Limits:
    """Filters of some rows, each [R, 1]. top_k: `OFF` where there is none."""

    top_k: Tensor
    top_p: Tensor

    @classmethod
    def of(cls, top_k: ListLike[int], top_p: ListLike[float], vocab_size: int, device: torch.device) -> Limits:
        """A top_k below 1 or of the whole vocabulary is none."""
        return cls(
            torch.tensor([k if 0 < k < vocab_size else OFF for k in top_k], device=device)[:, None],
            torch.tensor([min(p, 1.0) for p in top_p], dtype=torch.float64, device=device)[:, None],
        )


def filtered(scaled: Tensor, tops: Tensor, limits: Limits) -> Candidates:
    """Keep the top-k, and of those the smallest leading set whose probability reaches top-p. Ties: lower ids first.

    scaled: -Inf where min_p has removed a token.
    What top-p reaches for is the probability of all that min_p left, or of the top-k (of them the candidates: what
    lies further below the top than the noise reaches is less than vocab_size * exp(-19.5) of it).
    """
    mass = (scaled - tops[:, None]).exp_().sum(dim=-1, keepdim=True, dtype=torch.float64)
    candidates = _enough(scaled, tops, limits, mass)
    weights, order, counts = _sorted(candidates, len(tops))
    ranks = torch.arange(weights.shape[1], device=scaled.device)
    weights = weights.masked_fill(ranks >= limits.top_k, 0.0)
    total = torch.where(limits.top_k < OFF, weights.sum(dim=1, keepdim=True), mass)
    before = weights.cumsum(dim=1) - weights
    allowed = (ranks < torch.minimum(counts, limits.top_k)) & ((before < limits.top_p * total) | (ranks == 0))
    return candidates.where(order[allowed].sort().values)


def _enough(scaled: Tensor, tops: Tensor, limits: Limits, mass: Tensor) -> Candidates:
    """The shallowest candidates that hold all rows' top-k, or more than their top-p: they are to be sorted.

    How deep it has to look depends on the neighbours; what the filter then keeps does not.
    """
    for reach in FILTER_REACHES:
        candidates = within(scaled, tops, reach)
        held = torch.zeros_like(mass).index_add_(0, candidates.rows, candidates.weights()[:, None])
        counts = torch.bincount(candidates.rows, minlength=len(tops))[:, None]
        enough = torch.where(limits.top_k < OFF, counts >= limits.top_k, held > limits.top_p * mass * (1 + 1e-6))
        if bool(enough.all()):
            break
    return candidates


def _sorted(candidates: Candidates, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Best first: exp(value - top) as float64 [R, most], flat indices [R, most]; and how many there are [R, 1]."""
    counts = torch.bincount(candidates.rows, minlength=num_rows)
    first = counts.cumsum(0) - counts
    places = torch.arange(len(candidates.rows), device=counts.device) - first[candidates.rows]
    dense = candidates.values.new_full((num_rows, int(counts.max())), -math.inf)
    dense[candidates.rows, places] = candidates.values
    values, order = dense.sort(dim=1, descending=True, stable=True)
    weights = (values - candidates.tops[:, None]).double().exp_()
    return weights, order + first[:, None], counts[:, None]
