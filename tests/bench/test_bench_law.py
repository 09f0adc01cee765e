"""The law of the variance benchmark, and the arithmetic of what is gained: exact."""

from __future__ import annotations

import statistics

import pytest
from ops.bench import variance
from ops.bench.variance import CAPS, PARTS, WAYS, Law, Row

from jitney_worker.bench.workloads import BenchJob

ORIGINAL = [Law(128, 512, cap) for cap in CAPS]


def test_the_mean_of_what_is_kept_is_that_of_the_original_benchmark() -> None:
    assert [round(law.kept_mean, 1) for law in ORIGINAL] == [15.3, 53.5, 118.4, 128.0]
    assert Law(128, 512, None).kept_mean == 128


@pytest.mark.parametrize("law", ORIGINAL, ids=lambda law: law.name)
def test_drawn_lengths_follow_the_law(law: Law) -> None:
    lengths = law.lengths(20_000, seed=1)
    assert law.cap is not None
    assert 1 <= min(lengths) <= max(lengths) <= law.cap
    assert statistics.fmean(lengths) == pytest.approx(law.kept_mean, rel=0.03)
    assert lengths == law.lengths(20_000, seed=1) != law.lengths(20_000, seed=2)


def test_the_control_has_no_variance() -> None:
    assert set(Law(32, 128, None).lengths(50, seed=1)) == {32}


def test_static_batches_are_as_large_as_in_the_original() -> None:
    """16, 12, 8 and 4 there, with 8,700 tokens; in whole blocks of this cache 13 fit at the second cap."""
    blocks = variance.num_blocks(1)
    assert [variance.static_seats(law, blocks) for law in ORIGINAL] == [16, 13, 8, 4]


def test_the_scaled_law_keeps_its_proportions() -> None:
    found = variance.laws(4)
    assert [(law.mean, law.prompt_tokens, law.cap) for law in found] == [
        (32, 128, None),
        (32, 128, 8),
        (32, 128, 32),
        (32, 128, 128),
        (32, 128, 384),
    ]
    assert variance.num_blocks(4) * 16 == 2_176
    assert [variance.static_seats(law, variance.num_blocks(4)) for law in found] == [13, 15, 13, 8, 4]


def test_caps_that_fall_together_are_measured_once() -> None:
    assert [law.cap for law in variance.laws(128)] == [None, 2, 4, 12]


def test_the_busy_share_of_static_batches_is_exact() -> None:
    assert variance.busy_share([1, 4, 2, 2, 3], seats=2) == 12 / (4 * 2 + 2 * 2 + 3)
    assert variance.busy_share([5, 5, 5], seats=2) == 1.0


def test_jobs_are_all_different_and_the_same_again() -> None:
    law = Law(8, 16, 32)
    jobs = variance.jobs_of(law, 40, vocab_size=512)
    assert jobs == variance.jobs_of(law, 40, vocab_size=512)
    assert len({job.prompt for job in jobs}) == 40
    assert {len(job.prompt) for job in jobs} == {16}
    assert [job.max_tokens for job in jobs] == law.lengths(40, seed=2)


def test_a_sample_has_jobs_of_all_lengths() -> None:
    jobs = [BenchJob((3,), length) for length in range(1, 101)]
    sample = variance.sample_of(jobs[::-1], 5)
    assert [job.max_tokens for job in sample] == [11, 31, 51, 71, 91]
    assert variance.sample_of(jobs[:3], 9) == jobs[:3]


def test_the_parts_of_a_gain_make_up_the_whole() -> None:
    rates = dict(zip(WAYS, ([2.0], [6.0], [30.0], [75.0], [150.0]), strict=True))
    row = Row(Law(32, 128, 8), seats=4, mean_length=3.0, busy_share=0.5, rates=rates)
    assert {part: row.gain(part) for part in PARTS} == {
        "kernels": 3.0,
        "batching": 5.0,
        "seats saved": 2.5,
        "batch size": 2.0,
    }
    assert row.ratio("paged", "naive") == 75.0
    assert row.ratio("paged", "static") == 5.0


def test_gains_are_medians_of_each_rounds_ratio() -> None:
    rates = {way: [1.0, 1.0, 1.0] for way in WAYS} | {"static": [10.0, 20.0, 40.0], "continuous": [20.0, 20.0, 120.0]}
    row = Row(Law(32, 128, 8), 4, 3.0, 0.5, rates)
    assert row.gain("seats saved") == 2.0
    assert row.wire()["parts"]["seats saved"] == 2.0
