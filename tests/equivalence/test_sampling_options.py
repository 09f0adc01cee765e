"""Every sampling option on a real model: resumed, preempted or in company, an answer is the undisturbed one."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from engine_driver import Answer, Ask, engine_for, prompt, run, with_own_cache

from jitney_worker.engine.sequence import LogitRules
from jitney_worker.model.runner import TorchRunner

NUM_TOKENS = 40
CUTS = (1, 7, 15, 16, 17, 31, 39)

RULES: dict[str, dict[str, Any]] = {
    "presence": {"rules": LogitRules(presence_penalty=2.0)},
    "frequency": {"rules": LogitRules(frequency_penalty=2.0)},
    "repetition": {"rules": LogitRules(repetition_penalty=2.0)},
    "bias": {"rules": LogitRules(logit_bias=tuple((token_id, 4.0) for token_id in range(40, 60)))},
    "allowed": {"rules": LogitRules(allowed_token_ids=tuple(range(100, 110)), presence_penalty=1.0)},
    "everything": {
        "min_tokens": 25,
        "num_logprobs": 3,
        "num_prompt_logprobs": 2,
        "rules": LogitRules(
            allowed_token_ids=tuple(range(50, 400)),
            bad_words=((60, 61), (62,), (70, 71, 72)),
            logit_bias=((80, 3.0), (81, -100.0)),
            repetition_penalty=1.3,
            frequency_penalty=0.4,
            presence_penalty=-0.2,
        ),
    },
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.2, "seed": 3},
    "filtered": {"temperature": 1.5, "seed": 4, "min_p": 0.05, "top_k": 60, "top_p": 0.9},
}


def asking(length: int, **options: Any) -> Ask:
    return Ask(prompt(length, seed=length), NUM_TOKENS, options=options)


def undisturbed(runner: TorchRunner, ask: Ask) -> Answer:
    return run(engine_for(with_own_cache(runner), max_num_batched_tokens=4_096), [ask])[0]


def check_rest(whole: Answer, rest: Answer, cut: int) -> None:
    """Tokens and endings to the letter; log probabilities as near as two ways of computing the same thing are."""
    assert (rest.token_ids, rest.finish_reason, rest.error) == (whole.token_ids[cut:], whole.finish_reason, None)
    assert rest.logprobs == pytest.approx(whole.logprobs[cut:], abs=1e-4)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", RULES)
def test_an_answer_resumed_anywhere_is_the_undisturbed_one(tiny: TorchRunner, name: str, way: str) -> None:
    ask = asking(9, **WAYS[way], **RULES[name])
    whole = undisturbed(tiny, ask)
    plain = undisturbed(tiny, asking(9, **WAYS[way]))
    assert whole.token_ids != plain.token_ids, "the option does something"
    for cut in CUTS:
        resumed = dataclasses.replace(ask, output_ids=tuple(whole.token_ids[:cut]))
        (rest,) = run(engine_for(tiny), [resumed])
        check_rest(whole, rest, cut)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("caching", [False, True])
def test_answers_with_different_options_in_one_batch_are_preempted_and_still_the_undisturbed_ones(
    tiny: TorchRunner, way: str, caching: bool
) -> None:
    """One row of each kind and two without any: nothing of a neighbour may leak (B20), nothing may be forgotten."""
    asks = [asking(10 + n, **WAYS[way], **options) for n, options in enumerate([*RULES.values(), {}, {}])]
    expected = [undisturbed(tiny, ask) for ask in asks]
    engine = engine_for(
        tiny,
        num_blocks=14,
        admission_reserve=0.0,
        max_num_batched_tokens=40,
        max_num_seqs=8,
        enable_prefix_caching=caching,
    )
    found = run(engine, asks)
    assert engine.snapshot().num_preemptions >= 4
    for whole, answer in zip(expected, found, strict=True):
        check_rest(whole, answer, 0)
        assert [one.logprob for one in answer.prompt_logprobs] == pytest.approx(
            [one.logprob for one in whole.prompt_logprobs], abs=1e-4
        )
    assert len(found[5].prompt_logprobs) == 14


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("min_tokens", [0, 1, 16, 20, NUM_TOKENS])
def test_end_tokens_come_after_min_tokens_wherever_the_answer_was_cut(
    tiny: TorchRunner, way: str, min_tokens: int
) -> None:
    """B25: half of the vocabulary ends an answer, so that it would end at once. Then it ends at the first chance."""
    ends = frozenset(range(3, 500, 2)) | {2}
    ask = asking(9, **WAYS[way], stop_token_ids=ends, min_tokens=min_tokens)
    whole = undisturbed(tiny, ask)
    assert ends.isdisjoint(whole.token_ids[:min_tokens])
    assert len(whole.token_ids) >= min_tokens
    assert whole.finish_reason == ("length" if min_tokens == NUM_TOKENS else "stop")
    for cut in (1, min_tokens // 2, min_tokens - 1, min_tokens):
        if 0 < cut < len(whole.token_ids):
            resumed = dataclasses.replace(ask, output_ids=tuple(whole.token_ids[:cut]))
            check_rest(whole, run(engine_for(tiny), [resumed])[0], cut)


def test_bad_words_never_come_and_their_parts_may(tiny: TorchRunner) -> None:
    """The words are pairs that the undisturbed answer says; a single token of it is forbidden, too."""
    plain = undisturbed(tiny, asking(9))
    pairs = tuple(zip(plain.token_ids[3:7], plain.token_ids[4:8], strict=True))
    single = plain.token_ids[0]
    found = undisturbed(tiny, asking(9, rules=LogitRules(bad_words=(*pairs, (single,)))))
    assert single not in found.token_ids
    assert set(pairs).isdisjoint(zip(found.token_ids, found.token_ids[1:], strict=False))
    only_pairs = undisturbed(tiny, asking(9, rules=LogitRules(bad_words=pairs)))
    assert only_pairs.token_ids[:4] == plain.token_ids[:4]
    assert only_pairs.token_ids[4] != plain.token_ids[4]
