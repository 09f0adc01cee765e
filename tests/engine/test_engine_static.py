"""The static policy: same engine, same memory, but seats are filled only when all are empty."""

from __future__ import annotations

from scripted_model import HashModel, request, run, settings, solo

from jitney_worker.engine.engine import LocalEngine
from jitney_worker.engine.sequence import SequenceId


def test_a_batch_ends_with_its_slowest_and_only_then_the_next_one_begins() -> None:
    model = HashModel()
    engine = LocalEngine(settings(max_num_seqs=4, policy="static"), model)
    lengths = {"A": 100, "B": 20, "C": 50, "D": 200, "E": 30}
    requests = [request(name, 1, tokens, arrival=n) for n, (name, tokens) in enumerate(lengths.items())]
    outcome = run(engine, requests)
    assert {name: outcome.steps[SequenceId(name)][-1] for name in lengths} == {
        "A": 100,
        "B": 20,
        "C": 50,
        "D": 200,
        "E": 230,
    }
    assert outcome.steps[SequenceId("E")][0] == 201


def test_an_ended_sequence_holds_its_seat_but_neither_computes_nor_keeps_blocks() -> None:
    model = HashModel()
    engine = LocalEngine(settings(max_num_seqs=2, policy="static", num_blocks=10), model)
    long, short = request("long", 1, 10, arrival=0), request("short", 1, 2, arrival=1)
    engine.add(long)
    engine.add(short)
    for _ in range(3):
        engine.step()
    assert model.steps[2][1] == {long.id: 1}
    assert engine.capacity().free_seats == 0
    assert engine.capacity().num_free_blocks == 9
    run(engine)
    assert engine.capacity().free_seats == 2


def test_a_batch_may_fill_over_several_steps_if_only_the_budget_is_short() -> None:
    model = HashModel()
    engine = LocalEngine(settings(max_num_seqs=4, max_num_batched_tokens=35, policy="static"), model)
    outcome = run(engine, [request(f"s{n}", 30, 6, arrival=n) for n in range(6)])
    assert [outcome.endings[SequenceId(f"s{n}")].joined_step for n in range(6)] == [1, 1, 2, 3, 10, 10]


def test_a_newcomer_does_not_slip_into_a_batch_that_has_begun_with_seats_to_spare() -> None:
    engine = LocalEngine(settings(max_num_seqs=4, policy="static"), HashModel())
    late = request("late", 1, 3, arrival=1)
    outcome = run(
        engine,
        [request("only", 1, 10, arrival=0)],
        each_step=lambda step: engine.add(late) if step == 4 else None,
    )
    assert outcome.steps[late.id] == [11, 12, 13]


def test_a_preempted_member_returns_to_its_seat_before_the_batch_ends() -> None:
    model = HashModel()
    engine = LocalEngine(settings(max_num_seqs=3, num_blocks=6, admission_reserve=0.0, policy="static"), model)
    requests = [request(f"s{n}", 30, tokens, arrival=n) for n, tokens in enumerate((40, 8, 30))]
    outsider = request("outsider", 1, 2, arrival=9)
    outcome = run(engine, [*requests, outsider])
    assert model.preempted[0][1] == "s2"
    back = next(step for step in outcome.steps[SequenceId("s2")] if step > model.preempted[0][0])
    assert back < outcome.steps[SequenceId("s0")][-1]
    assert outcome.steps[outsider.id][0] > outcome.steps[SequenceId("s2")][-1]
    for one in requests:
        assert outcome.said(one.id) == solo(one)


def test_aborting_the_whole_batch_opens_the_next_one_at_once() -> None:
    engine = LocalEngine(settings(max_num_seqs=2, policy="static"), HashModel())
    for n in range(2):
        engine.add(request(f"s{n}", 1, 50, arrival=n))
    engine.step()
    next_one = request("next", 1, 2, arrival=2)
    engine.add(next_one)
    assert engine.step()[0].id == "s0"
    for n in range(2):
        engine.abort(SequenceId(f"s{n}"))
    assert [delta.id for delta in engine.step()] == [next_one.id]
