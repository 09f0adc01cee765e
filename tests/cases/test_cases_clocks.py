"""B53: clocks that go back. Order, leases and logs go by the server's own counting; nobody's wall clock is asked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cases.conftest import StartServer
from tests.cases.paces import Paced
from tests.runtime.harness import LIVENESS_S, StartWorker, expected

from jitney import AsyncClient
from jitney.connection import Redis
from jitney.embedded import EmbeddedServer, find_server
from jitney.queue import Queue

FAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
LONG = 150

pytestmark = pytest.mark.skipif(FAKETIME is None, reason="libfaketime is not installed")


@pytest.fixture
def set_clock(tmp_path: Path) -> Callable[[int], None]:
    """`set_clock(-10)`: from now on the server's clock is so many seconds off."""
    offset = tmp_path / "offset"

    def write(seconds: int) -> None:
        offset.write_text(f"{seconds:+d}s\n")

    write(0)
    return write


@pytest.fixture
def server(start_server: StartServer, set_clock: Callable[[int], None], tmp_path: Path) -> EmbeddedServer:
    """A Valkey that believes the file (Debian's Redis allocates before libfaketime is up, and hangs)."""
    script = tmp_path / "server.sh"
    environment = f"LD_PRELOAD='{FAKETIME}' FAKETIME_TIMESTAMP_FILE='{tmp_path / 'offset'}' FAKETIME_NO_CACHE=1"
    script.write_text(f'#!/bin/sh\nexec env {environment} FAKETIME_DONT_FAKE_MONOTONIC=1 "{find_server()}" "$@"\n')
    script.chmod(0o755)
    return start_server(binary=script)


@pytest.fixture
def redis_url(server: EmbeddedServer) -> str:
    return server.url


async def jumped(redis: Redis, set_clock: Callable[[int], None], seconds: int) -> None:
    before, _ = await redis.time()
    set_clock(seconds)
    async with asyncio.timeout(LIVENESS_S):
        while abs((await redis.time())[0] - before - seconds) > 5:
            pass


@pytest.mark.parametrize("seconds", [-10, -7_200, 10, 7_200])
async def test_the_servers_clock_jumps_between_two_tokens(
    start_worker: StartWorker,
    client: AsyncClient,
    redis: Redis,
    queue_name: str,
    set_clock: Callable[[int], None],
    seconds: int,
) -> None:
    """B53: no "equal or smaller" error, no token missing or twice, and what comes later comes later."""
    async with start_worker(Paced(0.005)):
        jobs = [await client.enqueue([n], max_tokens=LONG, ignore_eos=True) for n in (1, 2, 3)]
        said: list[int] = []
        async with asyncio.timeout(LIVENESS_S):
            async for event in jobs[0].stream():
                assert event.type != "tokens" or event.index == len(said)
                if len(said) < 20 <= len(said) + len(event.token_ids):
                    await jumped(redis, set_clock, seconds)
                said += event.token_ids
        assert tuple(said) == expected([1], LONG)
        for n in (2, 3):
            assert (await jobs[n - 1].result(LIVENESS_S)).token_ids == expected([n], LONG)
        assert (await client.generate([4], max_tokens=5, ignore_eos=True)).token_ids == expected([4], 5)
        if seconds < 0:
            assert [(await job.status()).tries for job in jobs] == [1, 1, 1]


async def test_jobs_keep_their_order_while_the_servers_clock_goes_back(
    redis: Redis, client: AsyncClient, queue_name: str, write_queue_card: Any, set_clock: Callable[[int], None]
) -> None:
    """B53: by the order of their entries, not by the times in them; also when the queue ran empty in between."""
    await write_queue_card()
    queue = Queue(redis, queue_name)

    async def claim(count: int) -> list[str]:
        claimed = await queue.claim("w", f"n{count}.{len(order)}", credit=count, fingerprint="f", lease_s=100_000)
        return [delivery.id for delivery in claimed.deliveries]

    order: list[str] = []
    taken: list[str] = []
    for seconds in (0, -10, -20, -7_200, 0):
        await jumped_from_start(redis, set_clock, seconds)
        order += [(await client.enqueue([1])).id for _ in range(4)]
        taken += await claim(3)
    assert taken + await claim(99) == order
    order += [(await client.enqueue([1])).id for _ in range(2)]
    assert await claim(99) == order[-2:]


async def jumped_from_start(redis: Redis, set_clock: Callable[[int], None], seconds: int) -> None:
    """The clock as far off as asked, whatever it was before."""
    set_clock(seconds)
    async with asyncio.timeout(LIVENESS_S):
        while abs((await redis.time())[0] - time.time() - seconds) > 5:
            pass


async def test_a_delayed_job_waits_by_the_servers_clock(
    redis: Redis, client: AsyncClient, queue_name: str, write_queue_card: Any, set_clock: Callable[[int], None]
) -> None:
    """B53: a deadline that a client names is compared with nothing but the server's time."""
    await write_queue_card()
    queue = Queue(redis, queue_name)
    now, _ = await redis.time()
    late = await client.enqueue([1], deadline=now + 600)
    later = await client.enqueue([2], not_before=now + 600)
    await jumped(redis, set_clock, -7_200)
    assert (await queue.claim("w", "n1", credit=9, fingerprint="f", lease_s=1)).deliveries[0].id == late.id
    assert (await later.status()).state == "later"
    await jumped_from_start(redis, set_clock, 1_200)
    claimed = await queue.claim("w", "n2", credit=9, fingerprint="f", lease_s=1)
    assert [delivery.id for delivery in claimed.deliveries] == [later.id]
    assert claimed.gone == (late.id,)
    assert (await late.status()).reason in ("deadline", "expired")
