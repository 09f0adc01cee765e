"""A worker full of bulk takes whoever is waited for, and the bulk that gave way loses nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.engine.scripted_model import HashModel
from tests.runtime.harness import LIVENESS_S, StartWorker, Turnstile, expected

from jitney import AsyncClient, AsyncJob, scripts
from jitney.connection import Redis
from jitney.keys import BANDS, Band, Keys
from jitney.queue import Credit, Queue
from jitney_worker.engine.sequence import BULK

SEATS = 4


async def bulk_jobs(client: AsyncClient, num: int, max_tokens: int = 40) -> list[AsyncJob]:
    return [await client.enqueue([n % 90 + 1], max_tokens=max_tokens, ignore_eos=True, band="bulk") for n in range(num)]


async def until_full(turnstile: Turnstile, redis: Redis, queue_name: str) -> None:
    """Let steps through until all seats are taken, and the worker hears calls; the engine stands before a step then."""
    while len(await turnstile.until_step()) < SEATS:
        turnstile.pass_one()
    async with asyncio.timeout(LIVENESS_S):
        while (await redis.pubsub_numsub(Keys(queue_name).call))[0][1] == 0:
            pass


async def until_aboard(job: AsyncJob) -> None:
    async with asyncio.timeout(LIVENESS_S):
        while (await job.status()).state != "running":
            pass


def test_the_engine_and_the_queue_agree_on_which_band_bulk_is() -> None:
    assert BANDS[BULK] == "bulk"
    assert BANDS[-1] == BANDS[BULK]


@pytest.mark.parametrize("band", ["interactive", "standard"])
async def test_who_comes_while_all_seats_hold_bulk_has_its_first_token_two_steps_later(
    start_worker: StartWorker, client: AsyncClient, redis: Redis, queue_name: str, band: Band
) -> None:
    """By steps, not by time: the one that it came into, and the next, in which its prompt is computed."""
    turnstile = Turnstile(HashModel())
    backlog = await bulk_jobs(client, 3 * SEATS)
    async with start_worker(turnstile, engine={"max_num_seqs": SEATS}):
        await until_full(turnstile, redis, queue_name)
        living = await client.enqueue([50, 51, 52], max_tokens=6, ignore_eos=True, band=band)
        await until_aboard(living)
        came_in = len(turnstile.steps)
        turnstile.pass_one()
        seated = await turnstile.until_step()
        if living.id not in seated:  # claimed, but still being read in when the step began
            turnstile.pass_one()
            seated = await turnstile.until_step()
        assert living.id in seated
        assert len(turnstile.steps) <= came_in + 2
        assert len(seated) == SEATS, "one seat of bulk, and no more"
        turnstile.open()
        answer = await living.result(LIVENESS_S)
        results = await asyncio.gather(*(job.result(LIVENESS_S) for job in backlog))
        states = [await job.status() for job in backlog]
    assert answer.token_ids == expected([50, 51, 52], 6)
    assert [result.token_ids for result in results] == [expected([n + 1], 40) for n in range(3 * SEATS)]
    assert all(state.tries == 1 for state in states), "nobody who gave way was handed back, or claimed twice"


async def test_as_many_come_as_there_are_seats_and_bulk_waits_on_board_for_them(
    start_worker: StartWorker, client: AsyncClient, redis: Redis, queue_name: str
) -> None:
    turnstile = Turnstile(HashModel())
    backlog = await bulk_jobs(client, 2 * SEATS)
    async with start_worker(turnstile, engine={"max_num_seqs": SEATS}):
        await until_full(turnstile, redis, queue_name)
        living = [await client.enqueue([60 + n], max_tokens=9, ignore_eos=True) for n in range(SEATS)]
        for job in living:
            await until_aboard(job)
        seated = set[str]()
        while seated != {job.id for job in living}:
            turnstile.pass_one()
            seated = set(await turnstile.until_step())
        assert len(turnstile.steps) < 30, "bulk of 40 tokens would still run"
        turnstile.open()
        results = await asyncio.gather(*(job.result(LIVENESS_S) for job in living))
        late = await asyncio.gather(*(job.result(LIVENESS_S) for job in backlog))
    assert [result.token_ids for result in results] == [expected([60 + n], 9) for n in range(SEATS)]
    assert [result.token_ids for result in late] == [expected([n + 1], 40) for n in range(2 * SEATS)]
    back = [step for step in turnstile.steps if backlog[0].id in step]
    assert len(back) >= 40


async def test_no_more_bulk_is_claimed_while_some_waits_to_come_back(
    start_worker: StartWorker, client: AsyncClient, redis: Redis, queue_name: str
) -> None:
    turnstile = Turnstile(HashModel())
    backlog = await bulk_jobs(client, 4 * SEATS)
    async with start_worker(turnstile, engine={"max_num_seqs": SEATS}):
        await until_full(turnstile, redis, queue_name)
        for n in range(SEATS):
            await until_aboard(await client.enqueue([60 + n], max_tokens=9, ignore_eos=True))
        for _ in range(8):
            turnstile.pass_one()
            await turnstile.until_step()
        held = await redis.zcard(Keys(queue_name).leases("bulk"))
        assert held <= SEATS + 1, "the seats' own, and one at hand"
        turnstile.open()
        await asyncio.gather(*(job.result(LIVENESS_S) for job in backlog))


async def test_a_full_worker_takes_no_ring_from_an_idle_one(
    start_worker: StartWorker, client: AsyncClient, redis: Redis, queue_name: str
) -> None:
    turnstile, keys = Turnstile(HashModel()), Keys(queue_name)
    backlog = await bulk_jobs(client, SEATS + 1)
    async with start_worker(turnstile, engine={"max_num_seqs": SEATS}):
        await until_full(turnstile, redis, queue_name)
        for job in backlog:
            await until_aboard(job)
        await redis.delete(keys.bell)
        backlog += await bulk_jobs(client, 2)
        for _ in range(10):  # the worker looks after each of these steps
            turnstile.pass_one()
            await turnstile.until_step()
        assert await redis.llen(keys.bell) == 2
        turnstile.open()
        await asyncio.gather(*(job.result(LIVENESS_S) for job in backlog))


async def test_a_full_worker_claims_nothing_at_the_call_of_a_band_that_it_has_no_room_for(
    start_worker: StartWorker, client: AsyncClient, redis: Redis, queue_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each job that is enqueued costs every full worker a claim that gives nothing."""
    turnstile, claims, claim = Turnstile(HashModel()), list[Credit](), Queue.claim

    async def counted(queue: Queue, *args: Any, **options: Any) -> Any:
        claims.append(options["credit"])
        return await claim(queue, *args, **options)

    monkeypatch.setattr(Queue, "claim", counted)
    aboard = [await client.enqueue([n + 1], max_tokens=40, ignore_eos=True, band="standard") for n in range(SEATS + 1)]
    async with start_worker(turnstile, engine={"max_num_seqs": SEATS}, worker={"claim_ahead_patience_s": 3_600.0}):
        await until_full(turnstile, redis, queue_name)
        for job in aboard:
            await until_aboard(job)
        claims.clear()
        # No step ends meanwhile, so only a call makes it look. The last one of another band is heard after the others.
        waiting = [await client.enqueue([n + 60], max_tokens=4, ignore_eos=True, band="standard") for n in range(30)]
        urgent = await client.enqueue([50], max_tokens=4, ignore_eos=True)
        await until_aboard(urgent)
        made = list(claims)
        turnstile.open()
        await asyncio.gather(*(job.result(LIVENESS_S) for job in (*aboard, *waiting, urgent)))
    assert all(credit.standard == 0 < credit.interactive for credit in made)
    assert len(made) < 10


