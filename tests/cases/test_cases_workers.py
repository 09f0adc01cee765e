"""B44, B53, B54 of the list of workers: it stays short, whatever their clocks say and whoever else writes to it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.engine.scripted_model import HashModel
from tests.runtime.harness import LIVENESS_S, StartWorker, Turnstile, expected

from jitney import AsyncClient
from jitney.connection import Redis
from jitney.keys import Keys
from jitney.queue import Queue
from jitney.workers import WorkerView, list_workers, write_worker

DAYS_S = 3 * 86_400.0


def view(queue: str, id: str, *, now: float = 1_800_000_000.0) -> WorkerView:
    """now: what the worker's own clock says."""
    return WorkerView(
        id=id,
        queue=queue,
        model="m",
        fingerprint="f",
        host="h",
        pid=1,
        state="ready",
        started_at=now,
        written_at=now,
    )


async def names(redis: Redis, queue: str) -> list[str]:
    return [view.id for view in await list_workers(redis, queue)]


async def forgotten_after(redis: Redis, queue: str, id: str) -> None:
    """As if the worker had been killed, and its time had passed: the key is gone, and its score lies behind."""
    keys = Keys(queue)
    assert await redis.delete(keys.worker(id)) == 1
    assert await redis.zincrby(keys.workers, -100.0, id)


async def test_two_hundred_workers_that_were_killed_are_not_remembered(redis: Redis, queue_name: str) -> None:
    """B44: nobody signs off for them, and nobody comes back under the same name."""
    keys = Keys(queue_name)
    for number in range(200):
        await write_worker(redis, view(queue_name, f"host-{number}"), ttl_s=60.0)
        await forgotten_after(redis, queue_name, f"host-{number}")
        assert await redis.zcard(keys.workers) <= 2
    await write_worker(redis, view(queue_name, "last"), ttl_s=60.0)
    assert await redis.zrange(keys.workers, 0, -1) == [b"last"]
    assert [key async for key in redis.scan_iter(f"{keys.prefix}:worker:*")] == [keys.worker("last").encode()]


async def test_a_claim_costs_the_same_after_two_hundred_workers(redis: Redis, queue_name: str) -> None:
    """B44: what claims leave behind is one key per worker, and it dies with the lease."""
    queue = Queue(redis, queue_name)
    for number in range(200):
        await queue.claim(f"host-{number}", f"n{number}", credit=4, fingerprint=f"f{number}", lease_s=60.0)
    left = [key async for key in redis.scan_iter(f"{queue.keys.prefix}:*", count=1_000)]
    assert left == []


@pytest.mark.parametrize("off_s", [DAYS_S, -DAYS_S, -1_800_000_000.0], ids=["ahead", "behind", "at the epoch"])
async def test_a_worker_whose_clock_is_off_by_days_puts_nobody_out(redis: Redis, queue_name: str, off_s: float) -> None:
    """B53: neither does it vanish itself, whoever writes last."""
    right = view(queue_name, "right")
    wrong = view(queue_name, "wrong", now=right.written_at + off_s)
    for first, second in ((right, wrong), (wrong, right)):
        await write_worker(redis, first, ttl_s=60.0)
        await write_worker(redis, second, ttl_s=60.0)
        assert sorted(await names(redis, queue_name)) == ["right", "wrong"]


STRANGE_VIEWS: dict[str, Any] = {
    "bytes": b"\x82\xa2",
    "no JSON": "{",
    "a list": "[]",
    "no fields": "{}",
    "not a number": '{"id":"x","queue":"q","model":"m","fingerprint":"f","host":"h","pid":"one","state":"ready"}',
}


@pytest.mark.parametrize("strange", STRANGE_VIEWS.values(), ids=STRANGE_VIEWS)
async def test_what_is_no_view_is_passed_over(redis: Redis, queue_name: str, strange: Any) -> None:
    """B54."""
    keys = Keys(queue_name)
    await write_worker(redis, view(queue_name, "good"), ttl_s=60.0)
    await redis.hset(keys.worker("strange"), "view", strange)
    await redis.set(keys.worker("a-string"), "x")
    await redis.zadd(keys.workers, {"strange": 2e9, "a-string": 2e9, b"\xff\xfe": 2e9, "nobody": 2e9})
    assert await names(redis, queue_name) == ["good"]


async def test_a_view_that_is_none_ends_no_worker(
    start_worker: StartWorker, client: AsyncClient, redis: Redis, queue_name: str
) -> None:
    """B54: a worker looks at its peers when a job waits behind its full seats."""
    keys, turnstile = Keys(queue_name), Turnstile(HashModel())
    settings = {"id": "full", "claim_ahead_patience_s": 0.05, "snapshot_every_s": 0.01}
    async with start_worker(turnstile, engine={"max_num_seqs": 1}, worker=settings):
        await redis.hset(keys.worker("strange"), "view", b"\x82\xa2")
        await redis.zadd(keys.workers, {"strange": 2e9})
        await write_worker(redis, view(queue_name, "peer"), ttl_s=60.0)
        seated = await client.enqueue([1], max_tokens=450, ignore_eos=True)
        await turnstile.until_step()
        ahead = await client.enqueue([2], max_tokens=4, ignore_eos=True)
        async with asyncio.timeout(LIVENESS_S):
            while (await ahead.status()).owner != "full":
                pass
            while (await ahead.status()).owner == "full":
                turnstile.pass_one()
                await turnstile.until_step()
        turnstile.open()
        assert (await ahead.result(LIVENESS_S)).token_ids == expected([2], 4)
        assert (await seated.result(LIVENESS_S)).token_ids == expected([1], 450)
