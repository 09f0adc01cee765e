"""Choosing tokens: greedy, temperature, top-k, top-p and seeds, each row by its own parameters, the batch at once.

Order as in vLLM: temperature, then top-k, then top-p of what top-k left. What a row gets depends on its logits and
parameters alone. Greedy rows cost one argmax, whoever samples beside them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from collections.abc import Sequence as ListLike
from dataclasses import dataclass

import torch
from torch import Tensor

from jitney_worker.engine.protocol import RowFailure, Sampled, TokenLogprobs
from jitney_worker.model.candidates import Candidates, Limits, filtered, within
from jitney_worker.model.noise import NOISE_REACH, gumbel

SAMPLER_VERSION = 1
"""Part of the fingerprint: raise it when the same logits, parameters and seed may give another token."""

MIN_TEMPERATURE = 1e-3
"""Below it a row is greedy: logit / T could overflow float32."""

ROWS_AT_ONCE_ON_CPU = 8
"""Rows of 50,000 logits that a processor's cache holds, with what is derived from them."""


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
        return not self.temperature >= MIN_TEMPERATURE  # NaN too, should one ever get past validation

    def is_filtered(self, vocab_size: int) -> bool:
        """True if top-k or top-p can remove a token."""
        return 0 < self.top_k < vocab_size or self.top_p < 1.0


def sample(logits: Tensor, rows: ListLike[SamplingRow]) -> list[Sampled | RowFailure]:
    """One token per row of float32 logits [R, vocab].

    A row with NaN, +Inf or nothing but -Inf fails alone; the others do not notice.
    """
    top, token_ids = logits.max(dim=-1)  # NaN wins a maximum; of equal values the lowest id does
    usable = top.isfinite().tolist()
    for some in _drawn_together(rows, usable, logits):
        token_ids[some] = _draw(logits[some], top[some], [rows[i] for i in some])
    chosen = token_ids.tolist()
    logprobs = _logprobs(logits, rows, usable, chosen)
    return [Sampled(chosen[i], logprobs.get(i)) if usable[i] else _failure(float(top[i])) for i in range(len(rows))]


def _drawn_together(rows: ListLike[SamplingRow], usable: list[bool], logits: Tensor) -> Iterator[list[int]]:
    """Rows to be drawn, those with filters apart from those without, a few at a time where a cache is to be kept."""
    drawn = [i for i, row in enumerate(rows) if usable[i] and not row.is_greedy]
    at_once = ROWS_AT_ONCE_ON_CPU if logits.device.type == "cpu" else max(1, len(drawn))
    for with_filter in (False, True):
        some = [i for i in drawn if rows[i].is_filtered(logits.shape[-1]) is with_filter]
        yield from (some[first : first + at_once] for first in range(0, len(some), at_once))


def _failure(top: float) -> RowFailure:
    what = "NaN" if math.isnan(top) else "+Inf" if top > 0 else "only -Inf"
    return RowFailure("bad_logits", f"the model produced {what} among the logits of this sequence")


def _draw(logits: Tensor, top: Tensor, rows: list[SamplingRow]) -> Tensor:
    """Gumbel-max over each row's allowed tokens; token ids [R]. All rows have filters, or none."""
    device, vocab_size = logits.device, logits.shape[-1]
    temperatures = torch.tensor([row.temperature for row in rows], device=device)
    scaled = logits / temperatures[:, None]
    tops = top / temperatures
    if rows[0].is_filtered(vocab_size):
        limits = Limits.of([row.top_k for row in rows], [row.top_p for row in rows], vocab_size, device)
        candidates = filtered(scaled, tops, limits)
    else:
        candidates = within(scaled, tops, NOISE_REACH)
    keys = torch.tensor([row.key for row in rows], device=device)
    scores = candidates.values.double() + gumbel(keys[candidates.rows], candidates.token_ids)
    return _argmax_by_row(candidates, scores, len(rows))


def _argmax_by_row(candidates: Candidates, scores: Tensor, num_rows: int) -> Tensor:
    best = scores.new_full((num_rows,), -math.inf).scatter_reduce_(0, candidates.rows, scores, "amax")
    winners = candidates.where(scores == best[candidates.rows])
    ids = winners.token_ids.new_full((num_rows,), torch.iinfo(torch.int64).max)
    return ids.scatter_reduce_(0, winners.rows, winners.token_ids, "amin")


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
