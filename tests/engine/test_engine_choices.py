"""n choices of one prompt: computed once, shared by reference count, and each goes its own way from there."""

from __future__ import annotations

import dataclasses

import pytest
from scripted_model import HashModel, StepBroke, choices, request, run, run_alone, settings, solo

from jitney_worker.engine.blocks import BlockManager
from jitney_worker.engine.engine import LocalEngine
from jitney_worker.engine.protocol import BlockCopy
from jitney_worker.engine.sequence import Sequence, SequenceId
from jitney_worker.engine.siblings import Fork


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", [2, 15, 16, 17, 32, 33, 37])
def test_the_prompt_of_four_choices_is_computed_once_and_each_says_what_it_says_alone(
    length: int, caching: bool
) -> None:
    """The first computes the prompt; the others compute its last token, from whose logits each draws its own."""
    model = HashModel()
    engine = LocalEngine(settings(enable_prefix_caching=caching), model)
    four = choices("job", length, 40, n=4)
    outcome = run(engine, four)
    assert [computed for _, computed in model.steps[:2]] == [
        {four[0].id: length},
        {one.id: 1 for one in four},
    ]
    assert len({copy.target for copy in model.copies}) == len(model.copies) == (3 if (length - 1) % 16 else 0)
    assert {copy.num_tokens for copy in model.copies} <= {(length - 1) % 16}
    said = [outcome.said(one.id) for one in four]
    assert said == [run_alone(one) for one in four] == [solo(one) for one in four]
    assert len({answer for answer, _ in said}) == 4, "the choices differ"
    assert engine.capacity().num_free_blocks == engine.capacity().num_blocks


def test_choices_hold_the_full_blocks_of_their_prompt_together_and_the_last_one_each() -> None:
    engine = LocalEngine(settings(num_blocks=100, enable_prefix_caching=False), HashModel())
    for one in choices("job", 37, 8, n=4):
        engine.add(one)
    engine.step()
    engine.step()
    assert engine.capacity().num_free_blocks == 100 - 2 - 4
    first = engine._scheduler.sequences[SequenceId("job/0")].block_table
    assert [engine._scheduler.sequences[SequenceId(f"job/{n}")].block_table[:2] for n in range(4)] == [first[:2]] * 4


def test_a_choice_that_leaves_takes_nothing_from_the_others() -> None:
    """Whoever computed the prompt is aborted first, in the step after the others came in."""
    model = HashModel()
    engine = LocalEngine(settings(num_blocks=12, enable_prefix_caching=False), model)
    four = choices("job", 37, 20, n=4)
    intruder = request("intruder", 40, 20, arrival=9)

    def leave(step: int) -> None:
        if step == 2:
            assert engine.abort(four[0].id)
            engine.add(intruder)

    outcome = run(engine, four, each_step=leave)
    for one in [*four[1:], intruder]:
        assert outcome.said(one.id) == solo(one)


def test_preempted_choices_come_back_to_the_blocks_of_those_that_stayed() -> None:
    """B01 for choices. They differ by then, so only the prompt is shared again; what each said is computed anew."""
    model = HashModel()
    engine = LocalEngine(settings(num_blocks=10, admission_reserve=0.0, enable_prefix_caching=False), model)
    four = choices("job", 37, 40, n=4)
    outcome = run(engine, four)
    assert engine.snapshot().num_preemptions >= 2
    for one in four:
        assert outcome.said(one.id) == solo(one)
    back = [
        computed[sequence_id]
        for broken, sequence_id in model.preempted
        for step, computed in model.steps
        if step > broken and sequence_id in computed
    ]
    assert max(back) <= 40, "what came back computed its output again, but not its prompt"


def test_the_prompt_of_resumed_choices_is_computed_once_whatever_each_has_said() -> None:
    fresh = choices("job", 37, 30, n=4)
    said = [solo(one)[0][:done] for one, done in zip(fresh, (12, 0, 3, 29), strict=True)]
    four = choices("job", 37, 30, n=4, outputs=said)
    model = HashModel()
    engine = LocalEngine(settings(enable_prefix_caching=False), model)
    outcome = run(engine, four)
    assert [computed for _, computed in model.steps[:2]] == [
        {four[0].id: 49},
        {four[0].id: 1, four[1].id: 1, four[2].id: 3, four[3].id: 29},
    ]
    for one, before in zip(fresh, said, strict=True):
        assert (*before, *outcome.tokens[one.id]) == solo(one)[0]


def test_a_choice_waits_while_a_long_prompt_is_computed_and_others_take_free_seats_but_not_its_own() -> None:
    model = HashModel()
    limits = settings(max_num_seqs=3, max_num_batched_tokens=24, long_prefill_token_threshold=10)
    engine = LocalEngine(limits, model)
    two = choices("job", 35, 4, n=2, arrival=0)
    behind = [request(f"behind{n}", 2, 3, arrival=1 + n) for n in range(2)]
    outcome = run(engine, [*two, *behind])
    assert [computed for _, computed in model.steps[:5]] == [
        {two[0].id: 10, behind[0].id: 2},
        {two[0].id: 10, behind[0].id: 1},
        {two[0].id: 10, behind[0].id: 1},
        {two[0].id: 5, behind[1].id: 2},
        {two[0].id: 1, two[1].id: 1, behind[1].id: 1},
    ]
    for one in [*two, *behind]:
        assert outcome.said(one.id) == solo(one)


