"""The vectorised sampler against the plain float64 one, and what neighbours must not do."""

from __future__ import annotations

import math
import random

import pytest
import torch
from sampling_reference import reference_allowed, reference_noise, reference_sample

from jitney_worker.engine.protocol import RowFailure, Sampled
from jitney_worker.model.noise import noise_key
from jitney_worker.model.sampler import SamplingRow, sample

NAN, INF = math.nan, math.inf


def spread_logits(num_rows: int, vocab_size: int, *, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


def ids(outcomes: list[Sampled | RowFailure]) -> list[int]:
    assert all(isinstance(outcome, Sampled) for outcome in outcomes), outcomes
    return [outcome.token_id for outcome in outcomes if isinstance(outcome, Sampled)]


def mixed_rows(count: int, *, seed: int) -> tuple[list[SamplingRow], list[dict[str, float]]]:
    """Rows of all kinds beside each other, and the reference's arguments for each."""
    draw = random.Random(seed)
    rows, arguments = [], []
    for position in range(count):
        temperature = draw.choice([0.0, 0.3, 0.8, 1.0, 1.7])
        top_k = draw.choice([0, -1, 1, 5, 40, 700, 9_999_999])
        top_p = draw.choice([1.0, 1.0, 0.95, 0.5, 0.05, 0.999])
        min_p = draw.choice([0.0, 0.0, 0.0, 1e-12, 0.01, 0.3, 1.0])
        rows.append(SamplingRow(temperature, top_k, top_p, noise_key(seed, 1, position), min_p=min_p))
        options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "position": position}
        arguments.append(options)
    return rows, arguments


@pytest.mark.parametrize("spread", [0.5, 3.0, 12.0])
def test_every_kind_of_row_equals_the_float64_reference(spread: float) -> None:
    logits = spread_logits(150, 600, seed=int(spread * 10), spread=spread)
    rows, arguments = mixed_rows(150, seed=9)
    expected = [
        reference_sample(row.tolist(), seed=9, choice=1, **options)  # type: ignore[arg-type]
        for row, options in zip(logits, arguments, strict=True)
    ]
    assert ids(sample(logits, rows)) == expected


def test_a_row_draws_the_same_token_alone_and_in_any_company() -> None:
    logits = spread_logits(40, 2_003, seed=4)
    rows, _ = mixed_rows(40, seed=2)
    together = ids(sample(logits, rows))
    assert [ids(sample(logits[i : i + 1], rows[i : i + 1]))[0] for i in range(40)] == together
    backwards = list(range(39, -1, -1))
    assert ids(sample(logits[backwards], [rows[i] for i in backwards])) == together[::-1]


def test_greedy_takes_the_lowest_id_among_equal_logits() -> None:
    logits = torch.zeros(3, 50_000)
    logits[0, [49_999, 30_000, 77]] = 5.0
    logits[1, [31, 32]] = 2.0
    assert ids(sample(logits, [SamplingRow()] * 3)) == [77, 31, 0]


def test_draws_follow_the_softmax_at_the_temperature() -> None:
    """Chi-square with 19 degrees of freedom: 43.8 is passed once in a thousand, and the seed is fixed."""
    logits = spread_logits(1, 20, seed=6, spread=1.0)
    num_draws = 20_000
    rows = [SamplingRow(temperature=0.7, key=noise_key(123, 0, position)) for position in range(num_draws)]
    counts = torch.tensor(ids(sample(logits.expand(num_draws, 20), rows))).bincount(minlength=20)
    expected = (logits[0].double() / 0.7).softmax(-1) * num_draws
    assert float(((counts - expected) ** 2 / expected).sum()) < 43.8


def test_draws_follow_the_renormalised_distribution_under_both_filters() -> None:
    logits = spread_logits(1, 300, seed=8, spread=2.0)
    allowed = reference_allowed(logits[0].tolist(), 1.0, 12, 0.9)
    assert 5 < len(allowed) < 12
    num_draws = 10_000
    rows = [SamplingRow(1.0, 12, 0.9, noise_key(5, 0, position)) for position in range(num_draws)]
    drawn = ids(sample(logits.expand(num_draws, 300), rows))
    assert set(drawn) == set(allowed)
    expected = logits[0, allowed].double().softmax(-1) * num_draws
    counts = torch.tensor([drawn.count(token_id) for token_id in allowed])
    assert float(((counts - expected) ** 2 / expected).sum()) < 31.3  # 11 degrees at most