async def test_a_suspect_of_bulk_that_waits_for_a_seat_keeps_nobody_out(
    start_worker: StartWorker, client: AsyncClient, redis: Redis, queue_name: str
) -> None:
    """Nothing is claimed beside a suspect until it has said something; behind bulk that is long."""
    turnstile, queue = Turnstile(HashModel()), Queue(redis, queue_name)
    suspect = await client.enqueue([80], max_tokens=4, ignore_eos=True, band="bulk")
    (held,) = (await queue.claim("dead", "n1", credit=1, fingerprint="hash.1", lease_s=3_600)).deliveries
    assert held.id == suspect.id
    backlog = await bulk_jobs(client, SEATS, max_tokens=400)
    hasty = {"claim_ahead_patience_s": 0.001, "snapshot_every_s": 0.001}
    async with (
        start_worker(turnstile, engine={"max_num_seqs": SEATS}, worker=hasty),
        contextlib.AsyncExitStack() as gate,
    ):
        gate.callback(turnstile.open)
        await until_full(turnstile, redis, queue_name)
        await redis.zadd(queue.keys.leases("bulk"), {suspect.id: 1})
        async with asyncio.timeout(LIVENESS_S):
            while (await suspect.status()).tries < 2:
                pass
        for _ in range(5):  # after which it shows that the suspect has no seat
            turnstile.pass_one()
            await turnstile.until_step()
        living = await client.enqueue([50], max_tokens=4, ignore_eos=True)
        turnstile.pass_one()
        await turnstile.until_step()
        await until_aboard(living)
        assert all([(await job.status()).state == "running" for job in backlog])
        turnstile.open()
        await asyncio.gather(*(job.result(LIVENESS_S) for job in (*backlog, living, suspect)))


