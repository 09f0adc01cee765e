"""F3, F17: workers that are taken for dead, and are not; and requests that are made twice."""

from __future__ import annotations

import asyncio
import random
import signal

from tests.faults.answers import Asking
from tests.faults.arena import Arena
from tests.faults.children import Child
from tests.faults.conftest import Report
from tests.faults.readers import HttpClient, PythonClient


async def test_f3_a_zombie_writes_nothing(field: Arena, seed: int, report: Report) -> None:
    """It is stopped in front of a write and wakes up when all its jobs are somebody else's: that write is late."""
    point = f"before:append:{random.Random(seed).randint(5, 25)}"
    zombie, *_ = await field.start_workers("w1", "w2", "w3", options={"w1": ["--at", f"{point}:stop"]})
    await field.load(seed)
    await zombie.until(f"at {point}")
    held = await field.owned_by("w1")
    await field.until(lambda: field.all_elsewhere(held, "w1"), "all jobs of w1 taken over")
    zombie.send(signal.SIGCONT)
    # The append. A job that ended in the same step was ended by its new owner too, which its `finish` is told.
    refused = await zombie.until_any(is_fenced_off, what="an append that was refused by its fence")
    figures = report(await field.finished(f"F3 zombie #{seed}", held=len(held), refused=refused.split()[1]))
    assert figures.summary.num_finished == 70
    assert held
    assert await field.num_takeovers() >= len(held)
    await field.rests()
    zombie.send(signal.SIGTERM)
    assert await zombie.ended() == 0


def is_fenced_off(line: str) -> bool:
    return line.startswith("refused") and line.split()[2] == "fence"


async def zombie_and_successor(field: Arena, seed: int, *options: str) -> tuple[Child, Child, list[str]]:
    """w1 is stopped in front of a write, w2 owns all its jobs and is stopped before it has written a word.

    The next thing that anybody may say of these jobs is w2's. options: of w1.
    """
    points = ["--at", "before:append:15:stop", "--at", "after:append:15:say"]
    zombie = await field.start_worker("w1", *points, *options)
    asking = Asking(seed, (60, 120), fixed={"n": 1})  # w2 must hold all of them before the first of them speaks
    jobs = await field.load(seed, num_streams=16, num_bulk=0, asking=asking)
    await zombie.until("at before:append")
    held = sorted(await field.owned_by("w1"))
    await field.until(field.leases_are_over, "every lease over")
    successor = await field.start_worker("w2", "--at", "before:append:1:stop", lease_s=600)
    await successor.until("at before:append")
    assert await field.owned_by("w2") == set(held)
    assert len(held) > len(jobs) // 2
    return zombie, successor, held


async def test_f3_a_zombie_does_not_write_in_its_successors_place(field: Arena, seed: int, report: Report) -> None:
    """The write would fit exactly: same job, next number. Whose it is only the fence tells."""
    zombie, successor, jobs = await zombie_and_successor(field, seed)
    async with field.silent(jobs):
        zombie.send(signal.SIGCONT)
        assert (await zombie.until("refused")).split() == ["refused", str(len(jobs)), "fence"]
        await zombie.until("at after:append")
    successor.send(signal.SIGCONT)
    assert report(await field.finished(f"F3 same place #{seed}")).summary.num_finished == 16
    await field.rests()


async def test_f3_a_worker_that_hangs_in_a_step_wakes_up_and_works_on(field: Arena, seed: int, report: Report) -> None:
    zombie, *_ = await field.start_workers("w1", "w2", "w3", options={"w1": ["--at", "decode:12:stop"]})
    await field.load(seed)
    await zombie.until("at decode:12")
    held = await field.owned_by("w1")
    await field.until(lambda: field.all_elsewhere(held, "w1"), "all jobs of w1 taken over")
    zombie.send(signal.SIGCONT)
    assert report(await field.finished(f"F3 hung step #{seed}", held=len(held))).summary.num_finished == 70
    assert held
    await field.rests()
    # It is a worker like any other again.
    for name in ("w2", "w3"):
        field.workers[name].send(signal.SIGTERM)
        assert await field.workers[name].ended() == 0
    again = Asking(seed + 1_000).one(ignore_eos=True)
    await field.follow(PythonClient(field.client(), field.ledger), again)
    await field.finished("after")
    await field.rests()


async def test_f17_a_lease_that_is_over_too_soon_shows_nothing_twice(field: Arena, seed: int, report: Report) -> None:
    """As if the server's clock had jumped: every job is given out again while its worker works on it."""
    await field.start_workers("w1", "w2", "w3")
    num_forced = 0
    async with field.steady_load(Asking(seed, (40, 120))):
        while num_forced <= 50:  # how many are held at one moment is up to the machine
            await field.more_events(100)
            num_forced += await field.expire_leases()
    figures = report(await field.finished(f"F17 early expiry #{seed}", forced=num_forced))
    assert figures.summary.num_finished == figures.summary.num_accepted
    assert figures.num_takeovers > 20
    assert figures.num_late_writes > 0
    await field.rests()


async def test_f17_the_same_request_five_times_is_one_job(field: Arena, seed: int, report: Report) -> None:
    """Over HTTP and by the client, at once, and each with a reader of its own."""
    await field.start_workers("w1", "w2")
    for asked in Asking(seed).some(8):
        field.answers[asked.name] = field.alone.answer(asked)
        clients: list[HttpClient | PythonClient] = [field.http(f"http{i}") for i in range(3)]
        clients += [PythonClient(field.client(), field.ledger, f"py{i}") for i in range(2)]
        ids = await asyncio.gather(*(client.submit(asked) for client in clients))
        assert len(set(ids)) == 1, ids
        for client, job_id in zip(clients, ids, strict=True):
            field.read(client, asked, job_id)
    figures = report(await field.finished(f"F17 five times #{seed}"))
    assert (figures.summary.num_accepted, figures.summary.num_finished) == (8, 8)
    assert figures.num_sampled == figures.summary.num_tokens, "somebody computed a second copy"
    await field.rests()
