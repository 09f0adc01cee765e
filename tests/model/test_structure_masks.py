"""Masks in the sampler: the rows that have one choose from it, the others do not notice."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from jitney_worker.engine.protocol import RowFailure, Sampled, ScheduledSequence
from jitney_worker.engine.sequence import LogitRules, SequenceId, SequenceParams, SequenceRequest
from jitney_worker.engine.sequence import Sequence as EngineSequence
from jitney_worker.model.choosing import choose
from jitney_worker.model.processors import Edits
from jitney_worker.model.rows import SamplingRows
from jitney_worker.model.sampler import SamplingRow, sample

VOCAB = 1_003
ROWS = 20


def mask_of(*token_ids: int) -> bytes:
    bits = np.zeros(1_024, dtype=np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def logits() -> Tensor:
    return torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(1))


def row(number: int, way: str, **more: object) -> SamplingRow:
    ways = {"greedy": {}, "drawn": {"temperature": 1.5}, "top_p": {"temperature": 1.0, "top_p": 0.9}}
    return SamplingRow(key=number * 77, **{**ways[way], **more})  # type: ignore[arg-type]


def ids(found: Sequence[Sampled | RowFailure]) -> list[int]:
    return [one.token_id for one in found if isinstance(one, Sampled)]


@pytest.mark.parametrize("way", ["greedy", "drawn", "top_p"])
def test_masked_rows_choose_what_their_mask_allows_and_others_what_they_would_alone(way: str) -> None:
    before, masks = logits(), {number: (number, number + 40, VOCAB - 1) for number in range(1, ROWS, 2)}
    given = before.clone()
    rows = [row(n, way, edits=Edits(mask=mask_of(*masks[n])) if n in masks else None) for n in range(ROWS)]
    found = ids(sample(given, rows))
    alone = [ids(sample(before[n : n + 1], [rows[n]]))[0] for n in range(ROWS)]
    assert found == alone
    assert all(found[n] in masks[n] for n in masks)
    assert torch.equal(given, before)
    if way == "greedy":
        assert [found[n] for n in masks] == [max(some, key=lambda i: before[n, i]) for n, some in masks.items()]


def test_a_mask_holds_beside_every_other_option() -> None:
    edits = Edits(
        mask=mask_of(3, 5, 8),
        allowed=np.array([5, 8, 9], dtype=np.int64),
        forbidden=np.array([5], dtype=np.int64),
    )
    assert ids(sample(logits()[:1], [SamplingRow(edits=edits)])) == [8]


def test_a_mask_that_leaves_nothing_ends_its_row_alone_and_names_the_options() -> None:
    rows = [row(n, "greedy") for n in range(3)]
    rows[1].edits = Edits(mask=mask_of(), allowed=np.array([4], dtype=np.int64))
    first, second, third = sample(logits()[:3], rows)
    assert isinstance(second, RowFailure)
    assert second.code == "no_token_left"
    assert "structured_outputs" in second.message
    assert ids([first, third]) == logits()[[0, 2]].argmax(dim=-1).tolist()


def test_log_probabilities_are_the_models_own_whatever_the_mask_forbids() -> None:
    given = logits()[:1]
    (found,) = sample(given, [SamplingRow(num_logprobs=2, edits=Edits(mask=mask_of(17)))])
    assert isinstance(found, Sampled)
    assert found.logprobs is not None
    assert found.token_id == 17
    assert found.logprobs.logprob == pytest.approx(float(given.log_softmax(-1)[0, 17]), abs=1e-5)
    assert all(math.isfinite(value) for _, value in found.logprobs.top)
    assert [token_id for token_id, _ in found.logprobs.top] == given[0].topk(2).indices.tolist()


class Head:
    """A head that chooses by itself, and remembers for how many rows logits were asked."""

    def __init__(self) -> None:
        self.num_with_logits: list[int] = []

    def logits(self, hidden: Tensor) -> Tensor:
        self.num_with_logits.append(len(hidden))
        return hidden

    def choose(self, hidden: Tensor, rows: Sequence[SamplingRow]) -> tuple[list[int], list[float]]:
        top, token_ids = hidden.max(dim=-1)
        return token_ids.tolist(), top.tolist()


def test_logits_leave_a_choosing_head_for_the_masked_rows_alone() -> None:
    given, head = logits(), Head()
    rows = [row(n, "greedy", edits=Edits(mask=mask_of(9, 10)) if n in (2, 11) else None) for n in range(ROWS)]
    found = ids(choose(head, given, rows))  # type: ignore[arg-type]
    assert head.num_with_logits == [2]
    assert [found[n] for n in range(ROWS) if n not in (2, 11)] == [
        token_id for n, token_id in enumerate(given.argmax(dim=-1).tolist()) if n not in (2, 11)
    ]
    assert {found[2], found[11]} <= {9, 10}


def scheduled(name: str, mask: bytes | None, **params: object) -> ScheduledSequence:
    request = SequenceRequest(SequenceId(name), (1, 2), SequenceParams(5, **params), (0, 0.0, 0, 0))  # type: ignore[arg-type]
    return ScheduledSequence(EngineSequence.of(request), 0, 2, True, mask=mask)


def test_only_a_sequence_with_a_mask_gets_a_row_with_one() -> None:
    rows = SamplingRows(VOCAB).of(
        [
            scheduled("masked", mask_of(7)),
            scheduled("free", None),
            scheduled("ruled", None, rules=LogitRules(bad_words=((4,),))),
            scheduled("both", mask_of(8), rules=LogitRules(bad_words=((4,),))),
        ]
    )
    masks = [None if one.edits is None else one.edits.mask for one in rows]
    assert masks == [mask_of(7), None, None, mask_of(8)]
    assert rows[1].edits is None
    assert rows[3].edits is not None
    assert rows[3].edits.forbidden is not None
