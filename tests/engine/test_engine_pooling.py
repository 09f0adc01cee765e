"""Sequences that are pooled: each of their tokens goes in once, whatever happens to the prompt on the way."""

from __future__ import annotations

import pytest
from scripted_model import FAILURE, HashModel, StepBroke, pooled, request, run, settings, solo

from jitney_worker.engine.engine import LocalEngine
from jitney_worker.engine.protocol import SequenceDelta
from jitney_worker.engine.sequence import Pooling, SequenceId

BOTH: list[Pooling] = ["last", "mean"]


def ending(engine: LocalEngine, name: str) -> list[SequenceDelta]:
    """Step to the end; everything that was said of one sequence."""
    said = []
    while engine.has_work():
        said += [delta for delta in engine.step() if delta.id == name]
    return said


@pytest.mark.parametrize("pooling", BOTH)
@pytest.mark.parametrize("budget", [4, 7, 64])
@pytest.mark.parametrize("length", [1, 2, 16, 40])
def test_an_embedding_is_the_one_thing_that_its_sequence_gives(pooling: Pooling, length: int, budget: int) -> None:
    one = request("one", length, 1, pooling=pooling)
    engine = LocalEngine(settings(max_num_batched_tokens=budget, max_num_seqs=1), HashModel())
    engine.add(one)
    (delta,) = ending(engine, "one")
    assert (delta.embedding, delta.finish_reason, delta.token_ids) == (pooled(one), "stop", ())
    assert engine.snapshot().num_generated_tokens == 0
    assert engine.capacity().num_free_blocks == engine.capacity().num_blocks


@pytest.mark.parametrize("pooling", BOTH)
def test_answers_beside_it_are_what_they_are_alone(pooling: Pooling) -> None:
    answers = [request(f"answer{n}", 5 + n, 20, arrival=n) for n in range(3)]
    one = request("one", 60, 1, arrival=1, pooling=pooling)
    engine = LocalEngine(settings(max_num_batched_tokens=12, max_num_seqs=4), HashModel())
    outcome = run(engine, [answers[0], one, *answers[1:]])
    assert [outcome.said(str(answer.id)) for answer in answers] == [solo(answer) for answer in answers]
    assert outcome.endings[one.id].embedding == pooled(one)


def test_a_mean_takes_nothing_from_the_prefix_cache_and_the_last_token_does() -> None:
    """Cached blocks hold keys and values, not the hidden states of their tokens."""
    model = HashModel()
    engine = LocalEngine(settings(), model)
    run(engine, [request("before", range(40), 3)])
    mean, last = (request(pooling, range(40), 1, pooling=pooling) for pooling in ("mean", "last"))
    for one, num_cached in ((mean, 0), (last, 32)):
        delta = run(engine, [one]).endings[one.id]
        assert (delta.embedding, delta.num_cached_tokens) == (pooled(one), num_cached)
    after = request("after", range(40), 3)
    assert run(engine, [after]).endings[after.id].num_cached_tokens == 32


@pytest.mark.parametrize("pooling", BOTH)
def test_one_preempted_half_way_begins_anew_and_counts_no_token_twice(pooling: Pooling) -> None:
    model = HashModel()
    limits = settings(num_blocks=6, max_num_batched_tokens=4, max_num_seqs=4, admission_reserve=0.0)
    engine = LocalEngine(limits, model)
    first = request("first", 16, 40, arrival=0)
    one = request("one", 64, 1, arrival=5, pooling=pooling)
    outcome = run(engine, [first, one])
    preempted_at = next(step for step, sequence_id in model.preempted if sequence_id == one.id)
    assert 0 < sum(computed.get(one.id, 0) for step, computed in model.steps if step < preempted_at) < 64
    assert outcome.endings[one.id].embedding == pooled(one)
    assert outcome.said("first") == solo(first)


@pytest.mark.parametrize("broken", [1, 2, 3, 4])
def test_a_step_that_raises_is_counted_once_when_it_is_stepped_again(broken: int) -> None:
    one = request("one", 30, 1, pooling="mean")
    engine = LocalEngine(settings(max_num_batched_tokens=8, max_num_seqs=1), HashModel(breaks=frozenset({broken})))
    engine.add(one)
    raised, said = 0, list[SequenceDelta]()
    while engine.has_work():
        try:
            said += engine.step()
        except StepBroke:
            raised += 1
    assert raised == 1
    assert [delta.embedding for delta in said] == [pooled(one)]


def test_one_that_fails_fails_alone() -> None:
    bad, good = (request(name, 20, 1, pooling="mean") for name in ("bad", "good"))
    engine = LocalEngine(settings(), HashModel(fails_at={bad.id: 0}))
    endings = run(engine, [bad, good]).endings
    assert (endings[bad.id].error, endings[bad.id].embedding) == (FAILURE, None)
    assert endings[good.id].embedding == pooled(good)


def test_one_aborted_half_way_leaves_nothing_and_may_come_again() -> None:
    one = request("one", 40, 1, pooling="mean")
    engine = LocalEngine(settings(max_num_batched_tokens=8, max_num_seqs=1), HashModel())
    engine.add(one)
    assert engine.step() == []
    assert engine.abort(SequenceId("one"))
    engine.check()
    assert engine._scheduler._pooled == {}
    assert engine.capacity().num_free_blocks == engine.capacity().num_blocks
    assert run(engine, [one]).endings[one.id].embedding == pooled(one)
