"""Choosing tokens: greedy, or by temperature, min_p, top-k, top-p and seed, each row by its own parameters.

Order as in vLLM: what processors.py lists, then temperature, min_p of what is left, top-k of that, and top-p of what
top-k left. What a row gets depends on its logits and parameters alone, not on its company. Greedy rows are never
sorted: they cost one argmax, whoever samples beside them.

Log probabilities are vLLM's default, `raw_logprobs`: of the model's own logits, before any of this.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from jitney.sampling import MIN_TEMPERATURE
from jitney_worker.engine.protocol import RowFailure, Sampled, TokenLogprobs
from jitney_worker.model.candidates import Candidates, leading, nucleus, within
from jitney_worker.model.logprobs import ROWS_AT_ONCE_ON_CPU, token_logprobs
from jitney_worker.model.noise import NOISE_REACH, gumbel
from jitney_worker.model.processors import Edits, edit

SAMPLER_VERSION = 3
"""Part of the fingerprint: raise it when the same logits, parameters and seed may give another token or another text.

2: min_p and logits processors. Version 1 does not know them, so it may not continue a job that has some.
3: min_tokens holds off ignored end tokens too; an answer to a prompt keeps its first space.
"""

Filter = Literal["none", "top_k", "top_p"]
FILTERS: tuple[Filter, ...] = get_args(Filter)


@dataclass(slots=True)  # frozen, making 64 of them would cost each step some 20 microseconds
class SamplingRow:
    """How one row of logits is sampled. top_k < 1 or >= vocabulary, and top_p >= 1, switch the filter off.

    min_p: keep tokens that are at least so probable in relation to the best; 0 is off.
    key: from `noise_key`. num_logprobs: as in `SequenceParams`. edits: None if the logits are taken as they are.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    key: int = 0
    num_logprobs: int | None = None
    min_p: float = 0.0
    edits: Edits | None = None

    @property
    def is_greedy(self) -> bool:
        return not self.temperature >= MIN_TEMPERATURE  # NaN too, should one ever get past validation

    def filter_of(self, vocab_size: int) -> Filter:
        """What decides how much of the row has to be looked at: top-k, if there is one."""
        if 0 < self.top_k < vocab_size:
            return "top_k"
        return "top_p" if self.top_p < 1.0 else "none"


def sample(logits: Tensor, rows: ListLike[SamplingRow]) -> list[Sampled | RowFailure]:
    """One token per row of float32 logits [R, vocab], which are left as they are.

    A row with NaN, +Inf or nothing but -Inf fails alone, and so does one whose edits leave nothing; the others do
    not notice.
    """
    top, token_ids = logits.max(dim=-1)  # NaN wins a maximum; of equal values the lowest id does
    failures = {i: row_failure(value) for i, value in enumerate(top.tolist()) if not math.isfinite(value)}
    plain = [i for i, row in enumerate(rows) if row.edits is None and i not in failures]
    _draw_some(token_ids, logits, top, rows, plain)
    if len(plain) + len(failures) < len(rows):
        edited = [i for i, row in enumerate(rows) if row.edits is not None and i not in failures]
        failures |= _sample_edited(token_ids, logits, rows, edited)
    chosen = token_ids.tolist()
    logprobs = _logprobs(logits, rows, failures, chosen)
    return [failures.get(i) or Sampled(chosen[i], logprobs.get(i)) for i in range(len(rows))]


def row_failure(top: float) -> RowFailure:
    """Of a row whose largest logit is not finite."""
    what = "NaN" if math.isnan(top) else "+Inf" if top > 0 else "only -Inf"
    return RowFailure("bad_logits", f"the model produced {what} among the logits of this sequence")


def _edit_failure(top: float) -> RowFailure:
    if top > 0:
        return RowFailure("bad_logits", "the penalties of this sequence take its logits beyond float32")
    message = (
        "structured_outputs, allowed_token_ids, bad_words, logit_bias and min_tokens leave this sequence no token "
        "to choose"
    )
    return RowFailure("no_token_left", message)