def test_two_choices_of_a_job_agree_as_often_as_independent_draws() -> None:
    logits = spread_logits(1, 30, seed=3, spread=1.0)
    num_draws = 5_000
    both = [
        ids(
            sample(
                logits.expand(num_draws, 30),
                [SamplingRow(temperature=1.0, key=noise_key(7, choice, position)) for position in range(num_draws)],
            )
        )
        for choice in (0, 1)
    ]
    agreeing = sum(first == second for first, second in zip(*both, strict=True))
    chance = float((logits[0].double().softmax(-1) ** 2).sum())
    assert abs(agreeing - num_draws * chance) < 4 * math.sqrt(num_draws * chance * (1 - chance))


def test_top_k_keeps_exactly_k_of_equal_logits_the_lowest_ids() -> None:
    rows = [SamplingRow(1.0, 3, 1.0, noise_key(1, 0, position)) for position in range(400)]
    assert set(ids(sample(torch.zeros(400, 1_000), rows))) == {0, 1, 2}


def test_top_p_keeps_at_least_the_top_token() -> None:
    rows = [SamplingRow(1.0, 0, p, noise_key(1, 0, 3)) for p in (1e-9, 0.0)]
    logits = spread_logits(2, 5_000, seed=1)
    assert ids(sample(logits, rows)) == logits.argmax(-1).tolist()


def test_top_p_reaches_deep_when_the_distribution_is_flat() -> None:
    """99.9 % of 3,000 nearly equal tokens: no shortcut by depth may cut the nucleus."""
    logits = spread_logits(60, 3_000, seed=2, spread=0.01)
    rows = [SamplingRow(0.05, 0, 0.999, noise_key(3, 0, position)) for position in range(60)]
    expected = [
        reference_sample(row.tolist(), temperature=0.05, top_p=0.999, seed=3, position=i)
        for i, row in enumerate(logits)
    ]
    assert ids(sample(logits, rows)) == expected


def test_top_p_of_logits_so_large_that_float32_rounds_them_past_the_noise_takes_the_larger_ones() -> None:
    """Divided by the temperature they lie around 5e8, where float32 numbers are 32 apart."""
    logits = torch.full((20, 4_000), 5e5)
    logits[:, ::2] -= 0.03125
    rows = [SamplingRow(1e-3, 0, 1 - 1e-9, noise_key(1, 0, position)) for position in range(20)]
    assert {token_id % 2 for token_id in ids(sample(logits, rows))} == {1}


@pytest.mark.parametrize(
    "options",
    [{"top_k": 0}, {"top_k": -1}, {"top_k": 600}, {"top_k": 9_999_999}, {"top_k": 2**70}, {"top_p": 1.0}],
)
def test_a_filter_out_of_range_is_off(options: dict[str, float]) -> None:
    logits = spread_logits(20, 600, seed=5)
    keys = [noise_key(2, 0, position) for position in range(20)]
    plain = ids(sample(logits, [SamplingRow(1.0, key=key) for key in keys]))
    assert ids(sample(logits, [SamplingRow(1.0, key=key, **options) for key in keys])) == plain  # type: ignore[arg-type]


def test_a_tiny_a_negative_and_a_missing_temperature_are_greedy() -> None:
    logits = spread_logits(4, 600, seed=5)
    rows = [SamplingRow(temperature) for temperature in (1e-6, -1.0, NAN, 0.0)]
    assert ids(sample(logits, rows)) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("poison", "named"), [((0, NAN), "NaN"), ((599, INF), "+Inf"), ((slice(None), -INF), "only -Inf")]
)
def test_a_poisoned_row_fails_alone(poison: tuple[int | slice, float], named: str, temperature: float) -> None:
    logits = spread_logits(8, 600, seed=12)
    rows = [SamplingRow(temperature, 0, 0.9, noise_key(1, 0, i), num_logprobs=2) for i in range(8)]
    clean = sample(logits, rows)
    logits[5, poison[0]] = poison[1]
    outcomes = sample(logits, rows)
    failure = outcomes.pop(5)
    assert isinstance(failure, RowFailure)
    assert (failure.code, named in failure.message) == ("bad_logits", True)
    del clean[5]
    assert outcomes == clean


