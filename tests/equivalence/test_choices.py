"""n choices of one job on a real model: each equals its solo run, whatever they share and whenever they lose it."""

from __future__ import annotations

import dataclasses

import pytest
from engine_driver import Ask, alone, engine_for, prompt, run, tokens

from jitney_worker.engine.sequence import LogitRules
from jitney_worker.model.runner import TorchRunner

SEEDED = {"temperature": 1.1, "seed": 5, "top_p": 0.95}
PENALISED = {
    **SEEDED,
    "min_p": 0.01,
    "num_logprobs": 1,
    "rules": LogitRules(repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2, bad_words=((65, 66),)),
}


def choices_of(length: int, n: int, max_tokens: int, **options: object) -> list[Ask]:
    ids = prompt(length, seed=length)
    return [Ask(ids, max_tokens, options={**options, "choice": choice}, group="job") for choice in range(n)]


@pytest.mark.parametrize("options", [SEEDED, PENALISED], ids=["seeded", "penalised"])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("length", [1, 16, 17, 37])
def test_each_of_four_choices_equals_its_solo_run(
    tiny: TorchRunner, length: int, caching: bool, options: dict[str, object]
) -> None:
    four = choices_of(length, 4, 40, **options)
    expected = [alone(tiny, ask) for ask in four]
    assert len(set(map(tuple, expected))) == 4
    assert tokens(engine_for(tiny, enable_prefix_caching=caching), four) == expected


@pytest.mark.parametrize("options", [SEEDED, PENALISED], ids=["seeded", "penalised"])
def test_preempted_choices_equal_their_solo_runs(tiny: TorchRunner, options: dict[str, object]) -> None:
    four = choices_of(37, 4, 48, **options)
    engine = engine_for(tiny, num_blocks=11, admission_reserve=0.0, max_num_batched_tokens=32, max_num_seqs=4)
    found = tokens(engine, four)
    assert engine.snapshot().num_preemptions >= 2
    assert found == [alone(tiny, ask) for ask in four]


@pytest.mark.parametrize("options", [SEEDED, PENALISED], ids=["seeded", "penalised"])
def test_choices_handed_over_at_different_lengths_equal_their_solo_runs(
    tiny: TorchRunner, options: dict[str, object]
) -> None:
    """Logprobs as well: what is computed after the cut is what was computed without one, to the last bits."""
    four = choices_of(21, 4, 40, **options)
    whole = run(engine_for(tiny, max_num_batched_tokens=4_096), four)
    resumed = [
        dataclasses.replace(ask, output_ids=tuple(answer.token_ids[:done]))
        for ask, answer, done in zip(four, whole, (11, 0, 12, 39), strict=True)
    ]
    for ask, answer, again in zip(resumed, whole, run(engine_for(tiny), resumed), strict=True):
        assert (*ask.output_ids, *again.token_ids) == tuple(answer.token_ids)
        assert again.logprobs == pytest.approx(answer.logprobs[len(ask.output_ids) :], abs=1e-4)
