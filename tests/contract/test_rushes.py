"""Many clients at once, each on a connection of its own: bounds hold to the job, and a key makes one job."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence

import pytest
from contract_driver import Driver, digest_of

from jitney.connection import Redis, connect
from jitney.embedded import EmbeddedServer
from jitney.errors import IdempotencyConflict, Overloaded
from jitney.keys import new_job_id
from jitney.queue import Enqueued, Entry, Limits, Queue

NUM_CLIENTS = 64
FAR_FUTURE = 4_000_000_000.0


@pytest.fixture
async def clients(server: EmbeddedServer, queue_name: str) -> AsyncIterator[list[Queue]]:
    redises: list[Redis] = [connect(server.url, name="jitney-rush", max_connections=1) for _ in range(NUM_CLIENTS)]
    for redis in redises:
        await redis.ping()  # connected, so that the rush is one
    yield [Queue(redis, queue_name) for redis in redises]
    for redis in redises:
        await redis.aclose()


async def rush(clients: Sequence[Queue], entries: Sequence[Entry], limits: Limits) -> list[Enqueued | BaseException]:
    """All at once; what became of each."""
    calls = [client.enqueue(entry, limits) for client, entry in zip(clients, entries, strict=True)]
    return await asyncio.gather(*calls, return_exceptions=True)


def tally(outcomes: Sequence[Enqueued | BaseException]) -> dict[str, int]:
    return dict(Counter("accepted" if isinstance(o, Enqueued) else type(o).__name__ for o in outcomes))


@pytest.mark.parametrize(
    ("limits", "which", "num_accepted"),
    [
        (Limits(max_waiting_jobs=10), "waiting jobs", 10),
        (Limits(max_waiting_tokens=75), "waiting tokens", 10),
        (Limits(max_tenant_jobs=10), "jobs of this tenant", 10),
        (Limits(max_waiting_jobs=64, max_waiting_tokens=70), "waiting tokens", 10),
    ],
)
async def test_no_bound_is_passed_by_one_and_after_the_drain_it_admits_again(
    driver: Driver, clients: list[Queue], limits: Limits, which: str, num_accepted: int
) -> None:
    for _ in range(2):
        outcomes = await rush(clients, [driver.entry(num_prompt_tokens=7) for _ in clients], limits)
        assert tally(outcomes) == {"accepted": num_accepted, "Overloaded": NUM_CLIENTS - num_accepted}
        assert await driver.queue.counts() == (num_accepted, 7 * num_accepted)
        refused = [outcome for outcome in outcomes if isinstance(outcome, Overloaded)]
        assert {(error.which, error.waiting_jobs) for error in refused} == {(which, num_accepted)}
        for job in (await driver.claim()).deliveries:
            await driver.finish(job)
        assert await driver.queue.counts() == (0, 0)


async def test_delayed_jobs_pass_no_bound_either(driver: Driver, clients: list[Queue]) -> None:
    entries = [driver.entry(not_before=FAR_FUTURE) for _ in clients]
    outcomes = await rush(clients, entries, Limits(max_later_jobs=10))
    assert tally(outcomes) == {"accepted": 10, "Overloaded": 54}
    assert await driver.redis.zcard(driver.keys.later) == 10


async def test_a_job_that_is_claimed_makes_room_for_exactly_one(driver: Driver, clients: list[Queue]) -> None:
    limits = Limits(max_waiting_jobs=10)
    await rush(clients, [driver.entry() for _ in clients], limits)
    await driver.claim(credit=3)
    outcomes = await rush(clients, [driver.entry() for _ in clients], limits)
    assert tally(outcomes) == {"accepted": 3, "Overloaded": 61}


async def test_one_key_makes_one_job_however_many_ask_at_once(driver: Driver, clients: list[Queue]) -> None:
    entries = [driver.entry(idempotency_key="k") for _ in clients]
    outcomes = await rush(clients, entries, Limits())
    assert tally(outcomes) == {"accepted": NUM_CLIENTS}
    answers = [outcome for outcome in outcomes if isinstance(outcome, Enqueued)]
    (id,) = {answer.id for answer in answers}
    assert [answer.id for answer in answers if not answer.duplicate] == [id], "told once that it is new"
    assert [job.id for job in (await driver.claim()).deliveries] == [id]
    assert sum(name.startswith(("job:", "body:")) for name in await driver.key_names()) == 2


async def test_two_bodies_under_one_key_make_one_job_and_the_others_are_told(
    driver: Driver, clients: list[Queue]
) -> None:
    bodies = [b'{"v":1,"prompt":"%d"}' % (number % 2) for number in range(NUM_CLIENTS)]
    outcomes = await rush(clients, [driver.entry(body, idempotency_key="k") for body in bodies], Limits())
    assert tally(outcomes) == {"accepted": 32, "IdempotencyConflict": 32}
    job = await driver.claim_one()
    for body, outcome in zip(bodies, outcomes, strict=True):
        assert isinstance(outcome, Enqueued) == (body == job.body)
        assert isinstance(outcome, IdempotencyConflict) == (body != job.body)


async def test_a_key_is_answered_although_the_queue_is_full(driver: Driver, clients: list[Queue]) -> None:
    limits = Limits(max_waiting_jobs=1)
    id = await driver.enqueue(idempotency_key="k", limits=limits)
    outcomes = await rush(clients, [driver.entry(idempotency_key="k") for _ in clients], limits)
    assert outcomes == [Enqueued(id, duplicate=True)] * NUM_CLIENTS


async def test_a_refused_job_leaves_its_key_free(driver: Driver) -> None:
    limits = Limits(max_waiting_jobs=1)
    await driver.enqueue(limits=limits)
    with pytest.raises(Overloaded):
        await driver.enqueue(idempotency_key="k", limits=limits)
    await driver.claim()
    body = b'{"v":1,"prompt":"another"}'
    entry = Entry(new_job_id(driver.queue.name), body, digest_of(body), idempotency_key="k")
    assert await driver.submit(entry, limits=limits) == Enqueued(entry.id, duplicate=False)


async def test_a_key_whose_job_is_gone_makes_one_job_anew(driver: Driver, clients: list[Queue]) -> None:
    first = await driver.enqueue(idempotency_key="k")
    await driver.finish(await driver.claim_one())
    await driver.redis.pexpire(driver.keys.job(first), 0)
    entries = [driver.entry(b'{"v":1,"prompt":"ho"}', idempotency_key="k") for _ in clients]
    outcomes = await rush(clients, entries, Limits())
    answers = [outcome for outcome in outcomes if isinstance(outcome, Enqueued)]
    assert len(answers) == NUM_CLIENTS
    assert sum(not answer.duplicate for answer in answers) == 1
    assert {answer.id for answer in answers} == {job.id for job in (await driver.claim()).deliveries} != {first}
