"""What the engine tells of its steps, against what the model itself saw of them."""

from __future__ import annotations

from collections import defaultdict

import pytest
from scripted_model import HashModel, StepBroke, request, run, settings

from jitney_worker.engine.engine import LocalEngine
from jitney_worker.engine.sequence import BULK, SequenceId
from jitney_worker.engine.settings import EngineSettings
from jitney_worker.engine.witness import Came, Dropped, Step


class Told:
    """Everything an engine has told."""

    def __init__(self, options: EngineSettings, model: HashModel | None = None) -> None:
        self.entries: list[Came | Dropped | Step] = []
        self.model = model or HashModel()
        self.engine = LocalEngine(options, self.model, record=self.entries.append)

    @property
    def steps(self) -> list[Step]:
        return [entry for entry in self.entries if isinstance(entry, Step)]

    @property
    def numbers(self) -> dict[int, str]:
        return {entry.number: entry.id for entry in self.entries if isinstance(entry, Came)}


@pytest.mark.parametrize("policy", ["continuous", "static"])
@pytest.mark.parametrize("caching", [True, False])
def test_the_record_of_a_crowded_run_is_what_the_model_saw(policy: str, caching: bool) -> None:
    options = settings(
        num_blocks=12,
        max_num_seqs=4,
        max_num_batched_tokens=40,
        long_prefill_token_threshold=16,
        policy=policy,
        enable_prefix_caching=caching,
    )
    told = Told(options)
    requests = [request(f"s{n}", 20 + 3 * n, 30 + 7 * n, arrival=n) for n in range(9)]
    outcome = run(told.engine, requests)
    steps, name = told.steps, told.numbers
    assert told.engine.snapshot().num_preemptions > 0
    assert [(step.step, {name[row.number]: row.stop - row.start for row in step.rows}) for step in steps] == [
        (number, {str(one): num for one, num in computed.items()}) for number, computed in told.model.steps
    ]
    assert [(step.step, name[one.number]) for step in steps for one in step.preempted] == told.model.preempted
    assert {
        name[left.number]: (step.step, left.reason, left.num_output_tokens) for step in steps for left in step.left
    } == {
        one.id: (outcome.endings[one.id].step, outcome.endings[one.id].finish_reason, len(outcome.tokens[one.id]))
        for one in requests
    }
    first_joins = {name[one.number]: step.step for step in steps for one in step.joined if not one.again}
    assert first_joins == {one.id: outcome.endings[one.id].joined_step for one in requests}


@pytest.mark.parametrize("policy", ["continuous", "static"])
def test_in_the_record_nobody_sits_in_a_taken_seat_and_every_move_is_told_once(policy: str) -> None:
    told = Told(settings(num_blocks=12, max_num_seqs=4, policy=policy))
    run(told.engine, [request(f"s{n}", 20, 20 + 11 * n, arrival=n) for n in range(8)])
    seats: dict[int, int] = {}
    num_again = 0
    for step in told.steps:
        for one in step.preempted:
            assert seats.pop(one.seat) == one.number
        for joined in step.joined:
            assert joined.seat not in seats
            seats[joined.seat] = joined.number
            num_again += joined.again
        assert {row.seat: row.number for row in step.rows} == seats
        for left in step.left:
            assert seats.pop(left.seat) == left.number
    assert seats == {}
    assert num_again == sum(len(step.preempted) for step in told.steps) > 0


def test_the_record_says_what_a_preemption_costs() -> None:
    """As in the engine's own test: with 3 prompt tokens and 200 of output, all of it is computed again."""
    told = Told(settings(num_blocks=26, admission_reserve=0.0, enable_prefix_caching=False))
    run(told.engine, [request("first", 9, 205, arrival=0), request("second", 3, 220, arrival=1)])
    (victim,) = [one for step in told.steps for one in step.preempted]
    assert (victim.num_computed_tokens, victim.num_blocks, victim.seat) == (202, 13, 1)
    (back,) = [step for step in told.steps if any(one.again for one in step.joined)]
    (row,) = back.rows
    assert (row.start, row.stop, row.recomputed, row.gained) == (0, 203, 202, 1)
    assert (back.num_prefill_tokens, back.num_decode_tokens, back.num_recomputed_tokens) == (203, 0, 202)
    assert sum(step.num_recomputed_tokens for step in told.steps) == 202


def test_the_record_splits_the_budget_and_the_blocks_of_every_step() -> None:
    told = Told(settings(num_blocks=40, max_num_seqs=4, max_num_batched_tokens=20))
    told.engine.add(request("short", 3, 30))
    told.engine.step()
    told.engine.add(request("long", 50, 4))
    for _ in range(4):
        told.engine.step()
    split = [(step.num_prefill_tokens, step.num_decode_tokens) for step in told.steps]
    assert split == [(3, 0), (19, 1), (19, 1), (12, 1), (0, 2)]
    assert [len(step.rows) for step in told.steps] == [1, 2, 2, 2, 2]
    for step in told.steps:
        assert step.num_used_blocks + step.num_cached_blocks + step.num_free_blocks == 40
    assert [step.num_used_blocks for step in told.steps] == [1, 5, 5, 5, 5]


def test_the_last_token_of_a_prompt_is_prefill_in_the_record_though_it_comes_alone() -> None:
    told = Told(settings(max_num_seqs=4, max_num_batched_tokens=16))
    run(told.engine, [request("s", 17, 3)])
    split = [(step.num_prefill_tokens, step.num_decode_tokens) for step in told.steps]
    assert split == [(16, 0), (1, 0), (0, 1), (0, 1)]


