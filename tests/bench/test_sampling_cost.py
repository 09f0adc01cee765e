"""The table of what sampling options cost: which rows have them, and what its ratios are ratios to."""

from __future__ import annotations

import pytest
import torch
from ops.bench import page, sampling_cost
from ops.bench.sampling_cost import Cost

from jitney_worker.engine.sequence import SequenceParams


@pytest.fixture
def single_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.usefixtures("single_thread")
def test_every_option_is_measured_on_all_rows_and_on_one_and_greedy_rows_have_no_filters() -> None:
    report = sampling_cost.measure(num_rows=4, vocab_size=6_000, num_rounds=1, device="cpu")
    sampled = [cost.option for cost in report if cost.rows == "sampled"]
    greedy = [cost.option for cost in report if cost.rows == "greedy"]
    assert sampled == ["none", *sampling_cost.OPTIONS]
    assert greedy == [option for option in sampled if option not in sampling_cost.ONLY_WHEN_SAMPLED]
    assert all(cost.all_us > 0 and cost.one_us > 0 for cost in report)


def test_the_option_is_on_as_many_rows_as_it_is_said_to_be() -> None:
    base = SequenceParams(10_000, temperature=1.0)
    found = sampling_cost.variants(5, 6_000, base)
    counts = {which: sum(one.sequence.params != base for one in v.scheduled) for which, v in found.items()}
    assert counts == {(name, number): number for name, number in found}


def test_a_ratio_is_the_median_over_rounds_and_not_of_medians() -> None:
    assert sampling_cost._figures([10.0, 40.0, 90.0], [10.0, 10.0, 90.0]) == (40.0, 1.0)


def test_the_text_says_what_was_measured_and_has_a_line_for_each_option() -> None:
    report = [Cost("greedy", "none", 2_000.4, 1.0, 2_000.4, 1.0), Cost("greedy", "x", 4_100.0, 2.05, 1_990.0, 0.99)]
    asked = sampling_cost.arguments(["--rows", "8", "--rounds", "3"])
    said = sampling_cost.text(report, asked, "a machine")
    assert said.startswith("Microseconds per step of 8 rows of 49,152 logits on cpu, one thread, torch ")
    assert said.splitlines()[-2:] == [
        "| greedy | none | 2,000 | ×1.00 |  |  |",
        "| greedy | x | 4,100 | ×2.05 | 1,990 | ×0.99 |",
    ]
    page.put(
        f"<!-- {sampling_cost.PLACE}: written by x -->\n<!-- end of {sampling_cost.PLACE} -->",
        sampling_cost.PLACE,
        said,
    )
