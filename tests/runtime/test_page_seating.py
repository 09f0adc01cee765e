"""Which seat is whose, on the page: played from what the engine says has moved."""

from __future__ import annotations

import random

from tests.engine.scripted_model import HashModel

from jitney.workers import Move
from jitney_worker.engine.engine import LocalEngine
from jitney_worker.engine.movements import NUM_KEPT, Movements
from jitney_worker.engine.sequence import SequenceId, SequenceParams, SequenceRequest
from jitney_worker.engine.settings import EngineSettings
from jitney_worker.runtime.seating import Seating

SEATS = 3


def engine_of(num_blocks: int) -> LocalEngine:
    options = {"max_model_len": 64, "block_size": 4, "max_num_batched_tokens": 64, "check": True}
    return LocalEngine(EngineSettings(max_num_seqs=SEATS, num_blocks=num_blocks, **options), HashModel())  # type: ignore[arg-type]


def request(number: int, length: int) -> SequenceRequest:
    prompt, params = (number, 1, 2, 3), SequenceParams(max_tokens=length)
    return SequenceRequest(SequenceId(f"q.job{number}/0/fence"), prompt, params, (0, 0.0, 0, number))


def test_the_page_has_everybody_in_a_seat_of_their_own_and_every_preemption() -> None:
    """A small cache, so that many are preempted; and looks at random times, so that much happens between two."""
    chance = random.Random(5)
    engine, seating = engine_of(num_blocks=9), Seating()
    moves: list[Move] = []
    for number in range(24):
        engine.add(request(number, chance.randint(2, 18)))
    while engine.has_work():
        for _ in range(chance.randint(1, 4)):
            engine.step()
        before = len(seating.moves)
        seating.moves.clear()
        assert before <= 64
        snapshot = engine.snapshot()
        seating.see(snapshot, 1.0)
        moves += seating.moves
        numbers = [seating.number(seat.id) for seat in snapshot.seats]
        assert len(set(numbers)) == len(numbers)
        assert set(numbers) <= set(range(1, SEATS + 1))
    taken: dict[int, str] = {}
    for move in moves:
        if move.kind == "joined":
            assert move.seat not in taken
            assert move.seat == min(set(range(1, SEATS + 1)) - taken.keys())
            taken[move.seat] = move.job
        else:
            assert taken.pop(move.seat) == move.job
    assert not taken
    kinds = [move.kind for move in moves]
    assert kinds.count("preempted") == engine.snapshot().num_preemptions > 0
    assert kinds.count("left") == 24


def test_the_page_is_true_again_after_more_moves_than_the_engine_keeps() -> None:
    engine, seating = engine_of(num_blocks=64), Seating()
    for number in range(NUM_KEPT):
        engine.add(request(number, 1))
    while engine.has_work():
        engine.step()
    engine.add(request(1_000, 9))
    engine.step()
    snapshot = engine.snapshot()
    assert len(snapshot.movements) == NUM_KEPT
    seating.see(snapshot, 1.0)
    assert [seating.number(seat.id) for seat in snapshot.seats] == [1]
    engine.abort(snapshot.seats[0].id)
    seating.see(engine.snapshot(), 2.0)
    assert [(move.kind, move.seat) for move in seating.moves][-2:] == [("joined", 1), ("left", 1)]


def test_movements_are_told_once_each_and_the_youngest_of_too_many() -> None:
    movements = Movements()
    for step in range(NUM_KEPT + 3):
        movements.note(step, "joined", SequenceId("a"))
    assert [one.step for one in movements.since(NUM_KEPT + 1)] == [NUM_KEPT + 1, NUM_KEPT + 2]
    assert len(movements.since(0)) == NUM_KEPT
    assert movements.since(movements.num_noted) == ()


def test_the_page_has_a_letter_for_each_block_and_counts_that_agree() -> None:
    engine = engine_of(num_blocks=16)
    for number in range(2):
        engine.add(
            SequenceRequest(
                SequenceId(f"q.j{number}/0/f"), tuple(range(9)), SequenceParams(max_tokens=4), (0, 0.0, 0, number)
            )
        )
    while engine.has_work():
        engine.step()
        snapshot = engine.snapshot()
        cache, capacity = snapshot.cache, snapshot.capacity
        assert len(cache.sample) == 16
        assert cache.sample.count("s") == cache.num_shared
        assert cache.sample.count("c") == cache.num_cached
        assert cache.sample.count("f") == capacity.num_free_blocks - cache.num_cached
    assert snapshot.cache.num_cached > 0