def test_minus_infinity_is_never_drawn() -> None:
    logits = torch.full((300, 40), -INF)
    logits[:, [4, 9]] = 0.0
    rows = [SamplingRow(5.0, 0, 1.0, noise_key(0, 0, position)) for position in range(300)]
    assert set(ids(sample(logits, rows))) == {4, 9}


def test_logprobs_are_of_the_unfiltered_distribution_at_temperature_one() -> None:
    logits = spread_logits(6, 500, seed=21)
    rows = [SamplingRow(0.4, 2, 0.5, noise_key(4, 0, i), num_logprobs=3) for i in range(6)]
    expected = logits.double().log_softmax(-1)
    for i, outcome in enumerate(sample(logits, rows)):
        assert isinstance(outcome, Sampled)
        assert outcome.logprobs is not None
        assert outcome.logprobs.logprob == pytest.approx(float(expected[i, outcome.token_id]), abs=1e-5)
        best = expected[i].topk(3)
        assert [token_id for token_id, _ in outcome.logprobs.top] == best.indices.tolist()
        assert [value for _, value in outcome.logprobs.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_only_rows_that_ask_get_logprobs_and_k_may_be_zero() -> None:
    outcomes = sample(spread_logits(3, 50), [SamplingRow(), SamplingRow(num_logprobs=0), SamplingRow(num_logprobs=999)])
    found = [outcome.logprobs for outcome in outcomes if isinstance(outcome, Sampled)]
    assert found[0] is None
    assert found[1] is not None
    assert found[1].top == ()
    assert found[2] is not None
    assert len(found[2].top) == 50


def test_equal_logprobs_are_listed_by_id() -> None:
    logits = torch.zeros(1, 2_000)
    logits[0, [1_500, 3]] = 1.0
    (outcome,) = sample(logits, [SamplingRow(num_logprobs=4)])
    assert isinstance(outcome, Sampled)
    assert outcome.logprobs is not None
    assert [token_id for token_id, _ in outcome.logprobs.top] == [3, 1_500, 0, 1]


def test_a_perturbation_of_the_logits_flips_no_draw_where_inversion_flips_many() -> None:
    """1,024 draws from 4,096 tokens, every logit moved by up to 1e-4."""
    logits = spread_logits(1_024, 4_096, seed=30, spread=2.0)
    generator = torch.Generator().manual_seed(31)
    moved = logits + (torch.rand(logits.shape, generator=generator) * 2 - 1) * 1e-4
    rows = [SamplingRow(1.0, 0, 1.0, noise_key(77, 0, position)) for position in range(1_024)]
    assert ids(sample(logits, rows)) == ids(sample(moved, rows))
    points = torch.rand(1_024, 1, generator=generator, dtype=torch.float64)
    by_inversion = [(values.double().softmax(-1).cumsum(-1) < points).sum(-1) for values in (logits, moved)]
    assert int((by_inversion[0] != by_inversion[1]).sum()) > 5


def test_top_p_asks_for_a_share_of_all_that_top_k_left_also_of_what_cannot_be_drawn() -> None:
    """Each of 49,998 tokens lies too deep to win, but together they weigh more than what top_p cuts off."""
    logits = torch.full((1, 50_000), -20.0)
    logits[0, 0], logits[0, 1] = 0.0, -10.0
    options = {"temperature": 1.0, "top_k": 49_999, "top_p": 0.99994}
    assert reference_allowed(logits[0].tolist(), **options)[:2] == [0, 1]  # type: ignore[arg-type]
    position = 20_514
    assert reference_noise(5, 0, position, 1) - reference_noise(5, 0, position, 0) > 10.0
    row = SamplingRow(1.0, 49_999, 0.99994, noise_key(5, 0, position))
    assert ids(sample(logits, [row])) == [1]
