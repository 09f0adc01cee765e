"""What the sampler asks of torch: rows without an option pay nothing for it, and greedy rows are never sorted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from jitney_worker.engine.protocol import ScheduledSequence
from jitney_worker.engine.sequence import LogitRules, Sequence, SequenceId, SequenceParams, SequenceRequest
from jitney_worker.model.rows import SamplingRows
from jitney_worker.model.sampler import SamplingRow, sample

VOCAB = 150


def spread_logits(num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(1)) * 3.0


def rows_of(**options: Any) -> list[SamplingRow]:
    """The row of a sequence that has said something and may go on."""
    params = SequenceParams(99, stop_token_ids=frozenset({2}), **options)
    sequence = Sequence.of(SequenceRequest(SequenceId("s"), (5,), params, (0, 0.0, 0, 0), (1, 3)))
    return SamplingRows(VOCAB).of([ScheduledSequence(sequence, 2, 3, True)])


class Operations(TorchDispatchMode):
    """Counts torch's operators by name while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def operations(rows: list[SamplingRow]) -> list[str]:
    logits = spread_logits(len(rows))
    with Operations() as watched:
        sample(logits, rows)
    return watched.seen


def test_greedy_rows_cost_one_maximum_and_no_option_of_a_neighbour_adds_to_it() -> None:
    """No sort, no copy of logits, no mask: for sixteen greedy rows torch is asked for their maxima and no more."""
    greedy = operations([SamplingRow() for _ in range(16)])
    assert greedy == ["aten.max.dim"]


def test_rows_without_an_option_are_not_even_read_for_a_neighbour_that_has_one() -> None:
    """Of 64 rows one has penalties: nothing that the processors touch is larger than that one row."""
    rows = [SamplingRow()] * 63 + rows_of(rules=LogitRules(frequency_penalty=1.0))
    sizes: list[int] = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            if isinstance(found, torch.Tensor):
                sizes.append(found.numel())
            return found

    logits = spread_logits(64)
    with Sizes():
        sample(logits, rows)
    assert max(sizes) == VOCAB


@pytest.mark.parametrize("option", [{"rules": LogitRules(presence_penalty=1.0)}, {"min_tokens": 9}])
def test_greedy_rows_with_processors_are_not_sorted(option: dict[str, Any]) -> None:
    seen = operations(rows_of(**option))
    assert not any("sort" in name or "topk" in name or "softmax" in name for name in seen), seen


def sorted_sizes(logits: torch.Tensor, row: SamplingRow) -> list[int]:
    """How many values each sort and topk was given, for one row."""
    sizes: list[int] = []

    class Sorts(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if str(func).startswith(("aten.sort", "aten.topk", "aten.kthvalue")):
                sizes.append(args[0].numel())
            return func(*args, **(kwargs or {}))

    with Sorts():
        sample(logits, [row])
    return sizes


@pytest.mark.parametrize("spread", [0.01, 3.0])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_top_k_sorts_a_few_times_k_values_however_flat_the_row_is(spread: float, top_p: float) -> None:
    """Four groups for each of k, and then not many more than k tokens."""
    logits = torch.randn(1, 50_000, generator=torch.Generator().manual_seed(1)) * spread
    sizes = sorted_sizes(logits, SamplingRow(1.0, 50, top_p))
    assert 50 <= max(sizes) <= 4 * 50
    assert len(sizes) == 3  # the groups' maxima, the tokens, and the places of those that stay


def test_top_p_sorts_the_tokens_that_it_keeps_and_hardly_another() -> None:
    logits = torch.randn(1, 50_000, generator=torch.Generator().manual_seed(1)) * 2.0
    candidates, kept = sorted_sizes(logits, SamplingRow(1.0, 0, 0.9))
    assert kept > 5_000
    assert kept < candidates < 1.1 * kept
