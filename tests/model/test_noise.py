"""The counter-based noise behind seeds."""

from __future__ import annotations

import itertools
import math

import torch
from sampling_reference import reference_bits, reference_noise

from jitney_worker.model.noise import NOISE_REACH, gumbel, mix, noise_key

SEEDS = (0, 1, -1, 7, 2**62, -(2**63), 2**63 - 1)


def noise_of(seed: int, choice: int, position: int, token_ids: list[int]) -> list[float]:
    keys = torch.full((len(token_ids),), noise_key(seed, choice, position))
    return gumbel(keys, torch.tensor(token_ids)).tolist()


def test_noise_equals_the_plain_integer_reference_for_extreme_seeds_and_ids() -> None:
    token_ids = [0, 1, 2, 49_151, 151_935, 2**31 - 1]
    for seed, choice, position in itertools.product(SEEDS, (0, 3), (0, 1, 8_191)):
        expected = [reference_noise(seed, choice, position, token_id) for token_id in token_ids]
        assert noise_of(seed, choice, position, token_ids) == expected


def test_noise_of_a_token_does_not_depend_on_which_tokens_are_asked_with_it() -> None:
    everyone = noise_of(5, 0, 17, list(range(4_099)))
    for first, count in ((0, 1), (3, 7), (1_000, 33), (4_098, 1)):
        assert noise_of(5, 0, 17, list(range(first, first + count))) == everyone[first : first + count]


def test_noise_stays_within_the_reach_that_the_sampler_cuts_at() -> None:
    least = -math.log(-math.log(0.5 / 2**23))
    most = -math.log(-math.log((2**23 - 0.5) / 2**23))
    assert (round(least, 2), round(most, 2)) == (-2.81, 16.64)
    assert most - least < NOISE_REACH
    values = noise_of(1, 0, 0, list(range(200_000)))
    assert least <= min(values)
    assert max(values) <= most


def test_seed_choice_and_position_each_give_other_noise() -> None:
    keys = {noise_key(*counters) for counters in itertools.product(range(-20, 20), range(5), range(40))}
    assert len(keys) == 40 * 5 * 40
    assert noise_key(0, 1, 0) != noise_key(1, 0, 0) != noise_key(0, 0, 1)


def test_the_mixer_changes_half_of_the_output_bits_for_each_input_bit() -> None:
    for bit in range(64):
        flipped = sum((mix(base) ^ mix(base ^ (1 << bit))).bit_count() for base in range(1, 200))
        assert 29 * 199 < flipped < 35 * 199


def test_noise_bits_are_uniform() -> None:
    """Chi-square over 256 cells; 330.5 is passed once in a thousand. The counters are fixed, so is the outcome."""
    cells = [0] * 256
    for position in range(64):
        for token_id in range(400):
            cells[reference_bits(11, 0, position, token_id) >> 15] += 1
    expected = 64 * 400 / 256
    assert sum((count - expected) ** 2 / expected for count in cells) < 330.5
