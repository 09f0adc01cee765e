"""Wrong or slightly different logits inside a running batch: who notices, and who must not (B21)."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from engine_driver import Ask, alone, engine_for, prompt, run, tokens, with_own_cache
from torch import Tensor

from jitney_worker.model.decoder import Decoder
from jitney_worker.model.runner import TorchRunner


class DisturbedDecoder:
    """The real decoder whose logits pass through a function of (logits, number of the step)."""

    def __init__(self, real: Decoder, disturb: Callable[[Tensor, int], Tensor]) -> None:
        self.config, self.attention_layers, self.forward = real.config, real.attention_layers, real.forward
        self._real = real
        self._disturb = disturb
        self._step = 0

    def logits(self, hidden: Tensor) -> Tensor:
        self._step += 1
        return self._disturb(self._real.logits(hidden), self._step)


def disturbed(runner: TorchRunner, disturb: Callable[[Tensor, int], Tensor]) -> TorchRunner:
    return TorchRunner(DisturbedDecoder(runner.decoder, disturb), runner.cache, runner.attention)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_sequence_whose_logits_are_poisoned_fails_alone(tiny: TorchRunner, poison: float, temperature: float) -> None:
    asks = [
        Ask(prompt(6 + i, seed=i), 20, options={"temperature": temperature, "seed": i, "top_p": 0.9}) for i in range(8)
    ]

    def poison_row_three_at_step_five(logits: Tensor, step: int) -> Tensor:
        if step == 5:
            logits[3] = poison if poison < 0 else logits[3]
            logits[3, 77] = poison
        return logits

    runner = disturbed(tiny, poison_row_three_at_step_five)
    answers = run(engine_for(runner), asks)
    victim = answers.pop(3)
    assert (victim.error, victim.finish_reason, len(victim.token_ids)) == ("bad_logits", None, 4)
    del asks[3]
    assert [answer.error for answer in answers] == [None] * 7
    assert [answer.token_ids for answer in answers] == [alone(tiny, ask) for ask in asks]


def test_nan_that_a_former_owner_left_in_the_cache_reaches_nobody(tiny: TorchRunner) -> None:
    """Every block was once a victim's, and is handed out NaN and all."""
    asks = [Ask(prompt(30, seed=i), 30) for i in range(3)]
    poisoned = with_own_cache(tiny, num_blocks=12)
    for pool in poisoned.cache.pools.values():
        pool[:, : poisoned.num_blocks] = math.nan
    found = tokens(engine_for(poisoned, admission_reserve=0.0), asks)
    assert found == [alone(tiny, ask) for ask in asks]


def test_seeded_tokens_do_not_flip_when_logits_move_by_a_ten_thousandth(tiny: TorchRunner) -> None:
    """1,920 tokens of 40 sequences, every logit of every step moved by up to 1e-4."""
    generator = torch.Generator().manual_seed(4)

    def shake(logits: Tensor, step: int) -> Tensor:
        return logits + (torch.rand(logits.shape, generator=generator) * 2 - 1) * 1e-4

    asks = [
        Ask(prompt(5 + i, seed=i), 48, options={"temperature": 0.7 + 0.01 * i, "top_p": 0.98, "seed": i})
        for i in range(40)
    ]
    still = tokens(engine_for(tiny, max_num_seqs=40), asks)
    shaken = tokens(engine_for(disturbed(tiny, shake), max_num_seqs=40), asks)
    assert shaken == still
    assert len({token_id for answer in still for token_id in answer}) > 200
