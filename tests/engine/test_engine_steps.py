"""The step loop: who joins when, how the budget is shared out, what the counters say."""

from __future__ import annotations

import pytest
from scripted_model import EOS, HashModel, Outcome, request, run, run_alone, settings, solo

from jitney.errors import SettingsError
from jitney_worker.engine.engine import LocalEngine
from jitney_worker.engine.protocol import ModelOutput, ModelRunner, SchedulerOutput, Seat
from jitney_worker.engine.sequence import Sequence, SequenceId
from jitney_worker.engine.waiting import WaitingQueue


def test_a_newcomer_joins_in_the_first_step_after_a_seat_frees_and_nobody_else_misses_one() -> None:
    engine = LocalEngine(settings(max_num_seqs=4), HashModel())
    seated = [request(f"s{n}", 1, tokens, arrival=n) for n, tokens in enumerate((100, 20, 50, 200))]
    late = request("late", 1, 30, arrival=4)

    def join_late(step: int) -> None:
        if step == 5:
            engine.add(late)
            assert engine.capacity().free_seats == 0

    outcome = run(engine, seated, each_step=join_late)
    assert outcome.steps[late.id] == list(range(21, 51))
    assert outcome.endings[late.id].joined_step == 21
    for one in seated:
        assert outcome.steps[one.id] == list(range(1, one.params.max_tokens + 1))


def test_a_sequence_added_between_steps_computes_in_the_very_next_one() -> None:
    engine = LocalEngine(settings(), HashModel())
    outcome = run(
        engine,
        [request("first", 5, 30)],
        each_step=lambda step: engine.add(request("second", 5, 3)) if step == 10 else None,
    )
    assert outcome.steps[SequenceId("second")] == [11, 12, 13]


