"""The real system with one protection switched off at a time: the checker sees each of them gone.

Scripts and methods are changed in the memory of the test's own processes; the product has no switch for any of this.
Nothing here waits for a time to be over: either something wrong is said, or it is shown that nobody will say more.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal

import pytest
from tests.faults import unprotected
from tests.faults.answers import Asked, Asking
from tests.faults.arena import Arena
from tests.faults.checker import Violation, check
from tests.faults.children import Child
from tests.faults.conftest import MakeArena, ServerMaker
from tests.faults.hash_model import CRASH
from tests.faults.proxy import Proxy
from tests.faults.readers import HttpClient, PythonClient
from tests.faults.test_f03_zombies import zombie_and_successor

from jitney import scripts
from jitney.errors import UnknownQueue


def mutated(*mutations: str) -> list[str]:
    return [word for mutation in mutations for word in ("--mutate", mutation)]


async def assert_seen(field: Arena, pattern: str) -> None:
    """Some promise is broken for good, in these words."""
    found = await field.violation()
    assert re.search(pattern, str(found)), found


async def taken_over(field: Arena, victim: Child) -> None:
    held = await field.owned_by(victim.name)
    await field.until(lambda: field.all_elsewhere(held, victim.name), f"all jobs of {victim.name} taken over")


async def test_without_the_fence_a_zombie_writes_where_its_successor_is_about_to(field: Arena, seed: int) -> None:
    """The number of the next event is right: only the fence tells one claim from the other."""
    zombie, _, jobs = await zombie_and_successor(field, seed, *mutated(unprotected.NO_FENCE))
    async with contextlib.AsyncExitStack() as watching:
        await watching.enter_async_context(field.silent(jobs))
        zombie.send(signal.SIGCONT)
        await zombie.until("at after:append")
        with pytest.raises(Violation, match="while its owner stood still"):
            await watching.aclose()


async def test_without_fence_and_dense_numbers_a_zombie_is_heard(field: Arena, seed: int) -> None:
    """As in F3, with a worker whose late writes nobody checks at all."""
    guards = mutated(unprotected.NO_FENCE, unprotected.NO_SEQ, unprotected.ANY_ID)
    zombie, *_ = await field.start_workers("w1", "w2", "w3", options={"w1": ["--at", "before:append:15:stop", *guards]})
    await field.load(seed, asking=Asking(seed, (60, 120)))
    await zombie.until("at before:append")
    await taken_over(field, zombie)
    zombie.send(signal.SIGCONT)
    await assert_seen(field, r"goes on at token|seq \d+ where|told that it is gone|ended as failed|different things")


async def test_without_dense_numbers_a_repeated_write_is_in_the_log_twice(field: Arena, seed: int) -> None:
    """The reply to a write is lost, so it is sent again: its number says that it has been written."""
    async with Proxy(field.server.port) as proxy:
        guards = mutated(unprotected.NO_SEQ, unprotected.ANY_ID)
        worker = await field.start_worker("w1", *guards, proxy=proxy, lease_s=60)
        # None of them ends early: the write whose reply is lost must be an append.
        endless = {"ignore_eos": True, "stop": None, "stop_token_ids": ()}
        await field.load(seed, num_streams=12, num_bulk=0, asking=Asking(seed, (60, 120), fixed=endless))
        await field.streaming(5)
        proxy.drop("down")
        field.ledger.fault("w1 loses its replies")
        await worker.until_any(lambda line: "append_failed" in line)
        proxy.heal()
        proxy.reset()
        await assert_seen(field, r"seq \d+ where|goes on at token|told that it is gone")


async def test_without_the_refusal_at_the_end_a_job_is_ended_and_billed_twice(field: Arena, seed: int) -> None:
    guards = mutated(unprotected.NO_REFUSAL_AT_THE_END, unprotected.NO_SEQ_AT_THE_END)
    points = ["--at", "before:finish:1:stop", "--at", "after:finish:1:say"]
    zombie = await field.start_worker("w1", *points, *guards)
    ids = await field.load(seed, num_streams=10, num_bulk=0)
    await zombie.until("at before:finish")
    await field.start_worker("w2")
    await field.until(lambda: field.are_done(ids), "all finished by w2")
    zombie.send(signal.SIGCONT)
    await zombie.until("at after:finish")
    with pytest.raises(Violation, match=r"billed \[\d+, \d+\] tokens"):
        await field.finished("no refusal at the end")


async def test_without_the_log_a_resumed_answer_is_seen(field: Arena, seed: int) -> None:
    """A worker that publishes and does not write: whoever comes after it cannot know what was said."""
    options = {"w1": ["--at", "decode:20:die", *mutated(unprotected.NO_LOG)]}
    victim, *_ = await field.start_workers("w1", "w2", options=options)
    await field.load(seed, num_streams=20, num_bulk=0)
    await victim.ended()
    await assert_seen(field, r"ended as failed|told that it is gone|seq \d+ where")


async def test_without_reading_the_log_an_answer_begins_anew(field: Arena, seed: int) -> None:
    victim = await field.start_worker("w1", "--at", "decode:20:die")
    await field.load(seed, num_streams=20, num_bulk=0)
    await victim.ended()
    await field.start_worker("w2", "--without", "resume")
    await assert_seen(field, "goes on at token 0|told that it is gone")


async def test_without_lease_expiry_a_dead_workers_jobs_are_missed(field: Arena, seed: int) -> None:
    """That nobody will come for them is shown by a later job, which is served while they are not."""
    blind = mutated(unprotected.NO_EXPIRY)
    victim = await field.start_worker("w1", "--at", "decode:20:die", *blind)
    await field.load(seed, num_streams=20, num_bulk=0)
    await victim.ended()
    await field.until(field.leases_are_over, "every lease over")
    await field.start_worker("w2", *blind)
    later = await field.follow(PythonClient(field.client(), field.ledger), Asking(seed + 1_000).one())
    await field.until(lambda: field.are_done([later]), "a later job")
    with pytest.raises(Violation, match="no terminal event"):
        check(field.ledger, field.answers)


async def test_without_renewal_long_jobs_go_from_hand_to_hand_until_they_are_given_up(field: Arena, seed: int) -> None:
    careless = mutated(unprotected.NO_RENEWAL)
    for name in ("w1", "w2"):
        await field.start_worker(name, *careless, lease_s=0.5, step_s=0.1)
    await field.load(seed, num_streams=6, num_bulk=0, asking=Asking(seed, (150, 160)))
    await assert_seen(field, "ended as failed.*max_attempts")


async def test_without_suspects_alone_poison_takes_its_neighbours_along(field: Arena, seed: int) -> None:
    trusting = ["--without", "suspects", *mutated(unprotected.SUSPECTS_WITH_OTHERS)]
    await field.write_card()
    poison = await poisoned(field, seed)
    await field.load(seed, num_streams=12, num_bulk=0)
    async with field.kept_alive("w1", "w2", options=trusting):
        found = await field.violation()
    failed = [line for line in found.found if "max_attempts" in line]
    assert [line for line in failed if not line.startswith(poison.name)], found


async def test_without_a_limit_on_attempts_poison_kills_for_ever(field: Arena, seed: int) -> None:
    await field.write_card()
    poison = await poisoned(field, seed)
    async with field.kept_alive("w1", options=mutated(unprotected.ENDLESS_ATTEMPTS)):
        for number in range(5):  # a protected queue gives up after the third
            while f"w1.{number}" not in field.workers:
                await field.reader_pulse.wait()
            await field.workers[f"w1.{number}"].until("poisoned crash")
    with pytest.raises(Violation, match=rf"{poison.name}: accepted as .* no reader heard"):
        check(field.ledger, field.answers)


async def poisoned(field: Arena, seed: int) -> Asked:
    asked = Asked(f"poison-{seed}", {"prompt": [5, CRASH, 6], "max_tokens": 20, "temperature": 0.0})
    await field.follow(PythonClient(field.client(), field.ledger), asked)
    return asked


async def test_without_fingerprints_another_model_is_heard(field: Arena, seed: int) -> None:
    """Two models under one name: the second goes on where the first died."""
    victim = await field.start_worker("w1", "--at", "decode:15:die")
    await field.load(seed, num_streams=20, num_bulk=0)
    await victim.ended()
    await field.start_worker("w2", salt=77)
    await assert_seen(field, "alone it says")


async def test_without_epochs_a_queue_that_was_wiped_takes_no_more_jobs(field: Arena, seed: int) -> None:
    """The worker is there and idle, and has looked: it does not know that nobody knows its queue any more."""
    await field.start_worker("w1", "--without", "epoch")
    await field.load(seed, num_streams=4, num_bulk=0)
    await field.finished("before")
    await field.redis.flushall()
    await field.until(lambda: field.view_says("w1", "ready"), "w1 has looked again")
    with pytest.raises(UnknownQueue):
        await field.client().enqueue("on", max_tokens=4)


async def test_without_idempotency_a_request_that_is_repeated_becomes_two_jobs(
    field: Arena, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripts, "load", scripts.load)  # so that it is put back afterwards
    unprotected.mutate_scripts([unprotected.NO_IDEMPOTENCY])
    await field.start_workers("w1")
    asked = Asking(seed).one()
    for number in range(2):
        await field.follow(PythonClient(field.client(), field.ledger, f"py{number}"), asked)
    with pytest.raises(Violation, match="it became another job"):
        await field.finished("no idempotency")


async def test_without_an_append_only_file_accepted_jobs_are_missed(
    make_arena: MakeArena, make_server: ServerMaker, seed: int
) -> None:
    server = make_server(appendfsync="always")
    async with make_arena(server) as field:
        await field.redis.config_set("appendonly", "no")
        await field.start_workers("w1", "w2")
        await field.load(seed, num_streams=20, num_bulk=0)
        await field.streaming()
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        await assert_seen(field, "told that it is gone")


async def test_a_reader_that_comes_back_without_its_cursor_is_seen(
    field: Arena, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cursor is the reader's part of the bargain: without `Last-Event-ID` it is told everything again."""
    events = HttpClient._events
    monkeypatch.setattr(HttpClient, "_events", lambda self, tries, job_id, _cursor: events(self, tries, job_id, 0))
    victim, _ = field.apis["api"]
    client = field.http()
    await field.write_card()
    # Long answers, and a worker that stops long before their ends: no reader has heard all when its API dies.
    for asked in Asking(seed, (60, 120), fixed={"ignore_eos": True, "stop": None, "stop_token_ids": ()}).some(5):
        await field.follow(client, asked)
    worker = await field.start_worker("w1", "--at", "before:append:4:stop")
    await worker.until("at before:append")
    await field.streaming(1, events=1)
    victim.send(signal.SIGKILL)
    await victim.ended()
    await field.start_api("api2")
    worker.send(signal.SIGCONT)
    await assert_seen(field, "seq 1 where")
