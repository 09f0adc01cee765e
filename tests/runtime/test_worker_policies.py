"""Deadlines of running jobs, and suspects: jobs whose last claimer died before they had said anything."""

from __future__ import annotations

import asyncio

from tests.engine.scripted_model import HashModel
from tests.runtime.harness import LIVENESS_S, StartWorker, Turnstile, expected

from jitney import AsyncClient, AsyncJob
from jitney.connection import Redis
from jitney.keys import Keys
from jitney.queue import Queue


async def test_a_job_whose_time_is_over_ends_as_expired_with_what_it_has_said_and_frees_its_seat(
    start_worker: StartWorker, client: AsyncClient
) -> None:
    turnstile = Turnstile(HashModel())
    async with start_worker(turnstile, engine={"max_num_seqs": 1}):
        job = await client.enqueue([1], max_tokens=300, ignore_eos=True, timeout_s=1.0)
        for _ in range(3):
            await turnstile.until_step()
            turnstile.pass_one()
        async with asyncio.timeout(LIVENESS_S):
            events = [event async for event in job.stream()]  # the engine stands still; only the clock can end it
        turnstile.open()
        following = await client.enqueue([2], max_tokens=5, ignore_eos=True)
        assert (await following.result(LIVENESS_S)).token_ids == expected([2], 5)
    ids = tuple(token for event in events for token in event.token_ids)
    assert events[-1].type == "expired"
    assert 0 < len(ids) <= 3
    assert ids == expected([1], 300)[: len(ids)]
    assert events[-1].usage == {"prompt_tokens": 1, "completion_tokens": len(ids), "cached_tokens": 0}
    assert (await job.status()).reason == "expired"


async def test_a_job_that_ends_in_time_is_not_touched_by_its_deadline(
    start_worker: StartWorker, client: AsyncClient
) -> None:
    async with start_worker():
        job = await client.enqueue([1], max_tokens=5, ignore_eos=True, timeout_s=30)
        assert (await job.result(LIVENESS_S)).token_ids == expected([1], 5)


async def test_a_suspect_comes_in_when_all_others_have_progressed_and_nobody_after_it_until_it_has(
    start_worker: StartWorker, client: AsyncClient, redis: Redis, queue_name: str
) -> None:
    """So that its end, if it is poison, costs none of its neighbours an attempt."""
    queue, turnstile = Queue(redis, queue_name), Turnstile(HashModel())
    suspect = await client.enqueue([9], max_tokens=6, ignore_eos=True)
    await queue.claim("dead", "d1", credit=1, fingerprint="hash.1", lease_s=60)
    async with start_worker(turnstile, engine={"max_num_seqs": 4}):
        first = await client.enqueue([1], max_tokens=20, ignore_eos=True)
        assert await turnstile.until_step() == [first.id]
        second = await client.enqueue([2], max_tokens=20, ignore_eos=True)
        await _until_owned(second, "w1")
        await redis.zadd(Keys(queue_name).leases("interactive"), {suspect.id: 1})
        await redis.rpush(Keys(queue_name).bell, "1")
        await _until_owned(suspect, "w1")
        assert (await suspect.status()).strikes == 1
        later = await client.enqueue([3], max_tokens=4, ignore_eos=True)
        turnstile.pass_one()
        assert set(await turnstile.until_step()) == {first.id, second.id}, "the second has not said anything yet"
        turnstile.open()
        results = await asyncio.gather(*(job.result(LIVENESS_S) for job in (first, second, suspect, later)))
    answers = [expected([1], 20), expected([2], 20), expected([9], 6), expected([3], 4)]
    assert [result.token_ids for result in results] == answers
    joined = [next(n for n, step in enumerate(turnstile.steps) if job.id in step) for job in (second, suspect, later)]
    assert joined[0] < joined[1] < joined[2]


async def _until_owned(job: AsyncJob, worker: str) -> None:
    async with asyncio.timeout(LIVENESS_S):
        while (await job.status()).owner != worker:
            pass
