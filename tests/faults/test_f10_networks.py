"""F10, F11, F23: networks that hang, lose, cut and crawl; servers that are replaced; servers that are slow."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time

import pytest
from tests.faults.answers import Asking
from tests.faults.arena import Arena
from tests.faults.children import PATIENCE_S
from tests.faults.conftest import MakeArena, Report, ServerMaker
from tests.faults.pace import CALM_LEASE_S
from tests.faults.proxy import Proxy
from tests.faults.readers import ask

MAX_UNPUBLISHED_STEPS = 8


async def test_f10_a_worker_that_is_cut_off_stops_generating(field: Arena, seed: int, report: Report) -> None:
    """The cable is pulled: it runs at most so many steps ahead, gives up its leases, and comes back as if new."""
    async with Proxy(field.server.port) as proxy:
        lonely = await field.start_worker("w1", proxy=proxy)
        await field.start_workers("w2", "w3")
        await field.load(seed, asking=Asking(seed, (100, 200)))
        await field.streaming()
        held = await field.owned_by("w1")
        proxy.hang()
        field.ledger.fault("w1 hangs")
        num_steps = field.num_steps("w1")
        await lonely.until_any(lambda line: "leases_given_up" in line)
        await field.until(lambda: field.all_elsewhere(held, "w1"), "all jobs of w1 taken over")
        num_ahead = field.num_steps("w1") - num_steps
        proxy.heal()
        figures = report(await field.finished(f"F10 hang #{seed}", held=len(held), steps_ahead=num_ahead))
        assert figures.summary.num_finished == 70
        assert held
        # And one more on each side of the moment: the step that was running, and what was on its way out.
        assert num_ahead <= MAX_UNPUBLISHED_STEPS + 2
        await field.rests()


@pytest.mark.parametrize("way", ["up", "down"])
async def test_f10_bytes_that_vanish_one_way(field: Arena, seed: int, way: str, report: Report) -> None:
    """up: the server hears nothing. down: it does all that it is asked, and its replies are lost (claims too)."""
    async with Proxy(field.server.port) as proxy:
        lonely = await field.start_worker("w1", proxy=proxy)
        await field.start_workers("w2", "w3")
        async with field.steady_load(Asking(seed), num_streams=70):
            await field.streaming()
            proxy.drop("up" if way == "up" else "down")
            field.ledger.fault(f"w1 loses {way}")
            await lonely.until_any(lambda line: "renew_failed" in line or "append_failed" in line)
            proxy.heal()
            proxy.reset()
        figures = report(await field.finished(f"F10 lost {way} #{seed}"))
        assert figures.summary.num_finished == figures.summary.num_accepted
        await field.rests()


async def test_f10_a_flapping_link(field: Arena, seed: int, report: Report) -> None:
    """Everybody's connections are reset again and again."""
    async with Proxy(field.server.port) as proxy:
        for name in ("w1", "w2", "w3"):
            await field.start_worker(name, proxy=proxy)
        await field.start_api("api2", proxy=proxy)
        async with field.steady_load(Asking(seed), client=field.client(proxy)):
            for _ in range(10):
                await field.more_events(60)
                proxy.reset()
                field.ledger.fault("all connections reset")
        figures = report(await field.finished(f"F10 flapping #{seed}", cut=proxy.num_cut))
        assert figures.summary.num_finished == figures.summary.num_accepted
        assert proxy.num_cut > 30
        await field.rests()


async def test_f10_replies_that_are_cut_off_in_the_middle(field: Arena, seed: int, report: Report) -> None:
    chance = random.Random(seed)
    async with Proxy(field.server.port) as proxy:
        for name in ("w1", "w2", "w3"):
            await field.start_worker(name, proxy=proxy)
        async with field.steady_load(Asking(seed), client=field.client(proxy)):
            for _ in range(8):
                await field.more_events(60)
                proxy.cut_in_reply(chance.randint(1, 400))
                await proxy.cuts(3)
                proxy.heal()
        figures = report(await field.finished(f"F10 cut replies #{seed}", cut=proxy.num_cut))
        assert figures.summary.num_finished == figures.summary.num_accepted
        assert proxy.num_cut > 16
        await field.rests()


async def test_f10_one_byte_at_a_time(field: Arena, seed: int, report: Report) -> None:
    field.lease_s = CALM_LEASE_S
    async with Proxy(field.server.port) as proxy:
        await field.start_worker("w1", proxy=proxy)
        proxy.slice_bytes = 1
        await field.load(seed, num_streams=6, num_bulk=2, client=field.client(proxy), asking=Asking(seed, (5, 15)))
        figures = report(await field.finished(f"F10 one byte #{seed}", bytes=proxy.num_passed["down"]))
        assert figures.summary.num_finished == 8


