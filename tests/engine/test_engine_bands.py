"""Bulk never hurts the living: it fills what is free, gives way at once, and leaves prompts' tokens to others."""

from __future__ import annotations

import pytest
from scripted_model import HashModel, choices, request, run, run_alone, settings, solo

from jitney.errors import SettingsError
from jitney_worker.engine.engine import LocalEngine
from jitney_worker.engine.sequence import BULK, SequenceRequest

SEATS = 4


def bulk(number: int, prompt: int = 8, max_tokens: int = 60) -> SequenceRequest:
    return request(f"bulk{number}", prompt, max_tokens, arrival=number, band=BULK)


def full_of_bulk(model: HashModel, num: int = SEATS, **options: object) -> LocalEngine:
    """All seats taken by bulk that is past its prompts, and as many again waiting."""
    engine = LocalEngine(settings(max_num_seqs=SEATS, **options), model)
    for number in range(2 * num):
        engine.add(bulk(number))
    for _ in range(3):
        engine.step()
    assert engine.capacity().num_running == SEATS
    return engine


def first_step(engine: LocalEngine, name: str, limit: int = 100) -> int:
    """In how many steps from now it has its first token."""
    for number in range(1, limit + 1):
        if any(delta.id == name and delta.token_ids for delta in engine.step()):
            return number
    raise AssertionError(f"{name} said nothing in {limit} steps")


@pytest.mark.parametrize("band", [0, 1])
def test_who_is_waited_for_gets_its_first_token_in_the_next_step_though_all_seats_hold_bulk(band: int) -> None:
    model = HashModel()
    engine = full_of_bulk(model)
    engine.add(request("living", 20, 5, band=band, arrival=99))
    assert first_step(engine, "living") == 1
    assert [name for _, name in model.preempted] == ["bulk3"], "one seat, and the last in order gives it"
    assert len(model.steps[-1][1]) == SEATS


def test_as_many_bulk_sequences_go_as_others_come_and_come_back_when_those_have_ended() -> None:
    model = HashModel()
    engine = full_of_bulk(model)
    living = [request(f"living{n}", 5, 4 + n, arrival=50 + n) for n in range(3)]
    outcome = run(engine, living)
    assert [name for _, name in model.preempted] == ["bulk3", "bulk2", "bulk1"]
    assert all(outcome.steps[one.id][0] == 4 for one in living)
    assert engine.snapshot().num_preemptions == 3, "nobody went twice: a seat is waited for, never taken back"
    for number, back in ((1, 8), (2, 9), (3, 10)):
        steps = outcome.steps[bulk(number).id]
        assert min(step for step in steps if step > 3) == back, "in their old order, each at the first seat that frees"
    for one in living:
        assert outcome.said(one.id) == solo(one)


def test_what_gave_way_says_what_it_says_alone() -> None:
    engine = LocalEngine(settings(max_num_seqs=SEATS), HashModel())
    guests = [bulk(number, max_tokens=30) for number in range(2 * SEATS)]
    living = [request(f"living{n}", 6, 3, arrival=n) for n in range(12)]

    def come(step: int) -> None:
        if step % 4 == 3 and living:
            engine.add(living.pop())

    outcome = run(engine, guests, each_step=come)
    assert engine.snapshot().num_preemptions >= 5
    for one in guests:
        assert outcome.said(one.id) == run_alone(one) == solo(one)


def test_bulk_takes_nothing_from_bulk_nor_standard_from_interactive() -> None:
    model = HashModel()
    engine = full_of_bulk(model)
    engine.add(request("early bulk", 5, 2, arrival=-1, band=BULK))
    assert first_step(engine, "early bulk") > 50
    assert not model.preempted
    engine = LocalEngine(settings(max_num_seqs=1), model := HashModel())
    outcome = run(engine, [request("first", 5, 9), request("second", 5, 2, band=1)])
    assert outcome.steps[request("second", 5).id][0] == 10
    assert not model.preempted


