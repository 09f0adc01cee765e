"""Which tokens of each row can still be drawn: what the noise can reach, min_p, top-k and top-p."""

from __future__ import annotations

import math
from collections.abc import Sequence as ListLike
from dataclasses import dataclass

import torch
from torch import Tensor

from jitney_worker.model.noise import NOISE_REACH

FILTER_REACHES = (6.0, 12.0, NOISE_REACH)
GROUPS_PER_K = 4
"""Of 4k groups' maxima the k-th largest lies so low that about 1.15 k tokens reach it; twice as many save little."""

BINS_PER_UNIT, NUM_BINS = 16, 16 * 20
"""Depths below a row's top, as far as the noise reaches."""

WORTH_PRUNING = 512
"""Candidates of a row; fewer are sorted sooner than counted."""


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
    """Every token at most `reach` (of all rows, or of each) below its row's top."""
    return _from(scaled, tops, tops - reach)


def _from(scaled: Tensor, tops: Tensor, least: Tensor) -> Candidates:
    """Every token of at least its row's `least`. Flat indices, because two-dimensional ones are slow."""
    places = (scaled >= least[:, None]).view(-1).nonzero().view(-1)
    rows = places.div(scaled.shape[1], rounding_mode="floor")
    return Candidates(rows, places - rows * scaled.shape[1], scaled.view(-1).index_select(0, places), tops)


def leading(scaled: Tensor, tops: Tensor, top_k: ListLike[int], top_p: Tensor) -> Candidates:
    """Keep the top-k, and of those the smallest leading set whose probability reaches top-p. Ties: lower ids first.

    scaled: -Inf where min_p has removed a token. top_k: of each row, 1 to vocab_size. top_p: float64, up to 1.
    """
    num_kept = torch.tensor(top_k, device=scaled.device)
    # What the noise cannot reach is not drawn, but it is a part of the probability that top-p asks for a share of.
    reached = (tops - NOISE_REACH).masked_fill(top_p < 1.0, -math.inf)
    least = torch.maximum(_at_least_k(scaled, num_kept, max(top_k)), reached)
    return _first(_from(scaled, tops, least), num_kept, top_p, None)


def nucleus(scaled: Tensor, tops: Tensor, top_p: Tensor) -> Candidates:
    """Keep the smallest leading set whose probability, of all that min_p left, reaches top-p (float64, up to 1)."""
    mass = (scaled - tops[:, None]).exp_().sum(dim=-1, dtype=torch.float64)
    return _first(_enough(scaled, tops, top_p * mass * (1 + 1e-6)), None, top_p, mass)


def _at_least_k(scaled: Tensor, top_k: Tensor, most: int) -> Tensor:
    """A value of each row that k of its tokens or more reach, and few beyond those; -Inf for a large k.

    The k-th largest of the maxima of 4k groups of tokens: whole rows are read once, and only the maxima are sorted.
    most: the largest k.
    """
    num_rows, vocab_size = scaled.shape
    group_size = vocab_size // (GROUPS_PER_K * most)
    if group_size < 2:
        return torch.full_like(scaled[:, 0], -math.inf)
    num_groups = vocab_size // group_size
    maxima = scaled[:, : num_groups * group_size].view(num_rows, group_size, num_groups).amax(dim=1)
    return maxima.topk(most, dim=1).values.gather(1, top_k[:, None] - 1).squeeze(1)


def _enough(scaled: Tensor, tops: Tensor, needed: Tensor) -> Candidates:
    """The shallowest candidates of each row that weigh more than it needs, or all that the noise reaches."""
    reach = torch.full_like(tops, FILTER_REACHES[0])
    for deeper in (*FILTER_REACHES[1:], math.inf):
        candidates = within(scaled, tops, reach)
        weights = candidates.weights()
        lacking = torch.zeros_like(needed).index_add_(0, candidates.rows, weights) <= needed
        if deeper == math.inf or not bool(lacking.any()):
            break
        reach = torch.where(lacking, deeper, reach)
    if len(candidates.rows) > WORTH_PRUNING * len(tops):
        return _pruned(candidates, weights, needed)
    return candidates


def _pruned(candidates: Candidates, weights: Tensor, needed: Tensor) -> Candidates:
    """Without those of a row that lie deeper than what it needs: they need not be sorted."""
    num_rows = len(needed)
    depths = (candidates.tops[candidates.rows] - candidates.values) * BINS_PER_UNIT
    depths = depths.long().clamp_(0, NUM_BINS - 1)  # values beyond 1e8 differ by 32 at least, rounded
    held = weights.new_zeros(num_rows * NUM_BINS).index_add_(0, candidates.rows * NUM_BINS + depths, weights)
    deepest = (held.view(num_rows, NUM_BINS).cumsum(dim=1) <= needed[:, None]).sum(dim=1)
    return candidates.where(depths <= deepest[candidates.rows])


def _first(candidates: Candidates, top_k: Tensor | None, top_p: Tensor, mass: Tensor | None) -> Candidates:
    """Of the best top_k, or of all, those before which less than top_p of the mass lies: of `mass`, or their own."""
    weights, order, counts = _sorted(candidates, len(top_p))
    ranks = torch.arange(weights.shape[1], device=weights.device)
    if top_k is not None:
        counts = torch.minimum(counts, top_k)
    weights = weights.masked_fill(ranks >= counts[:, None], 0.0)
    reached = weights.cumsum(dim=1)
    total = reached[:, -1] if mass is None else mass
    inside = (reached - weights < (top_p * total)[:, None]) | (ranks == 0)
    return candidates.where(order[inside & (ranks < counts[:, None])].sort().values)


def _sorted(candidates: Candidates, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Best first: exp(value - top) as float64 [R, most], flat indices [R, most]; and how many there are [R]."""
    counts = torch.bincount(candidates.rows, minlength=num_rows)
    first = counts.cumsum(0) - counts
    places = torch.arange(len(candidates.rows), device=counts.device) - first[candidates.rows]
    dense = candidates.values.new_full((num_rows, int(counts.max())), -math.inf)
    dense[candidates.rows, places] = candidates.values
    values, order = dense.sort(dim=1, descending=True, stable=True)
    weights = (values - candidates.tops[:, None]).double().exp_()
    return weights, order + first[:, None], counts
