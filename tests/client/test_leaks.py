"""Bug case B46 through the client for threads: three hundred streams, however they end, leave nothing behind."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.client.scripted_worker import PATIENCE_S, ScriptedWorker, Turn, eventually

from jitney.async_client import AsyncClient
from jitney.cards import QueueCard, write_card
from jitney.channel import NUM_LOG_CONNECTIONS
from jitney.client import Client
from jitney.connection import connect
from jitney.embedded import EmbeddedServer
from jitney.errors import JobFailed, JobNotFound
from jitney.keys import new_job_id
from jitney.queue import Queue

NUM_STREAMS, AT_ONCE = 300, 30
NUM_CLIENT_CONNECTIONS = 32
NUM_READER_TASKS = 5
"""Once a job is followed: one keeps the connection, one speaks, one listens, one pings, one looks after the quiet."""

HOWS = ("leave", "fail", "finish")


async def perform(turn: Turn) -> None:
    await turn.say("a")
    if turn.spec.prompt == "fail":
        await turn.fail({"type": "server_error", "code": "internal_error", "message": "it broke"})
    else:
        await turn.finish("b")


def one_stream(client: Client, how: str) -> None:
    job = client.enqueue(how)
    if how == "leave":
        for event in job.stream():
            assert event.text == "a"
            break
    elif how == "fail":
        with pytest.raises(JobFailed):
            job.result(PATIENCE_S)
    else:
        assert [event.text for event in job.stream()] == ["a", "b", ""]


async def _num_tasks() -> int:
    return len(asyncio.all_tasks())


async def test_three_hundred_streams_leave_exactly_what_an_idle_client_has(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path / "server") as server, ThreadPoolExecutor(AT_ONCE) as threads:
        redis = connect(server.url, name="jitney-test")
        await write_card(redis, "q", QueueCard(model="m", max_model_len=64, vocab_size=10))
        worker = ScriptedWorker(redis, "q")
        client = await asyncio.to_thread(Client, server.url, queue="q")
        on_thread = asyncio.get_running_loop().run_in_executor

        async def fill_pools() -> None:
            """Pools fill up and keep what they have: idle is a client that has been busy once."""
            inner = client._client
            await asyncio.gather(*(inner.redis.ping() for _ in range(NUM_CLIENT_CONNECTIONS)))
            await asyncio.gather(*(inner.reader._log_redis.ping() for _ in range(NUM_LOG_CONNECTIONS)))

        async def streams(count: int) -> None:
            hows = [HOWS[number % 3] for number in range(count)]
            async with asyncio.timeout(PATIENCE_S * 2):
                await asyncio.gather(
                    worker.serve(count, perform), *(on_thread(threads, one_stream, client, how) for how in hows)
                )

        async def nobody() -> bool:
            return await redis.pubsub_channels() == []

        async def is_idle() -> bool:
            return await on_thread(threads, client._thread.run, _num_tasks) == idle_tasks

        await on_thread(threads, client._thread.run, fill_pools)
        idle_tasks = await on_thread(threads, client._thread.run, _num_tasks) + NUM_READER_TASKS
        for _ in range(NUM_STREAMS // AT_ONCE):
            await streams(AT_ONCE)
        await eventually(nobody)
        await eventually(is_idle)
        names = Counter(one["name"] for one in await redis.client_list())
        del names["jitney-test"]
        assert names == {
            "jitney-client": NUM_CLIENT_CONNECTIONS,
            "jitney-log": NUM_LOG_CONNECTIONS,
            "jitney-channel": 1,
        }
        await asyncio.to_thread(client.close)
        await redis.aclose()


async def test_asking_for_jobs_of_queues_that_are_none_keeps_nothing_of_them(client: AsyncClient) -> None:
    """Anybody may make up an id, and with it the name of a queue."""

    async def ask(name: str) -> None:
        job = client.job(new_job_id(name))
        with pytest.raises(JobNotFound):
            await job.status()
        with pytest.raises(JobNotFound):
            await job.result(PATIENCE_S)

    def num_queues() -> int:
        gc.collect()
        return sum(type(each) is Queue for each in gc.get_objects())

    await ask("first")
    before = num_queues()
    for number in range(20):
        await ask(f"nobodys{number}")
    assert num_queues() <= before