def test_a_lost_token_that_is_computed_alone_is_prefill_in_the_record() -> None:
    options = settings(num_blocks=4, max_num_seqs=2, long_prefill_token_threshold=1, enable_prefix_caching=False)
    told = Told(options)
    run(told.engine, [request("first", 16, 40, arrival=0), request("second", 16, 40, arrival=1)])
    num_lost = sum(one.num_computed_tokens for step in told.steps for one in step.preempted)
    assert num_lost > 16
    assert sum(step.num_recomputed_tokens for step in told.steps) == num_lost
    assert sum(step.num_prefill_tokens for step in told.steps) == 16 + 16 + num_lost
    assert sum(step.num_decode_tokens for step in told.steps) == 39 + 39


def test_free_blocks_with_content_are_told_apart_in_the_record() -> None:
    told = Told(settings(num_blocks=10))
    run(told.engine, [request("one", 33, 2)])
    run(told.engine, [request("two", 3, 2)])
    step = told.steps[-1]
    assert (step.num_used_blocks, step.num_cached_blocks, step.num_free_blocks) == (1, 2, 7)


def test_cached_tokens_are_in_the_record_of_who_joins() -> None:
    told = Told(settings())
    for name in ("one", "two"):
        run(told.engine, [request(name, range(40), 2)])
    joins = [one for step in told.steps for one in step.joined]
    assert [(one.seat, one.num_cached_tokens) for one in joins] == [(0, 0), (0, 32)]
    assert told.steps[-1].num_cached_blocks == 0
    assert told.steps[-1].num_used_blocks == 3


def test_whoever_is_taken_out_from_outside_is_in_the_record_with_the_seat_that_is_free_again() -> None:
    told = Told(settings(max_num_seqs=2))
    for n in range(4):
        told.engine.add(request(f"s{n}", 4, 20, arrival=n))
    told.engine.step()
    told.engine.abort(SequenceId("s0"))
    told.engine.abort(SequenceId("s2"))
    told.engine.abort(SequenceId("nobody"))
    told.engine.step()
    drops = [(told.numbers[entry.number], entry.seat) for entry in told.entries if isinstance(entry, Dropped)]
    assert drops == [("s0", 0), ("s2", None)]
    (joined,) = told.steps[-1].joined
    assert (told.numbers[joined.number], joined.seat) == ("s3", 0)


def test_an_ended_sequence_of_a_static_batch_keeps_its_seat_in_the_record() -> None:
    told = Told(settings(max_num_seqs=2, policy="static"))
    requests = [request("short", 1, 2, arrival=0), request("long", 1, 5, arrival=1), request("next", 1, 2, arrival=2)]
    run(told.engine, requests)
    seats: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for step in told.steps:
        for row in step.rows:
            seats[told.numbers[row.number]].append((step.step, row.seat))
    assert seats["short"] == [(1, 0), (2, 0)]
    assert [seat for _, seat in seats["long"]] == [1] * 5
    assert seats["next"] == [(6, 0), (7, 0)]


def test_a_preempted_member_of_a_static_batch_returns_to_its_own_seat_in_the_record() -> None:
    told = Told(settings(num_blocks=8, max_num_seqs=3, policy="static", admission_reserve=0.0))
    run(told.engine, [request(f"s{n}", 20, 40, arrival=n) for n in range(3)])
    left = {one.number: one.seat for step in told.steps for one in step.preempted}
    back = {one.number: one.seat for step in told.steps for one in step.joined if one.again}
    assert left == back != {}


def test_a_step_that_raised_is_not_in_the_record_and_what_it_decided_is_in_the_next_one() -> None:
    told = Told(settings(num_blocks=4, max_num_seqs=2, admission_reserve=0.0), HashModel(breaks=frozenset({18})))
    for n in range(2):
        told.engine.add(request(f"s{n}", 16, 30, arrival=n))
    for _ in range(17):
        told.engine.step()
    with pytest.raises(StepBroke):
        told.engine.step()
    assert told.engine.snapshot().num_preemptions == 1
    told.engine.step()
    assert [step.step for step in told.steps] == list(range(1, 19))
    (victim,) = told.steps[-1].preempted
    assert (told.numbers[victim.number], victim.num_computed_tokens) == ("s1", 32)


def test_a_seat_that_bulk_gives_up_is_taken_in_the_same_step_of_the_record() -> None:
    told = Told(settings(max_num_seqs=2))
    for n in range(2):
        told.engine.add(request(f"bulk{n}", 4, 20, arrival=n, band=BULK))
    told.engine.step()
    told.engine.add(request("living", 4, 2, arrival=9))
    told.engine.step()
    step = told.steps[-1]
    assert [(told.numbers[one.number], one.seat) for one in step.preempted] == [("bulk1", 1)]
    assert [(told.numbers[one.number], one.seat) for one in step.joined] == [("living", 1)]


def test_the_record_counts_what_an_earlier_attempt_said_as_prefill() -> None:
    told = Told(settings())
    told.engine.add(request("s", 4, 20, output=range(1, 6)))
    told.engine.step()
    (came,) = [entry for entry in told.entries if isinstance(entry, Came)]
    assert (came.num_prompt_tokens, came.num_output_tokens, came.max_tokens) == (4, 5, 20)
    (step,) = told.steps
    assert (step.num_prefill_tokens, step.num_decode_tokens, step.num_recomputed_tokens) == (9, 0, 0)
