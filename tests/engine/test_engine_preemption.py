"""Too few blocks: what is preempted goes on as if nothing had happened, and somebody always gets ahead."""

from __future__ import annotations

import pytest
from scripted_model import HashModel, request, run, run_alone, settings, solo

from jitney.errors import PromptTooLong
from jitney_worker.engine.engine import LocalEngine
from jitney_worker.engine.sequence import SequenceId


def test_four_sequences_in_too_small_a_pool_say_what_each_says_alone() -> None:
    """B01"""
    requests = [request(f"s{n}", 20, 64, arrival=n) for n in range(4)]
    engine = LocalEngine(settings(num_blocks=12), HashModel())
    outcome = run(engine, requests)
    assert engine.snapshot().num_preemptions >= 2
    assert engine.snapshot().num_displacements == 0, "nobody gave way: there were too few blocks"
    for one in requests:
        assert outcome.said(one.id) == run_alone(one) == solo(one)
        assert len(outcome.tokens[one.id]) == 64


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("total", [2, 15, 16, 17, 31, 32, 33])
def test_a_sequence_preempted_at_or_beside_a_block_boundary_goes_on_with_its_next_token(
    total: int, caching: bool
) -> None:
    """B02: `first` needs its fourth block in step `total`, when `second` has that many tokens and the pool is full."""
    first = request("first", 50 - total, total + 3, arrival=0)
    second = request("second", 1, 48, arrival=1)
    model = HashModel()
    num_blocks = 3 + -(-(total - 1) // 16)
    engine = LocalEngine(settings(num_blocks=num_blocks, admission_reserve=0.0, enable_prefix_caching=caching), model)
    outcome = run(engine, [first, second])
    assert model.preempted[0] == (total, second.id)
    assert outcome.steps[second.id][: total - 1] == list(range(1, total))
    assert outcome.steps[second.id][total - 1] > total
    for one in (first, second):
        assert outcome.said(one.id) == run_alone(one)


@pytest.mark.parametrize("caching", [True, False])
def test_a_short_prompt_preempted_after_two_hundred_tokens_is_recomputed_with_its_output(caching: bool) -> None:
    """B02: with 3 prompt tokens and 200 of output, recomputing the prompt alone would be wrong and unnoticed."""
    first, second = request("first", 9, 205, arrival=0), request("second", 3, 220, arrival=1)
    model = HashModel()
    engine = LocalEngine(settings(num_blocks=26, admission_reserve=0.0, enable_prefix_caching=caching), model)
    outcome = run(engine, [first, second])
    assert model.preempted == [(201, second.id)]
    back = next(computed for step, computed in model.steps if step > 201 and second.id in computed)
    assert back[second.id] == (11 if caching else 203), "cached blocks are used again, otherwise all is recomputed"
    assert outcome.said("second") == run_alone(second)
    assert outcome.endings[second.id].joined_step == 1


def test_the_last_in_order_is_preempted_and_never_the_first() -> None:
    """`early` came into the engine last but stands first in order: the others make room for it."""
    late = [request(f"late{n}", 16, 40, arrival=10 + n) for n in range(3)]
    early = request("early", 16, 49, arrival=1)
    model = HashModel()
    engine = LocalEngine(settings(num_blocks=8, admission_reserve=0.0), model)
    outcome = run(engine, [*late, early])
    assert outcome.steps[early.id] == list(range(1, 50))
    assert [sequence_id for _, sequence_id in model.preempted][:2] == ["late2", "late1"]
    assert early.id not in {sequence_id for _, sequence_id in model.preempted}


def test_a_preempted_sequence_waits_ahead_of_newcomers_with_the_same_key() -> None:
    """Seats for two: the preempted one takes the next seat, though the newcomer has waited for longer."""
    first = request("first", 16, 33, arrival=0)
    second = request("second", 16, 40, arrival=7)
    newcomer = request("newcomer", 1, 2, arrival=7)
    model = HashModel()
    engine = LocalEngine(settings(num_blocks=4, max_num_seqs=2, admission_reserve=0.0), model)
    outcome = run(engine, [first, second, newcomer])
    assert model.preempted[0][1] == second.id
    assert max(outcome.steps[second.id]) > min(outcome.steps[newcomer.id]) > max(outcome.steps[first.id])
    resumed = next(step for step in outcome.steps[second.id] if step > model.preempted[0][0])
    assert resumed <= min(outcome.steps[newcomer.id])


def test_nobody_joins_in_a_step_that_preempted() -> None:
    model = HashModel()
    engine = LocalEngine(settings(num_blocks=5, admission_reserve=0.0), model)
    first, second = request("first", 31, 20, arrival=0), request("second", 31, 20, arrival=1)
    outcome = run(engine, [first, second, request("third", 1, 2, arrival=2)])
    (step, preempted), *_ = model.preempted
    assert (step, preempted) == (3, second.id)
    assert dict(model.steps)[3].keys() == {first.id}
    assert outcome.said("third") == solo(request("third", 1, 2))


def test_a_hundred_sequences_in_seventeen_blocks_all_end_with_few_preemptions() -> None:
    """B07: the first in order gains a token in every step, so work never goes in circles."""
    requests = [request(f"s{n:02}", 16, 64, arrival=n) for n in range(100)]
    model = HashModel()
    engine = LocalEngine(settings(num_blocks=17, max_num_seqs=32, enable_prefix_caching=False), model)
    outcome = run(engine, requests, max_steps=6_400)
    assert engine.snapshot().num_preemptions > 0
    for one in requests:
        assert outcome.said(one.id) == solo(one)
        assert sum(sequence_id == one.id for _, sequence_id in model.preempted) < 10
    ended: set[SequenceId] = set()
    gained_in = {one.id: set(outcome.steps[one.id]) for one in requests}
    for step, _ in model.steps:
        oldest = next(one.id for one in requests if one.id not in ended)
        assert step in gained_in[oldest]
        ended |= {one.id for one in requests if max(outcome.steps[one.id]) == step}


def test_a_lone_sequence_that_would_outgrow_the_pool_is_refused_with_the_numbers() -> None:
    """B04: with nobody to preempt it would be recomputed into the same wall for ever."""
    engine = LocalEngine(settings(num_blocks=4), HashModel())
    with pytest.raises(PromptTooLong) as refused:
        engine.add(request("big", 60, 40))
    assert (refused.value.num_tokens, refused.value.max_tokens) == (100, 65)
    assert str(refused.value) == (
        "the prompt with max_tokens is 100 tokens, but at most 65 fit: shorten the prompt or lower max_tokens"
    )
    assert (refused.value.param, refused.value.code) == ("max_tokens", "context_length_exceeded")
    assert not engine.has_work()
    assert run(engine, [request("tiny", 3, 2)]).said("tiny") == solo(request("tiny", 3, 2))


def test_a_lone_sequence_may_fill_the_pool_to_the_last_slot() -> None:
    """B04, the other side: 65 tokens need 64 slots, because the last one is never computed."""
    engine = LocalEngine(settings(num_blocks=4), HashModel())
    whole = request("whole", 60, 5)
    assert run(engine, [whole]).said("whole") == solo(whole)
    with pytest.raises(PromptTooLong):
        engine.add(request("over", 60, 6))


def test_a_prompt_that_can_never_fit_does_not_hold_up_those_behind_it() -> None:
    """B05: no room ever is an error at once; no room now is waiting."""
    engine = LocalEngine(settings(num_blocks=49), HashModel())
    with pytest.raises(PromptTooLong) as refused:
        engine.add(request("huge", 1_000))
    assert (refused.value.num_tokens, refused.value.max_tokens) == (1_000, 784)
    assert refused.value.param == "prompt"
    short = [request(f"s{n}", 10, 8, arrival=n) for n in range(5)]
    outcome = run(engine, short, max_steps=9)
    assert [outcome.said(one.id) for one in short] == [solo(one) for one in short]


def test_what_does_not_fit_now_waits_and_nobody_behind_overtakes() -> None:
    """B05: head of line. `small` would fit at once, but `large` came first."""
    model = HashModel()
    engine = LocalEngine(settings(num_blocks=8), model)
    running = request("running", 60, 5, arrival=0)
    large, small = request("large", 100, 4, arrival=1), request("small", 2, 4, arrival=2)
    outcome = run(engine, [running, large, small])
    assert outcome.steps[running.id] == [1, 2, 3, 4, 5]
    assert outcome.steps[large.id] == outcome.steps[small.id] == [6, 7, 8, 9]
    assert engine.snapshot().num_preemptions == 0


def test_newcomers_leave_a_reserve_of_blocks_to_those_that_still_grow() -> None:
    """Of 10 blocks 3 are reserved; `old` has 5 and can still grow by 4, so a newcomer of 3 must wait for it."""
    model = HashModel()
    engine = LocalEngine(settings(num_blocks=10, admission_reserve=0.25), model)
    old = request("old", 80, 64, arrival=0)
    outcome = run(engine, [old, request("new", 40, 8, arrival=1)])
    assert min(outcome.steps[SequenceId("new")]) > 50
    assert model.preempted == []


def test_the_reserve_is_no_larger_than_what_the_running_can_still_ask_for() -> None:
    """`old` needs no further block, so nothing is kept back from the newcomer."""
    engine = LocalEngine(settings(num_blocks=10, admission_reserve=0.9), HashModel())
    old, new = request("old", 80, 1 + 0, arrival=0), request("new", 70, 9, arrival=1)
    assert run(engine, [old, new]).steps[new.id][0] == 1


def test_a_lone_sequence_is_admitted_whatever_the_reserve() -> None:
    engine = LocalEngine(settings(num_blocks=4, admission_reserve=0.99), HashModel())
    lone = request("lone", 40, 25)
    assert run(engine, [lone]).steps[lone.id][0] == 1