def _sample_edited(
    token_ids: Tensor, logits: Tensor, rows: ListLike[SamplingRow], which: list[int]
) -> dict[int, RowFailure]:
    """Choose for the rows with edits, from copies of their logits; those that fail."""
    failures: dict[int, RowFailure] = {}
    for some in _few_at_once(which, logits):
        own_rows, own_logits = [rows[i] for i in some], logits[some]
        edit(own_logits, [row.edits for row in own_rows if row.edits is not None])
        top, own_ids = own_logits.max(dim=-1)
        tops = top.tolist()
        failures |= {i: _edit_failure(value) for i, value in zip(some, tops, strict=True) if not math.isfinite(value)}
        _draw_some(own_ids, own_logits, top, own_rows, [j for j, value in enumerate(tops) if math.isfinite(value)])
        token_ids[some] = own_ids
    return failures


def _draw_some(token_ids: Tensor, logits: Tensor, top: Tensor, rows: ListLike[SamplingRow], which: list[int]) -> None:
    """Draw for those of `which` that are not greedy; rows of each kind of filter apart from the others."""
    drawn = [i for i in which if not rows[i].is_greedy]
    for kind in FILTERS:
        alike = [i for i in drawn if rows[i].filter_of(logits.shape[-1]) == kind]
        if kind == "top_k":
            alike.sort(key=lambda i: rows[i].top_k)  # the largest k of some rows is how deep all of them are searched
        for some in _few_at_once(alike, logits):
            token_ids[some] = _draw(logits[some], top[some], [rows[i] for i in some])


def _few_at_once(which: list[int], logits: Tensor) -> Iterator[list[int]]:
    """A few rows at a time where a cache is to be kept, otherwise all."""
    at_once = ROWS_AT_ONCE_ON_CPU if logits.device.type == "cpu" else max(1, len(which))
    return (which[first : first + at_once] for first in range(0, len(which), at_once))


def _draw(logits: Tensor, top: Tensor, rows: list[SamplingRow]) -> Tensor:
    """Gumbel-max over each row's allowed tokens; token ids [R]. All rows have the same kind of filter."""
    temperatures = torch.tensor([row.temperature for row in rows], device=logits.device)
    candidates = _allowed(logits / temperatures[:, None], top / temperatures, rows)
    keys = torch.tensor([row.key for row in rows], device=logits.device)
    scores = candidates.values.double() + gumbel(keys[candidates.rows], candidates.token_ids)
    return _argmax_by_row(candidates, scores, len(rows))


def _allowed(scaled: Tensor, tops: Tensor, rows: list[SamplingRow]) -> Candidates:
    """What min_p, top-k and top-p leave, in that order; `scaled` is used up."""
    device, kind = scaled.device, rows[0].filter_of(scaled.shape[-1])
    reach = _min_p_reach(rows, device)
    if kind == "none":
        return within(scaled, tops, NOISE_REACH if reach is None else reach.clamp(max=NOISE_REACH))
    if reach is not None:
        scaled.masked_fill_(scaled < (tops - reach)[:, None], -math.inf)
    top_p = torch.tensor([min(row.top_p, 1.0) for row in rows], dtype=torch.float64, device=device)
    if kind == "top_p":
        return nucleus(scaled, tops, top_p)
    return leading(scaled, tops, [row.top_k for row in rows], top_p)


def _min_p_reach(rows: list[SamplingRow], device: torch.device) -> Tensor | None:
    """How far below its top each row's min_p keeps tokens [R], in units of logit / T; None if no row has one."""
    if all(row.min_p <= 0.0 for row in rows):
        return None
    reaches = [-math.log(min(row.min_p, 1.0)) if row.min_p > 0.0 else math.inf for row in rows]
    return torch.tensor(reaches, device=device)


def _argmax_by_row(candidates: Candidates, scores: Tensor, num_rows: int) -> Tensor:
    best = scores.new_full((num_rows,), -math.inf).scatter_reduce_(0, candidates.rows, scores, "amax")
    winners = candidates.where(scores == best[candidates.rows])
    ids = winners.token_ids.new_full((num_rows,), torch.iinfo(torch.int64).max)
    return ids.scatter_reduce_(0, winners.rows, winners.token_ids, "amin")


def _logprobs(
    logits: Tensor, rows: ListLike[SamplingRow], failures: dict[int, RowFailure], chosen: list[int]
) -> dict[int, TokenLogprobs]:
    """Log probabilities of the rows that ask for them, by row."""
    counts = {i: row.num_logprobs for i, row in enumerate(rows) if row.num_logprobs is not None and i not in failures}
    if not counts:
        return {}
    asked = list(counts)
    own = logits if len(asked) == len(rows) else logits[asked]
    return dict(zip(asked, token_logprobs(own, [chosen[i] for i in asked], list(counts.values())), strict=True))
