"""Log probabilities of the prompt: each once, with the first token, whatever happens to the prompt on the way."""

from __future__ import annotations

import pytest
from scripted_model import HashModel, choices, prompt_logprob, request, run, settings, solo

from jitney_worker.engine.engine import LocalEngine
from jitney_worker.engine.protocol import TokenLogprobs
from jitney_worker.engine.sequence import SequenceRequest


def expected(one: SequenceRequest) -> list[TokenLogprobs]:
    return [prompt_logprob(position, one.prompt_ids[position]) for position in range(1, len(one.prompt_ids))]


@pytest.mark.parametrize("budget", [4, 7, 64])
@pytest.mark.parametrize("length", [1, 2, 16, 40])
def test_they_come_with_the_first_token_however_the_prompt_is_cut(length: int, budget: int) -> None:
    one = request("one", length, 5, num_prompt_logprobs=0)
    engine = LocalEngine(settings(max_num_batched_tokens=budget, max_num_seqs=1), HashModel())
    engine.add(one)
    given = []
    while engine.has_work():
        given += [(len(delta.prompt_logprobs), len(delta.token_ids)) for delta in engine.step()]
    assert given == [(length - 1, 1)] + [(0, 1)] * 4
    assert run(engine, [one]).prompt_logprobs[one.id] == expected(one)


def test_a_prompt_that_is_cached_is_computed_all_the_same_and_shares_its_blocks_again_afterwards() -> None:
    """Cached blocks hold keys and values, not what the model thought of the tokens."""
    model = HashModel()
    engine = LocalEngine(settings(), model)
    prompt = range(40)
    run(engine, [request("before", prompt, 3)])
    asking = request("asking", prompt, 3, num_prompt_logprobs=2)
    outcome = run(engine, [asking])
    assert outcome.prompt_logprobs[asking.id] == expected(asking)
    assert outcome.endings[asking.id].num_cached_tokens == 0
    assert next(computed for _, computed in model.steps if asking.id in computed) == {asking.id: 40}
    after = request("after", prompt, 3)
    assert run(engine, [after]).endings[after.id].num_cached_tokens == 32


def test_a_prompt_preempted_half_way_is_computed_from_its_start_and_each_is_given_once() -> None:
    """`first` grows into the blocks that the long prompt holds, while that is still being computed."""
    model = HashModel()
    limits = settings(num_blocks=6, max_num_batched_tokens=4, max_num_seqs=4, admission_reserve=0.0)
    engine = LocalEngine(limits, model)
    first = request("first", 16, 40, arrival=0)
    asking = request("asking", 64, 3, arrival=5, num_prompt_logprobs=0)
    outcome = run(engine, [first, asking])
    assert [sequence_id for _, sequence_id in model.preempted][:1] == [asking.id]
    preempted_at = model.preempted[0][0]
    before = sum(computed.get(asking.id, 0) for step, computed in model.steps if step < preempted_at)
    assert 0 < before < 64
    assert outcome.prompt_logprobs[asking.id] == expected(asking)
    assert outcome.said("asking") == solo(asking)


def test_choices_take_the_prompt_of_the_one_that_is_asked_for_them() -> None:
    model = HashModel()
    engine = LocalEngine(settings(), model)
    run(engine, [request("before", 37, 2)])
    three = choices("job", range(37), 4, n=3)
    asking = request("job/0", range(37), 4, group="job", num_prompt_logprobs=1)
    outcome = run(engine, [asking, *three[1:]])
    assert outcome.prompt_logprobs == {asking.id: expected(asking), three[1].id: [], three[2].id: []}
    assert [computed for _, computed in model.steps[-5:-3]] == [{asking.id: 37}, {one.id: 1 for one in three}]


def test_a_choice_that_is_asked_for_them_computes_the_prompt_though_its_siblings_have_it() -> None:
    model = HashModel()
    engine = LocalEngine(settings(), model)
    three = choices("job", range(37), 20, n=3)
    asking = request("job/0", range(37), 4, group="job", num_prompt_logprobs=1)
    for one in three[1:]:
        engine.add(one)
    for _ in range(4):
        engine.step()
    outcome = run(engine, [asking])
    assert outcome.prompt_logprobs[asking.id] == expected(asking)
    assert max(computed.get(asking.id, 0) for _, computed in model.steps) == 37


def test_a_resumed_sequence_that_still_owes_them_gives_them() -> None:
    fresh = request("one", 30, 20)
    one = request("one", 30, 20, output=solo(fresh)[0][:7], num_prompt_logprobs=0)
    outcome = run(LocalEngine(settings(max_num_batched_tokens=8, max_num_seqs=1), HashModel()), [one])
    assert outcome.prompt_logprobs[one.id] == expected(one)
    assert outcome.said("one")[0] == solo(fresh)[0][7:]