def test_the_blocks_of_bulk_go_too_and_no_more_of_them_than_are_needed() -> None:
    """20 blocks: four bulk sequences will soon hold 5 each; the newcomer needs 7."""
    model = HashModel()
    engine = LocalEngine(settings(max_num_seqs=8, num_blocks=20, admission_reserve=0.0), model)
    for number in range(4):
        engine.add(bulk(number, prompt=70, max_tokens=9))
    engine.step()
    assert engine.capacity().num_free_blocks == 0
    living = request("living", 110, 2, arrival=99)
    engine.add(living)
    assert first_step(engine, "living") == 1
    assert [name for _, name in model.preempted] == ["bulk3", "bulk2"]
    assert run(engine).said("living")[1] == "length"


def test_nobody_gives_way_to_one_that_would_not_fit_all_the_same() -> None:
    """Its blocks are those of an interactive one, not of bulk: it waits, and bulk rides on."""
    model = HashModel()
    engine = LocalEngine(settings(max_num_seqs=2, num_blocks=20, admission_reserve=0.0), model)
    engine.add(request("big", 15 * 16, 4))
    engine.add(bulk(1, max_tokens=40))
    engine.step()
    engine.add(request("wide", 18 * 16, 4, arrival=5))
    outcome = run(engine)
    assert not [name for step, name in model.preempted if step < 4], "not while it could not have come on"
    assert outcome.said("wide")[1] == "length"


def test_all_choices_of_a_job_come_on_as_soon_as_the_first_has_computed_their_prompt() -> None:
    model = HashModel()
    engine = full_of_bulk(model)
    four, behind = choices("living", 20, 3, n=4, arrival=99), request("behind", 5, 1, arrival=100)
    outcome = run(engine, [*four, behind])
    assert [outcome.steps[one.id][0] for one in (*four, behind)] == [4, 5, 5, 5, 4], "who comes after them passes them"
    assert [name for _, name in model.preempted][:4] == ["bulk3", "bulk2", "bulk1", "bulk0"]
    assert sum(model.steps[3][1].get(one.id, 0) for one in four) == 20, "the prompt once, and no seat kept meanwhile"


def test_a_prompt_of_bulk_that_is_under_way_stands_behind_one_that_is_waited_for() -> None:
    model = HashModel()
    engine = LocalEngine(settings(max_num_batched_tokens=64, max_num_seqs=8, bulk_prefill_share=1.0), model)
    engine.add(bulk(0, prompt=1_000))
    for _ in range(3):
        engine.step()
    engine.add(request("living", 60, 3, arrival=9))
    assert first_step(engine, "living") == 1
    assert model.steps[-1][1] == {"living": 60, "bulk0": 4}, "and what is left of the step is bulk's again"


def test_prompts_of_bulk_leave_most_of_a_step() -> None:
    """A quarter of 256 tokens, whether the prompts run or come on; others' prompts count first."""
    model = HashModel()
    engine = LocalEngine(settings(max_num_batched_tokens=256, max_num_seqs=8), model)
    for number in range(4):
        engine.add(bulk(number, prompt=100))
    engine.step()
    assert model.steps[-1][1] == {"bulk0": 64}
    engine.step()
    assert model.steps[-1][1] == {"bulk0": 36, "bulk1": 28}
    engine.add(request("living", 50, 3, arrival=9))
    engine.step()
    assert model.steps[-1][1] == {"living": 50, "bulk0": 1, "bulk1": 14}
    engine.add(request("long", 300, 3, arrival=10))
    engine.step()
    assert model.steps[-1][1] == {"living": 1, "long": 253, "bulk0": 1, "bulk1": 1}, "others may fill the step"


def test_a_batch_that_is_held_until_its_slowest_has_ended_gives_no_seat_away() -> None:
    model = HashModel()
    engine = LocalEngine(settings(max_num_seqs=2, policy="static"), model)
    outcome = run(engine, [bulk(0, max_tokens=9), bulk(1, max_tokens=9)], max_steps=30)
    engine.add(bulk(2, max_tokens=9))
    engine.step()
    engine.add(request("living", 5, 2))
    outcome = run(engine)
    assert not model.preempted
    assert outcome.said("living")[1] == "length"


@pytest.mark.parametrize("share", [0.0, -0.1, 1.01])
def test_a_share_that_is_none_is_refused_by_name(share: float) -> None:
    with pytest.raises(SettingsError, match=f"bulk_prefill_share={share}"):
        settings(bulk_prefill_share=share)
