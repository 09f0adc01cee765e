"""F1, F2, F4: workers that die, at announced points, and workers that are asked to go."""

from __future__ import annotations

import random
import signal

import pytest
from tests.faults.answers import Asking
from tests.faults.arena import Arena
from tests.faults.conftest import MakeArena, Report, ServerMaker
from tests.faults.pace import CALM_LEASE_S

PLACES = {
    "mid-prefill": ("prefill", 3, 12),
    "mid-decode": ("decode", 5, 25),
    "before-append": ("before:append", 5, 25),
    "after-append": ("after:append", 5, 25),
    "before-finish": ("before:finish", 2, 6),
    "after-finish": ("after:finish", 2, 6),
}


@pytest.mark.parametrize("place", PLACES)
async def test_f1_a_killed_worker_costs_a_pause_and_no_token(
    field: Arena, seed: int, place: str, report: Report
) -> None:
    where, least, most = PLACES[place]
    point = f"{where}:{random.Random(f'{seed} {place}').randint(least, most)}"
    victim, *_ = await field.start_workers("w1", "w2", "w3", options={"w1": ["--at", f"{point}:die"]})
    await field.load(seed)
    assert await victim.ended() == -signal.SIGKILL
    assert victim.said("at ") == [f"at {point} die"]
    summary = report(await field.finished(f"F1 {place} #{seed}", at=point)).summary
    assert summary.num_finished == 70
    assert await field.num_takeovers() > 0
    await field.rests()


async def test_f1_on_the_distributions_redis(
    make_arena: MakeArena, make_server: ServerMaker, seed: int, report: Report
) -> None:
    async with make_arena(make_server("redis")) as field:
        await field.start_api()
        victim, *_ = await field.start_workers("w1", "w2", "w3", options={"w1": ["--at", "decode:15:die"]})
        await field.load(seed)
        assert await victim.ended() == -signal.SIGKILL
        assert report(await field.finished(f"F1 redis 7.0 #{seed}")).summary.num_finished == 70
        assert await field.num_takeovers() > 0
        await field.rests()


async def test_f2_all_workers_die_and_others_come_later(field: Arena, seed: int, report: Report) -> None:
    chance = random.Random(seed)
    deaths = {name: ["--at", f"decode:{chance.randint(8, 20)}:die"] for name in ("w1", "w2", "w3")}
    victims = await field.start_workers(*deaths, options=deaths)
    await field.load(seed)
    assert [await victim.ended() for victim in victims] == [-signal.SIGKILL] * 3
    await field.until(field.leases_are_over, "every lease over")
    kept_alive = field.num_keep_alives()
    await field.told(lambda: field.num_keep_alives() > kept_alive + 20, "keep-alives meanwhile")
    assert await field.num_unfinished() > 30
    await field.start_workers("w4", "w5", "w6")
    assert report(await field.finished(f"F2 all workers #{seed}")).summary.num_finished == 70
    assert await field.num_takeovers() > 10
    await field.rests()


async def test_f4_a_rolling_restart_hands_over_at_once_and_burns_no_attempt(
    field: Arena, seed: int, report: Report
) -> None:
    """Their leases are long: whoever had to wait for one would be claimed a second time, and be seen below."""
    field.lease_s = CALM_LEASE_S
    old = await field.start_workers("w1", "w2", "w3", drain_timeout_s=0.1)
    await field.load(seed, asking=Asking(seed, (60, 120)))
    await field.streaming()
    num_handed_over = 0
    for number, worker in enumerate(old, 4):
        await field.start_worker(f"w{number}", drain_timeout_s=0.1)
        num_handed_over += len(await field.owned_by(worker.name))
        worker.send(signal.SIGTERM)
        assert await worker.ended() == 0
        assert await field.owned_by(worker.name) == set()
    figures = report(await field.finished(f"F4 rolling #{seed}", handed_over=num_handed_over))
    assert figures.summary.num_finished == 70
    assert num_handed_over > 0
    assert {(status.tries, status.strikes) for status in (await field.statuses()).values()} == {(1, 0)}
    await field.rests()


async def test_f4_a_second_sigterm_hands_over_now(field: Arena, seed: int, report: Report) -> None:
    field.lease_s = CALM_LEASE_S
    victim, *_ = await field.start_workers("w1", "w2", "w3", drain_timeout_s=600)
    await field.load(seed, asking=Asking(seed, (60, 200)))
    await field.streaming()
    victim.send(signal.SIGTERM)
    await field.until(lambda: field.view_says("w1", "draining"), "w1 drains")
    victim.send(signal.SIGTERM)
    assert await victim.ended() == 0
    assert await field.owned_by("w1") == set()
    assert report(await field.finished(f"F4 hurried #{seed}")).summary.num_finished == 70
    assert {status.strikes for status in (await field.statuses()).values()} == {0}
    await field.rests()


async def test_f4_a_grace_that_is_too_short_ends_as_a_death(field: Arena, seed: int, report: Report) -> None:
    victim, *_ = await field.start_workers("w1", "w2", "w3", drain_timeout_s=600)
    await field.load(seed, asking=Asking(seed, (100, 200)))
    await field.streaming()
    victim.send(signal.SIGTERM)
    await field.until(lambda: field.view_says("w1", "draining"), "w1 drains")
    held = await field.owned_by("w1")
    victim.send(signal.SIGKILL)
    assert await victim.ended() == -signal.SIGKILL
    assert report(await field.finished(f"F4 killed #{seed}", held=len(held))).summary.num_finished == 70
    assert held
    assert await field.num_takeovers() > 0
    await field.rests()


async def test_f1_one_of_three_is_killed_again_and_again(field: Arena, seed: int, report: Report) -> None:
    """The headline: a fresh worker for every dead one, and every answer what it would have been."""
    await field.start_workers("w1", "w2", "w3")
    chance = random.Random(seed)
    async with field.steady_load(Asking(seed, (60, 200)), num_streams=60):
        for number in range(4, 9):
            await field.more_events(150)
            victim = chance.choice([worker for worker in field.workers.values() if worker.is_alive])
            victim.send(signal.SIGKILL)
            await victim.ended()
            await field.start_worker(f"w{number}")
    figures = report(await field.finished(f"F1 five deaths #{seed}"))
    assert figures.summary.num_finished == figures.summary.num_accepted >= 60
    assert figures.num_takeovers > 20
    await field.rests()
