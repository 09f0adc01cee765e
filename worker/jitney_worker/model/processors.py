"""Logits processors: what changes a row of logits before a token is chosen from it.

In vLLM's order, with its names and meanings (its own list of them is in the docstring of `Sampler`,
https://github.com/vllm-project/vllm/blob/main/vllm/v1/sample/sampler.py):

    0. structured_outputs   -Inf for what the structure does not allow next
    1. allowed_token_ids    everything else becomes -Inf
    2. bad_words            -Inf for a word's last token where the output ends in its others
    3. min_tokens           -Inf for all stop tokens until so many tokens are there
    4. logit_bias           added
    5. repetition_penalty   a positive logit divided by it, another multiplied: tokens of prompt and output
    6. frequency_penalty    taken off, times the token's number in the output
    7. presence_penalty     taken off if the output holds the token

Then greedy rows take the largest; for the others temperature, min_p, top_k and top_p follow, in sampler.py. What 4
yields and what 5 to 7 yield is computed in float64 and rounded to float32 once each: no matter in which company.
Only rows with an option come here, and of those only the tokens that it names are touched; a structure looks at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as ListLike
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jitney_worker.model.tally import Ids, Tally


@dataclass(frozen=True, slots=True)
class Bias:
    """Added to the logits of `ids`, which are all different."""

    ids: Ids
    values: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Penalties:
    """Of the tokens in `tally`."""

    tally: Tally
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0


@dataclass(frozen=True, slots=True)
class Edits:
    """What is done to one row. Token ids are below the vocabulary's size. None: nothing of that kind.

    mask: the tokens that a structure allows, bit i % 8 of byte i // 8 for token i; at least as long as the vocabulary.
    """

    allowed: Ids | None = None
    forbidden: Ids | None = None
    bias: Bias | None = None
    penalties: Penalties | None = None
    mask: bytes | None = None


def edit(logits: Tensor, rows: ListLike[Edits]) -> None:
    """Change float32 logits [R, vocab] in place."""
    _mask(logits, [(i, row.mask) for i, row in enumerate(rows) if row.mask is not None])
    _allow(logits, [(i, row.allowed) for i, row in enumerate(rows) if row.allowed is not None])
    _forbid(logits, [(i, row.forbidden) for i, row in enumerate(rows) if row.forbidden is not None])
    _add(logits, [(i, row.bias) for i, row in enumerate(rows) if row.bias is not None])
    _penalise(logits, [(i, row.penalties) for i, row in enumerate(rows) if row.penalties is not None])


def _mask(logits: Tensor, rows: list[tuple[int, bytes]]) -> None:
    if rows:
        masks = np.frombuffer(b"".join([mask for _, mask in rows]), dtype=np.uint8).reshape(len(rows), -1)
        bits = np.unpackbits(masks, axis=1, count=logits.shape[1], bitorder="little")
        barred = torch.from_numpy(bits).to(logits.device) == 0
        which = [i for i, _ in rows]
        logits[which] = logits[which].masked_fill_(barred, -math.inf)


def _allow(logits: Tensor, rows: list[tuple[int, Ids]]) -> None:
    if rows:
        places = _places(logits, rows)
        kept = logits.view(-1)[places]
        logits[[i for i, _ in rows]] = -math.inf
        logits.view(-1)[places] = kept


def _forbid(logits: Tensor, rows: list[tuple[int, Ids]]) -> None:
    if rows:
        logits.view(-1)[_places(logits, rows)] = -math.inf


def _add(logits: Tensor, rows: list[tuple[int, Bias]]) -> None:
    if rows:
        places = _places(logits, [(i, bias.ids) for i, bias in rows])
        values = torch.from_numpy(np.concatenate([bias.values for _, bias in rows])).to(logits.device)
        logits.view(-1)[places] = (logits.view(-1)[places].double() + values).float()


def _penalise(logits: Tensor, rows: list[tuple[int, Penalties]]) -> None:
    if not rows:
        return
    places = _places(logits, [(i, penalties.tally.ids) for i, penalties in rows])
    lengths = [len(penalties.tally.ids) for _, penalties in rows]

    def per_place(values: list[float]) -> Tensor:
        return torch.from_numpy(np.repeat(np.array(values, dtype=np.float64), lengths)).to(logits.device)

    counts = torch.from_numpy(np.concatenate([penalties.tally.counts for _, penalties in rows])).to(logits.device)
    repetition = per_place([penalties.repetition for _, penalties in rows])
    values = logits.view(-1)[places].double()
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= counts * per_place([penalties.frequency for _, penalties in rows])
    values -= (counts > 0) * per_place([penalties.presence for _, penalties in rows])
    logits.view(-1)[places] = values.float()


def _places(logits: Tensor, rows: list[tuple[int, Ids]]) -> Tensor:
    """Flat indices of tokens of rows."""
    return torch.from_numpy(np.concatenate([ids + i * logits.shape[1] for i, ids in rows])).to(logits.device)