async def test_a_suspect_that_is_waited_for_does_not_wait_for_bulk_that_waits_for_a_seat(
    start_worker: StartWorker, client: AsyncClient, redis: Redis, queue_name: str
) -> None:
    """A suspect is let in when all others have said something: one of bulk that was claimed ahead has not, for long."""
    turnstile, queue = Turnstile(HashModel()), Queue(redis, queue_name)
    suspect = await client.enqueue([80], max_tokens=4, ignore_eos=True)
    (held,) = (await queue.claim("dead", "n1", credit=1, fingerprint="hash.1", lease_s=3_600)).deliveries
    assert held.id == suspect.id
    backlog = await bulk_jobs(client, SEATS + 1, max_tokens=400)
    hasty = {"claim_ahead_patience_s": 0.001, "snapshot_every_s": 0.001}
    async with (
        start_worker(turnstile, engine={"max_num_seqs": SEATS}, worker=hasty),
        contextlib.AsyncExitStack() as gate,
    ):
        gate.callback(turnstile.open)
        await until_full(turnstile, redis, queue_name)
        for job in backlog:
            await until_aboard(job)
        await redis.zadd(queue.keys.leases("interactive"), {suspect.id: 1})
        seated = list[str]()
        while suspect.id not in seated:
            assert len(turnstile.steps) < 350, "it waits for a seat of bulk to be free"
            turnstile.pass_one()
            seated = await turnstile.until_step()
            await suspect.status()
        turnstile.open()
        await asyncio.gather(*(job.result(LIVENESS_S) for job in (*backlog, suspect)))


async def test_a_claim_takes_of_each_band_what_it_and_the_more_urgent_ones_have_credit_for(
    client: AsyncClient, redis: Redis, queue_name: str, write_queue_card: Callable[..., Awaitable[object]]
) -> None:
    queue = Queue(redis, queue_name)
    await write_queue_card()
    for band in ("bulk", "standard", "interactive"):
        for n in range(3):
            await client.enqueue([n + 1], band=band)

    async def claim(nonce: str, credit: Credit) -> list[Band]:
        claimed = await queue.claim("w", nonce, credit=credit, fingerprint="f", lease_s=60)
        return [delivery.band for delivery in claimed.deliveries]

    assert await claim("n1", Credit(2, 2, 0)) == ["interactive"] * 2
    assert await claim("n2", Credit(2, 2, 2)) == ["interactive", "standard"]
    assert await claim("n3", Credit(5, 1, 0)) == ["standard"]
    assert await claim("n4", Credit(9, 0, 0)) == []
    assert await redis.llen(queue.keys.bell) > 0, "who may not take all bands knows nothing of what is left"
    assert await claim("n5", Credit(9, 9, 2)) == ["standard", "bulk"]
    assert await claim("n6", Credit.of(9)) == ["bulk", "bulk"]


async def test_a_claim_that_names_one_credit_as_before_there_were_three_is_for_all_bands(
    client: AsyncClient, redis: Redis, queue_name: str, write_queue_card: Callable[..., Awaitable[object]]
) -> None:
    keys = Keys(queue_name)
    await write_queue_card()
    for band in ("bulk", "standard", "interactive"):
        await client.enqueue([1], band=band)
    arguments = [keys.prefix, "w", "n1", 9, "f", 60_000, 1, 3_600_000, 3, 10]
    reply = await scripts.run(redis, scripts.load("claim"), scripts.Call([keys.counts], arguments))
    assert [row[1].decode() for row in reply[0]] == ["interactive", "standard", "bulk"]