def test_a_static_batch_keeps_the_seats_of_choices_that_wait_for_their_prompt() -> None:
    model = HashModel()
    engine = LocalEngine(settings(max_num_seqs=3, policy="static"), model)
    three = choices("job", 20, 6, n=3)
    late = request("late", 2, 3, arrival=5)
    outcome = run(engine, [*three, late])
    assert [set(computed) for _, computed in model.steps[:2]] == [{three[0].id}, {one.id for one in three}]
    assert min(outcome.steps[late.id]) > max(outcome.steps[three[2].id])


def test_if_the_one_that_computes_the_prompt_leaves_the_next_choice_computes_it() -> None:
    model = HashModel()
    engine = LocalEngine(settings(max_num_batched_tokens=20, max_num_seqs=8, enable_prefix_caching=False), model)
    three = choices("job", 50, 4, n=3)
    outcome = run(engine, three, each_step=lambda step: engine.abort(three[0].id) if step == 1 else None)  # type: ignore[arg-type, return-value]
    assert [computed for _, computed in model.steps[:3]] == [{three[0].id: 20}, {three[1].id: 20}, {three[1].id: 20}]
    for one in three[1:]:
        assert outcome.said(one.id) == solo(one)


@pytest.mark.parametrize("breaks", [{2}, {2, 3}, {3, 4, 5}])
def test_a_copy_whose_step_broke_is_made_with_the_next_one(breaks: set[int]) -> None:
    """Also after its source has left: who computed the prompt is aborted between the two, and its blocks go."""
    model = HashModel(breaks=frozenset(breaks))
    engine = LocalEngine(settings(num_blocks=7, enable_prefix_caching=False, admission_reserve=0.0), model)
    two = choices("job", 37, 10, n=2)
    intruder = request("intruder", 30, 3, arrival=9)
    for one in two:
        engine.add(one)
    tokens: list[int] = []
    num_broken = 0
    while engine.has_work():
        try:
            for delta in engine.step():
                tokens += delta.token_ids if delta.id == two[1].id else ()
        except StepBroke:
            num_broken += 1
            if num_broken == 1:
                engine.abort(two[0].id)
                engine.add(intruder)
            engine.check()
    assert num_broken == len(breaks)
    assert tuple(tokens) == solo(two[1])[0]


def test_nobody_copies_from_a_copy_that_is_not_made_yet() -> None:
    """`second` waits for its copy of the last block; `third` forks from it. Then `second` leaves, copy unmade."""
    blocks = BlockManager(20, 4, enable_prefix_caching=False)
    first, second, third = (Sequence.of(one) for one in choices("job", 7, n=3, outputs=[[1], [2], [3]]))
    assert blocks.admit(first, reserve=0)
    first.num_computed_tokens = 7
    assert blocks.admit(second, reserve=0, fork=Fork(first, 7))
    assert blocks.admit(third, reserve=0, fork=Fork(second, 7))
    source = first.block_table[1]
    assert blocks.copies == [BlockCopy(source, one.block_table[1], 3) for one in (second, third)]
    blocks.release(second)
    assert blocks.copies == [BlockCopy(source, third.block_table[1], 3)]
    blocks.release(first)
    assert source not in [blocks._take() for _ in range(blocks.num_free)], "the copy holds its source"
    blocks.copied()
    assert blocks.num_free == 1


def test_a_fork_is_not_taken_where_the_cache_has_more() -> None:
    """A choice that was preempted late finds its own output in the cache as well."""
    blocks = BlockManager(20, 4)
    first, second = (Sequence.of(one) for one in choices("job", 6, n=2, outputs=[[1], range(20)]))
    for sequence in (first, second):
        assert blocks.admit(sequence, reserve=0)
        sequence.num_computed_tokens = len(sequence.token_ids) - 1
        blocks.enter(sequence)
    blocks.release(second)
    assert blocks.admit(second, reserve=0, fork=Fork(first, 6))
    assert (second.num_computed_tokens, blocks.copies) == (24, [])
    blocks.check([first, second])


def test_cached_tokens_are_those_of_the_prompt_and_what_a_sibling_computed_is_none() -> None:
    engine = LocalEngine(settings(), HashModel())
    prompt = range(40)
    for name, cached in (("a", 0), ("b", 32)):
        three = choices(name, prompt, 3, n=3)
        outcome = run(engine, three)
        assert [outcome.endings[one.id].num_cached_tokens for one in three] == [cached] * 3


@pytest.mark.parametrize("change", [{"prompt_ids": (1, 2)}, {"cache_salt": "other"}])
def test_a_group_of_sequences_with_different_prompts_is_refused(change: dict[str, object]) -> None:
    engine = LocalEngine(settings(), HashModel())
    first, second = choices("job", 5, n=2)
    engine.add(first)
    with pytest.raises(ValueError, match="another prompt or salt"):
        engine.add(dataclasses.replace(second, **change))  # type: ignore[arg-type]
    engine.check()
    assert run(engine).said(first.id) == solo(first)


@pytest.mark.parametrize(
    ("damage", "law"),
    [
        (lambda b, s: b._copies.clear(), "ref counts"),
        (lambda b, s: s.block_table.pop(), "copy elsewhere"),
        (lambda b, s: b._copies.update(x=b._copies[s.id]), "for nobody"),
    ],
)
def test_the_self_check_notices_a_lost_copy(damage: object, law: str) -> None:
    blocks = BlockManager(8, 4)
    first, second = (Sequence.of(one) for one in choices("job", 6, n=2))
    assert blocks.admit(first, reserve=0)
    first.num_computed_tokens = 6
    assert blocks.admit(second, reserve=0, fork=Fork(first, 5))
    blocks.check([first, second])
    damage(blocks, second)  # type: ignore[operator]
    with pytest.raises(AssertionError, match=law):
        blocks.check([first, second])
