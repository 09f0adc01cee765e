"""Bug case B46 over HTTP: what three hundred streams leave behind, however they end, is nothing."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

from tests.api.api_wire import Answer, until
from tests.api.conftest import Api, StartApi
from tests.client.scripted_worker import PATIENCE_S, ScriptedWorker, Turn

from jitney.cards import QueueCard, write_card
from jitney.channel import NUM_LOG_CONNECTIONS
from jitney.connection import Redis, connect
from jitney.embedded import EmbeddedServer

NUM_STREAMS, AT_ONCE = 300, 30
NUM_API_CONNECTIONS = 32
NUM_READER_TASKS = 5
"""Once a job is followed: one keeps the connection, one speaks, one listens, one pings, one looks after the quiet."""

HOWS = ("leave", "fail", "finish")


async def connections(redis: Redis) -> Counter[str]:
    """How many of each kind the server sees; the test's own are not counted."""
    names = Counter(one["name"] for one in await redis.client_list())
    del names["jitney-test"]
    return names


async def perform(turn: Turn) -> None:
    """What the prompt asks for. A reader that leaves takes its job with it, at any moment."""
    await turn.say("a")
    if turn.spec.prompt == "fail":
        await turn.fail({"type": "server_error", "code": "internal_error", "message": "it broke"})
    elif turn.spec.prompt == "finish":
        await turn.finish("b")


async def one_stream(api: Api, how: str) -> None:
    answer = await api.complete(how, stream=True)
    assert answer.status == 200
    if how == "leave":
        await first_frame(answer)
    else:
        body = await answer.body()
        assert body.endswith(b"data: [DONE]\n\n") == (how == "finish")
    await answer.close()


async def first_frame(answer: Answer) -> None:
    async for chunk in answer.chunks():
        if b"data:" in chunk:
            return


async def test_three_hundred_streams_leave_exactly_what_an_idle_api_has(start_api: StartApi, tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path / "server") as server:
        redis = connect(server.url, name="jitney-test")
        api = await start_api(redis_url=server.url)
        await write_card(redis, api.model, QueueCard(model="m", max_model_len=64, vocab_size=1_000))
        worker = ScriptedWorker(redis, api.model)

        async def streams(count: int) -> None:
            hows = [HOWS[number % 3] for number in range(count)]
            async with asyncio.timeout(PATIENCE_S * 4):
                await asyncio.gather(worker.serve(count, perform), *(one_stream(api, how) for how in hows))

        # The pools fill up and keep what they have: idle is an API that has been busy once.
        client = api.service.client
        await asyncio.gather(*(client.redis.ping() for _ in range(NUM_API_CONNECTIONS)))
        await asyncio.gather(*(client.reader._log_redis.ping() for _ in range(NUM_LOG_CONNECTIONS)))
        idle_tasks = len(asyncio.all_tasks()) + NUM_READER_TASKS
        for _ in range(NUM_STREAMS // AT_ONCE):
            await streams(AT_ONCE)
        await until(lambda: redis.pubsub_channels(), [])
        await until(_num_tasks, idle_tasks)
        assert await connections(redis) == {
            "jitney-api": NUM_API_CONNECTIONS,
            "jitney-log": NUM_LOG_CONNECTIONS,
            "jitney-channel": 1,
        }
        await redis.aclose()


async def _num_tasks() -> int:
    return len(asyncio.all_tasks())