async def test_f10_an_api_that_cannot_reach_redis_says_so(field: Arena, seed: int) -> None:
    """A refused connection at once; one that hangs when the client's own tries are over (four of 5 s each)."""
    async with Proxy(field.server.port) as proxy:
        await field.start_worker("w1")
        await field.start_api("far", proxy=proxy)
        _, port = field.apis["far"]
        asked = Asking(seed).one()
        body = {"model": field.queue_name, **asked.fields}
        first = await ask(port, "POST", "/v1/jobs", body)
        assert first.status == 202
        await first.close()
        proxy.hang()
        answers = await asyncio.gather(ask(port, "GET", "/readyz"), ask(port, "POST", "/v1/jobs", body))
        for answer in answers:
            assert answer.status == 503, await answer.body()
            await answer.close()
        proxy.refuse()
        answer = await ask(port, "POST", "/v1/jobs", body)
        assert answer.status == 503
        await answer.close()
        proxy.heal()
        answer = await ask(port, "POST", "/v1/jobs", body)
        assert answer.status == 202
        await answer.close()


@pytest.mark.parametrize("reply", ["READONLY", "MASTERDOWN"])
async def test_f11_a_replica_is_promoted(
    make_arena: MakeArena, make_server: ServerMaker, seed: int, reply: str, report: Report
) -> None:
    """The address moves to a replica that takes no writes yet, and then does. Nothing is behind, nothing is lost."""
    first = make_server(folder="first", password="secret")
    second = make_server(folder="second", password="secret")
    async with make_arena(first) as field, Proxy(first.port) as proxy, contextlib.AsyncExitStack() as stack:
        replica = field.redis_of(second)
        stack.push_async_callback(replica.aclose)
        await replica.config_set("masterauth", "secret")
        await field.command_at(replica, "REPLICAOF", "127.0.0.1", first.port)
        await field.start_api(proxy=proxy)
        workers = [await field.start_worker(name, proxy=proxy) for name in ("w1", "w2", "w3")]
        await field.load(seed, client=field.client(proxy), asking=Asking(seed, (100, 200)))
        await field.streaming()
        proxy.hang("up")
        assert await field.command("WAIT", 1, 60_000) == 1
        field.ledger.fault("failover")
        if reply == "MASTERDOWN":
            await replica.config_set("replica-serve-stale-data", "no")
        await asyncio.to_thread(first.kill)
        await field.now_at(second)
        proxy.target = second.port
        proxy.reset()
        proxy.heal()
        await asyncio.gather(
            *(w.until_any(lambda line: "append_failed" in line or "renew_failed" in line) for w in workers)
        )
        await field.command_at(replica, "REPLICAOF", "NO", "ONE")
        assert report(await field.finished(f"F11 {reply} #{seed}")).summary.num_finished == 70
        await field.rests()


@pytest.mark.parametrize("delay_ms", [50, 200])
async def test_f23_a_slow_redis(field: Arena, seed: int, delay_ms: int, report: Report) -> None:
    field.lease_s = CALM_LEASE_S
    async with Proxy(field.server.port) as proxy:
        proxy.delay_s = delay_ms / 2_000  # each way
        for name in ("w1", "w2", "w3"):
            await field.start_worker(name, proxy=proxy)
        await field.load(seed, asking=Asking(seed, (5, 30)))
        figures = report(await field.finished(f"F23 {delay_ms} ms #{seed}"))
        assert figures.summary.num_finished == 70
        assert await field.num_takeovers() == 0, "a lease was lost for being slow"
        assert figures.duplicate_percent < 10
        await field.rests()


async def test_f23_a_script_that_runs_long(field: Arena, seed: int, report: Report) -> None:
    """Everybody else is answered BUSY meanwhile, for longer than a lease; then a rewrite of the log on top."""
    busy_s = math.ceil(field.lease_s) + 1
    await field.redis.config_set("busy-reply-threshold", "100")
    await field.start_workers("w1", "w2", "w3")
    await field.load(seed, asking=Asking(seed, (100, 200)))
    await field.streaming()
    field.ledger.fault(f"a script of {busy_s} seconds")
    spin = (
        "local n = 0; local t = redis.call('TIME')[1] + ARGV[1]; "
        "while tonumber(redis.call('TIME')[1]) <= t do n = n + 1 end return n"
    )
    began = time.monotonic()
    patient = field.redis_of(field.server, timeout_s=PATIENCE_S)
    assert await field.command_at(patient, "EVAL", spin, 0, busy_s) > 0
    await patient.aclose()
    assert time.monotonic() - began > field.lease_s
    field.ledger.fault("BGREWRITEAOF")
    await field.redis.bgrewriteaof()
    assert report(await field.finished(f"F23 busy #{seed}")).summary.num_finished == 70
    await field.rests()
