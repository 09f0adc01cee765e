"""How an attempt at an RQ job finds its job: straight against the queue, without a worker process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.rq_bridge.conftest import Jitney

from jitney import AsyncClient
from jitney.queue import Limits
from jitney.rq.generation import Asked, attach
from jitney.submission import spec_from


@pytest.fixture
async def client(redis_url: str, jitney: Jitney) -> AsyncIterator[AsyncClient]:
    """Of a queue in which one job may wait."""
    async with AsyncClient(redis_url, queue=jitney.queue_name, limits=Limits(max_waiting_jobs=1)) as client:
        yield client


def asked(key: str, prompt: str = "Once") -> Asked:
    return Asked(spec_from({"prompt": prompt}), None, key)


async def test_attempts_at_an_rq_job_find_one_job_until_it_fails(client: AsyncClient, jitney: Jitney) -> None:
    first = await attach(client, asked("k"))
    assert (await attach(client, asked("k"))).id == first.id
    turn = await jitney.take_one()
    assert (await attach(client, asked("k"))).id == first.id
    await turn.fail({"type": "server_error", "code": "model_error", "message": "broke"})
    second = await attach(client, asked("k"))
    assert second.id != first.id
    assert (await attach(client, asked("k"))).id == second.id
    await second.cancel()
    third = await attach(client, asked("k"))
    assert third.id not in (first.id, second.id)
    await (await jitney.take_one()).finish("x")
    assert (await attach(client, asked("k"))).id == third.id


async def test_an_rq_job_waits_for_room_in_a_full_queue(client: AsyncClient, jitney: Jitney) -> None:
    first = await attach(client, asked("a"))
    attaching = asyncio.create_task(attach(client, asked("b")))
    await asyncio.wait({attaching}, timeout=0.2)
    assert not attaching.done()
    assert (await jitney.take_one()).id == first.id
    second = await attaching
    assert (await jitney.take_one()).id == second.id