@pytest.mark.parametrize("threshold", [0, 7])
@pytest.mark.parametrize("budget", [1, 5, 16, 23])
def test_a_prompt_computed_in_chunks_goes_on_as_if_computed_whole(budget: int, threshold: int) -> None:
    model = HashModel()
    one = request("one", 100, 20)
    engine = LocalEngine(
        settings(max_num_seqs=1, max_num_batched_tokens=budget, long_prefill_token_threshold=threshold), model
    )
    chunk = min(budget, threshold or budget)
    assert run(engine, [one]).said("one") == run_alone(one)
    assert [computed[one.id] for _, computed in model.steps[: -(-100 // chunk)]] == [
        min(chunk, 100 - done) for done in range(0, 100, chunk)
    ]


def test_a_long_prompt_leaves_every_sequence_behind_it_a_token_in_each_step() -> None:
    """`long` stands first in order and could eat the whole budget; those behind it would fall silent meanwhile."""
    model = HashModel()
    engine = LocalEngine(settings(max_num_seqs=8, max_num_batched_tokens=20), model)
    talking = [request(f"s{n}", 2, 40, arrival=10 + n) for n in range(5)]
    long = request("long", 150, 4, arrival=0)
    outcome = run(engine, talking, each_step=lambda step: engine.add(long) if step == 3 else None)
    for one in talking:
        assert outcome.steps[one.id] == list(range(1, 41))
    assert [computed[long.id] for _, computed in model.steps[3:13]] == [15] * 10
    assert outcome.steps[long.id][0] == 13


def test_running_sequences_are_served_in_the_order_of_their_keys() -> None:
    class Order(HashModel):
        def execute(self, scheduled: SchedulerOutput) -> ModelOutput:
            orders.append([str(item.sequence.id) for item in scheduled.scheduled])
            return super().execute(scheduled)

    orders: list[list[str]] = []
    engine = LocalEngine(settings(), Order())
    run(
        engine,
        [
            request("b", 1, 3, virtual_time=1.0, arrival=2),
            request("c", 1, 3, virtual_time=2.0, arrival=1),
            request("a", 1, 3, virtual_time=0.5, arrival=3),
            request("b2", 1, 3, virtual_time=1.0, arrival=2),
        ],
    )
    assert orders == [["a", "b", "b2", "c"]] * 3


def test_more_waiting_sequences_than_seats_join_in_the_order_of_their_keys() -> None:
    engine = LocalEngine(settings(max_num_seqs=1), HashModel())
    outcome = run(engine, [request(f"s{n}", 1, 2, arrival=-n) for n in range(5)])
    assert sorted(outcome.endings, key=lambda name: outcome.steps[name][0]) == ["s4", "s3", "s2", "s1", "s0"]


@pytest.mark.parametrize("neighbours", [1, 7, 31])
@pytest.mark.parametrize("comes", ["before", "after"])
def test_what_a_sequence_says_does_not_depend_on_its_neighbours(neighbours: int, comes: str) -> None:
    """B16"""
    one = request("one", 37, 40, arrival=0 if comes == "before" else 99)
    others = [request(f"n{n}", 3 + 5 * n, 10 + n, arrival=1 + n) for n in range(neighbours)]
    engine = LocalEngine(settings(num_blocks=90, max_num_batched_tokens=64), HashModel())
    outcome = run(engine, [one, *others] if comes == "before" else [*others, one])
    assert outcome.said("one") == run_alone(one)


def test_capacity_counts_what_running_and_waiting_sequences_leave_over() -> None:
    engine = LocalEngine(settings(max_num_seqs=3, num_blocks=10), HashModel())
    assert engine.capacity().free_seats == 3
    engine.add(request("a", 17, 2, arrival=0))
    assert (engine.capacity().free_seats, engine.capacity().num_waiting) == (2, 1)
    engine.step()
    capacity = engine.capacity()
    assert (capacity.free_seats, capacity.num_running, capacity.num_waiting) == (2, 1, 0)
    assert (capacity.num_free_blocks, capacity.num_blocks) == (8, 10)
    for n in range(5):
        engine.add(request(f"b{n}", 1, 2, arrival=1 + n))
    assert engine.capacity().free_seats == 0


def test_a_snapshot_shows_the_batch_in_its_order_with_all_counts() -> None:
    engine = LocalEngine(settings(max_num_seqs=2), HashModel())
    for n in range(3):
        engine.add(request(f"s{n}", 3 + n, 9, arrival=-n))
    engine.step()
    engine.step()
    snapshot = engine.snapshot()
    assert snapshot.step == 2
    assert snapshot.seats == (Seat(SequenceId("s2"), 1, 5, 6, 2, 9), Seat(SequenceId("s1"), 1, 4, 5, 2, 9))
    assert (snapshot.num_generated_tokens, snapshot.num_computed_tokens) == (4, 11)
    assert (snapshot.capacity.num_running, snapshot.capacity.num_waiting) == (2, 1)
    assert snapshot.num_preemptions == 0


def test_an_idle_step_does_nothing_and_is_not_counted() -> None:
    engine = LocalEngine(settings(), HashModel())
    assert engine.step() == []
    assert not engine.has_work()
    assert engine.snapshot().step == 0


class Counted(float):
    """A virtual time that counts how often it is compared."""

    comparisons = 0

    def __eq__(self, other: object) -> bool:
        Counted.comparisons += 1
        return float.__eq__(self, other)

    def __lt__(self, other: float) -> bool:
        Counted.comparisons += 1
        return float.__lt__(self, other)

    __hash__ = float.__hash__


def test_a_step_with_every_seat_taken_does_not_look_at_ten_thousand_waiting_sequences() -> None:
    engine = LocalEngine(settings(max_num_seqs=8, check=False), HashModel())
    for n in range(10_008):
        engine.add(request(f"s{n}", 1, 5, virtual_time=Counted(n * 7919 % 10_007), arrival=n))
    engine.step()
    Counted.comparisons = 0
    engine.step()
    assert Counted.comparisons == 0
    assert engine.abort(SequenceId("s0"))
    engine.step()
    assert 0 < Counted.comparisons < 200, "one seat changes hands: a logarithm of what waits, not all of it"


def test_ten_thousand_aborted_waiting_sequences_leave_nothing_behind() -> None:
    engine = LocalEngine(settings(max_num_seqs=1, check=False), HashModel())
    for n in range(10_000):
        engine.add(request(f"s{n}", 1, 2, arrival=n))
    for n in range(1, 9_999):
        assert engine.abort(SequenceId(f"s{n}"))
    assert engine.capacity().num_waiting == 2
    engine.check()
    outcome = run(engine)
    assert list(outcome.endings) == ["s0", "s9999"]


def test_an_aborted_sequence_that_comes_again_waits_by_its_new_key() -> None:
    """The old entry is still in the heap, ahead of all others; whoever took it for the new one would jump the queue."""
    engine = LocalEngine(settings(max_num_seqs=1), HashModel())
    engine.add(request("running", 1, 5, arrival=0))
    engine.step()
    engine.add(request("back", 4, 2, arrival=1))
    engine.add(request("other", 4, 2, arrival=2))
    assert engine.abort(SequenceId("back"))
    engine.add(request("back", 6, 3, arrival=3))
    outcome = run(engine)
    assert list(outcome.endings) == ["running", "other", "back"]
    assert outcome.said("back") == solo(request("back", 6, 3))


def test_the_heap_of_waiting_sequences_sheds_removed_ones() -> None:
    queue = WaitingQueue()
    for n in range(10_000):
        sequence = Sequence.of(request(f"s{n}", 1, arrival=n))
        queue.push(sequence)
        if n >= 10:
            assert queue.remove(sequence.id) is sequence
    assert len(queue) == 10
    assert len(queue._heap) <= 84
    assert [queue.pop().id for _ in range(10)] == [f"s{n}" for n in range(10)]
    with pytest.raises(IndexError):
        queue.pop()


def test_a_forward_pass_that_raises_loses_nothing_and_can_be_tried_again() -> None:
    class Flaky(HashModel):
        def execute(self, scheduled: SchedulerOutput) -> ModelOutput:
            if scheduled.step in (1, 4, 9) and scheduled.step not in raised:
                raised.append(scheduled.step)
                super().execute(scheduled)
                raise RuntimeError("out of memory")
            return super().execute(scheduled)

    raised: list[int] = []
    requests = [request(f"s{n}", 40 + n, 30, arrival=n) for n in range(4)]
    engine = LocalEngine(settings(num_blocks=14, max_num_batched_tokens=64), Flaky())
    outcome = Outcome()
    for one in requests:
        engine.add(one)
    while engine.has_work():
        try:
            outcome.take(engine.step())
        except RuntimeError:
            engine.check()
    assert raised == [1, 4, 9]
    assert [outcome.said(one.id) for one in requests] == [solo(one) for one in requests]
    assert engine.capacity().num_free_blocks == 14


def test_a_runner_that_returns_too_few_rows_is_told_so_before_anything_is_committed() -> None:
    class Deaf:
        def execute(self, scheduled: SchedulerOutput) -> ModelOutput:
            return ModelOutput([])

    runner: ModelRunner = Deaf()
    engine = LocalEngine(settings(), runner)
    engine.add(request("one", 3, 2))
    with pytest.raises(AssertionError, match="1 rows were to be sampled, the runner gave 0"):
        engine.step()
    assert engine.snapshot().step == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs=0 must be a whole number of at least 1"),
        ({"num_blocks": 0}, "num_blocks=0 must be a whole number of at least 1"),
        ({"block_size": -4}, "block_size=-4 must be a whole number of at least 1"),
        ({"block_size": 1.5}, "block_size=1.5 must be a whole number of at least 1"),
        ({"max_model_len": 1}, "max_model_len=1 must be a whole number of at least 2"),
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold=-1 must be a whole number of at least 0"),
        ({"admission_reserve": 1.0}, "admission_reserve=1.0 must be at least 0 and below 1"),
        ({"admission_reserve": float("nan")}, "admission_reserve=nan must be at least 0 and below 1"),
        ({"policy": "dynamic"}, "policy='dynamic' must be one of continuous, static"),
        (
            {"max_num_batched_tokens": 32},
            "max_num_batched_tokens=32 must be at least max_num_seqs=64, "
            "so that every running sequence gains a token in every step",
        ),
    ],
)
def test_settings_that_contradict_are_refused_by_name_and_value(options: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError) as refused:
        settings(**options)
    assert str(refused.value) == message


def test_features_name_the_limits_that_a_worker_announces() -> None:
    features = LocalEngine(settings(max_model_len=256, num_blocks=8, policy="static"), HashModel()).features
    assert features["max_sequence_tokens"] == 129
    assert (features["max_model_len"], features["num_blocks"], features["policy"]) == (256, 8, "static")
    assert LocalEngine(settings(max_model_len=256), HashModel()).features["max_sequence_tokens"] == 256


def test_the_scripted_model_says_the_end_token_now_and_then() -> None:
    """Otherwise the tests above would never see a sequence end before its limit."""
    ends = [solo(request(f"s{n}", 5, 200, stop_ids=[EOS]))[1] for n in range(50)]
    assert set(ends) == {"stop", "length"}
