"""B48: a Redis that is full. What was accepted goes on, what is new is refused, and afterwards all is accounted for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.exceptions import OutOfMemoryError
from tests.cases.conftest import StartServer
from tests.cases.paces import Paced
from tests.runtime.harness import LIVENESS_S, StartWorker, expected

from jitney import AsyncClient, JobCancelled, QueueUnavailable
from jitney.connection import Redis
from jitney.embedded import EmbeddedServer
from jitney.queue import Queue

KINDS = ("valkey", "redis")
MB = 1 << 20


@pytest.fixture(params=KINDS)
def server(start_server: StartServer, request: pytest.FixtureRequest) -> EmbeddedServer:
    return start_server(request.param)


@pytest.fixture
def redis_url(server: EmbeddedServer) -> str:
    return server.url


async def fill(redis: Redis) -> None:
    """The case's eight megabytes, taken by streams like those that readers replay; and not a byte free any more."""
    pipe = redis.pipeline(transaction=False)
    for number in range(80):
        pipe.xadd(f"ballast:{number}", {"e": b"x" * 100_000})
    await pipe.execute()
    await redis.config_set("maxmemory-policy", "noeviction")
    await redis.config_set("maxmemory", 4 * MB)
    with pytest.raises(OutOfMemoryError):
        await redis.set("one", "more")


async def test_running_jobs_end_and_new_ones_are_refused_until_there_is_room(
    start_worker: StartWorker, start_api: Any, client: AsyncClient, redis: Redis, queue_name: str
) -> None:
    """B48: also those that end by a cancel, a deadline or a hand-over; every one of them has one ending."""
    queue, api = Queue(redis, queue_name), await start_api()
    async with start_worker(Paced(0.01), engine={"max_num_seqs": 12, "check": False}):
        jobs = [await client.enqueue([n], max_tokens=120, ignore_eos=True) for n in range(1, 11)]
        unwanted = await client.enqueue([11], max_tokens=400, ignore_eos=True)
        late = await client.enqueue([12], max_tokens=400, ignore_eos=True, timeout_s=3.0)
        waiting = await client.enqueue([13], max_tokens=5, ignore_eos=True)
        async with asyncio.timeout(LIVENESS_S):
            while any([(await job.status()).num_tokens == 0 for job in (*jobs, unwanted, late)]):
                pass
        await fill(redis)
        for body in ([1], "text", [2] * 400):
            with pytest.raises(QueueUnavailable):
                await client.enqueue(body, max_tokens=5)
        answer = await api.post("/v1/completions", {"model": queue_name, "prompt": "hello"})
        assert (answer.status, int(answer.headers["retry-after"]) >= 1) == (503, True)
        assert (await answer.json())["error"]["code"] == "queue_unavailable"
        assert await unwanted.cancel()
        results = await asyncio.gather(*(job.result(LIVENESS_S) for job in jobs))
        assert [result.token_ids for result in results] == [expected([n], 120) for n in range(1, 11)]
        with pytest.raises(JobCancelled):
            await unwanted.result(LIVENESS_S)
        assert (await waiting.result(LIVENESS_S)).token_ids == expected([13], 5)
        assert (await redis.info("memory"))["used_memory"] > 7 * MB, "it was never full: the test proves nothing"
        async with asyncio.timeout(LIVENESS_S):
            while (await late.status()).state != "done":
                pass
        with pytest.raises(QueueUnavailable):
            await client.enqueue([1], max_tokens=5)
        await redis.config_set("maxmemory", 0)
        assert (await client.generate([1], max_tokens=5, ignore_eos=True)).token_ids == expected([1], 5)
    reasons = [(await job.status()).reason for job in (*jobs, unwanted, late, waiting)]
    assert reasons[:10] == ["finished"] * 10
    assert set(reasons[10:12]) <= {"cancel", "cancelled", "expired", "deadline"}
    assert reasons[12] == "finished"
    assert await queue.counts() == (0, 0)
    assert await redis.zcard(queue.keys.leases("interactive")) == 0
    assert await redis.xlen(queue.keys.usage) == 14


async def test_a_hand_over_in_a_full_memory_loses_nothing(
    start_worker: StartWorker, client: AsyncClient, redis: Redis
) -> None:
    """B48: release, claim and resume need no more room than they are given."""
    async with start_worker(Paced(0.01), worker={"id": "first"}) as first:
        jobs = [await client.enqueue([n], max_tokens=150, ignore_eos=True) for n in (1, 2, 3)]
        async with asyncio.timeout(LIVENESS_S):
            while any([(await job.status()).num_tokens < 5 for job in jobs]):
                pass
        await fill(redis)
        async with start_worker(worker={"id": "second"}):
            first.drain()
            first.drain()
            results = await asyncio.gather(*(job.result(LIVENESS_S) for job in jobs))
            await redis.config_set("maxmemory", 0)
    assert [result.token_ids for result in results] == [expected([n], 150) for n in (1, 2, 3)]
    assert [(await job.status()).tries for job in jobs] == [1, 1, 1]
