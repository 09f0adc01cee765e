"""B11, B46: clients that go away at any moment. Generation stops, blocks are free, nobody notices, nothing leaks."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.api.api_wire import Answer, read_head
from tests.cases.paces import Paced
from tests.runtime.harness import LIVENESS_S, StartWorker, expected

from jitney import AsyncClient
from jitney.connection import Redis
from jitney.keys import JobId, Keys
from jitney.queue import Queue
from jitney.workers import list_workers

MAX_TOKENS = 400
NUM_CLOSED = 200
MAX_AHEAD = 8
"""`max_unpublished_steps`: so many steps may be on their way out, and as many more begun meanwhile."""

TIGHT = {"max_num_seqs": 8, "num_blocks": 34, "check": False}
"""The four neighbours alone need 52 blocks to end: somebody is always being put back."""


@asynccontextmanager
async def asking(port: int, path: str, body: dict[str, Any]) -> AsyncIterator[tuple[asyncio.StreamReader, Any]]:
    """A request on a connection of its own, which is gone at the end of the block, with a RST as often as not."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    encoded = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(encoded)}\r\n\r\n"
    )
    writer.write(head.encode() + encoded)
    try:
        yield reader, writer
    finally:
        if len(encoded) % 2:
            writer.transport.abort()
        else:
            writer.close()


async def read_some(answer: Answer, num_frames: int) -> None:
    seen = 0
    async for _ in answer.frames():
        seen += 1
        if seen == num_frames:
            return
    raise AssertionError(f"the stream ended by itself after {seen} events")


async def until_done(queue: Queue, job_id: str) -> tuple[str, int]:
    """How a job ended, and with how many tokens."""
    async with asyncio.timeout(LIVENESS_S):
        while (status := await queue.status(JobId(job_id))) is None or status.state != "done":
            pass
    return status.reason, status.num_tokens


async def at_rest(redis: Redis, queue_name: str) -> None:
    """Until the worker says that nobody is seated and every block is free."""
    async with asyncio.timeout(LIVENESS_S):
        while True:
            (view,) = await list_workers(redis, queue_name)
            if (view.num_running, view.num_waiting, view.num_free_blocks) == (0, 0, view.num_blocks):
                return


class Neighbours:
    """Four answers that are read to their end, one after the other and for as long as the block lasts."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._is_over = False
        self.num_read = 0

    async def __aenter__(self) -> Neighbours:
        self._tasks = [asyncio.create_task(self._read(n)) for n in range(1, 5)]
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        self._is_over = True
        await asyncio.wait_for(asyncio.gather(*self._tasks), LIVENESS_S)

    async def _read(self, number: int) -> None:
        while not self._is_over:
            job = await self._client.enqueue([number], max_tokens=200, ignore_eos=True)
            assert (await job.result(LIVENESS_S)).token_ids == expected([number], 200)
            self.num_read += 1


async def test_streams_closed_at_any_moment_stop_generating_and_disturb_nobody(
    start_worker: StartWorker, start_api: Any, client: AsyncClient, redis: Redis, queue_name: str
) -> None:
    """B11: two hundred, eight at once, in a cache that is too small; what was not said is not computed."""
    queue, paced, chance = Queue(redis, queue_name), Paced(0.002), random.Random(11)
    api = await start_api()

    async def one(number: int) -> None:
        body = {"model": queue_name, "prompt": [3 + number % 90] * chance.randint(1, 30), "stream": True}
        body |= {"max_tokens": MAX_TOKENS, "ignore_eos": True, "stop": ["\u0001"][: number % 2]}
        async with asking(api.port, "/v1/completions", body) as (reader, writer):
            answer = await asyncio.wait_for(read_head(reader, writer), LIVENESS_S)
            job_id = answer.headers["x-jitney-job-id"]
            if count := chance.choice((0, 1, 2, 3, 8, 30, 90)):
                await read_some(answer, count)
        reason, num_tokens = await until_done(queue, job_id)
        ended[job_id] = len(paced.steps)
        assert reason in ("cancel", "cancelled")
        assert num_tokens < MAX_TOKENS

    ended: dict[str, int] = {}
    settings = {"snapshot_every_s": 0.01, "max_unpublished_steps": MAX_AHEAD}
    async with start_worker(paced, engine=TIGHT, worker=settings):
        async with Neighbours(client) as neighbours:
            for start in range(0, NUM_CLOSED, 8):
                await asyncio.gather(*(one(number) for number in range(start, start + 8)))
        await at_rest(redis, queue_name)
    late = {job_id: paced.num_steps_of(job_id, since) for job_id, since in ended.items()}
    assert len(ended) == NUM_CLOSED
    assert max(late.values()) <= 2 * MAX_AHEAD + 1
    assert paced.num_preempted > 0, "the cache was large enough: half of the test proves nothing"
    assert neighbours.num_read >= 4


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_its_answer_stops_the_generation(
    start_worker: StartWorker, start_api: Any, redis: Redis, queue_name: str, stream: bool
) -> None:
    """B11: before the job is claimed, while it waits for a seat, while it reads its prompt, while it speaks."""
    queue, paced, chance = Queue(redis, queue_name), Paced(0.002), random.Random(12)
    api = await start_api(headers_hold_s=60)

    async def one(number: int, said: int) -> None:
        body = {"model": queue_name, "prompt": [3 + number] * 200, "max_tokens": 300, "ignore_eos": True}
        async with asking(api.port, "/v1/completions", {**body, "stream": stream, "metadata": {"n": str(number)}}):
            job_id = await found(number)
            async with asyncio.timeout(LIVENESS_S):
                while (status := await queue.status(JobId(job_id))) is not None and status.num_tokens < said:
                    pass
        reason, num_tokens = await until_done(queue, job_id)
        ended[job_id] = len(paced.steps)
        assert reason in ("cancel", "cancelled")
        assert num_tokens < 300

    async def found(number: int) -> str:
        """The job of this request, which the client does not know yet: by its prompt."""
        wanted = f'"prompt":[{3 + number},'.encode()
        async with asyncio.timeout(LIVENESS_S):
            while True:
                async for key in redis.scan_iter(queue.keys.body("*"), count=1_000):
                    if wanted in (await redis.get(key) or b""):
                        return key.decode().removeprefix(queue.keys.body(""))

    ended: dict[str, int] = {}
    small = {"max_num_seqs": 2, "num_blocks": 48, "max_num_batched_tokens": 16, "check": False}
    async with start_worker(paced, engine=small, worker={"snapshot_every_s": 0.01}):
        for start in range(0, 24, 6):
            await asyncio.gather(*(one(number, chance.choice((0, 0, 1, 5))) for number in range(start, start + 6)))
        await at_rest(redis, queue_name)
    late = {job_id: paced.num_steps_of(job_id, since) for job_id, since in ended.items()}
    assert len(ended) == 24
    assert max(late.values()) <= 2 * MAX_AHEAD + 1


async def test_readings_that_end_early_and_requests_that_fail_leave_no_subscription_and_no_connection(
    start_worker: StartWorker, start_api: Any, client: AsyncClient, redis: Redis, queue_name: str
) -> None:
    """B46: six hundred requests over one API, a third closed early, a third failing; flat after the first hundred."""
    there_before = {one["id"] for one in await redis.client_list()}
    api = await start_api()
    bodies: list[dict[str, Any]] = [
        {"prompt": [5], "max_tokens": 4, "ignore_eos": True},
        {"prompt": [6], "max_tokens": 300, "ignore_eos": True, "stream": True},
        {"prompt": [7] * 600, "max_tokens": 4},
    ]

    async def one(number: int) -> int:
        kind = number % 3
        async with asking(api.port, "/v1/completions", {"model": queue_name, **bodies[kind]}) as (reader, writer):
            answer = await asyncio.wait_for(read_head(reader, writer), LIVENESS_S)
            if kind == 1:
                await read_some(answer, 1 + number % 3)
            else:
                await answer.body()
            return answer.status

    async def names() -> dict[str, int]:
        """Of this test alone: the API that other tests share has connections of the same names."""
        found = [one["name"] for one in await redis.client_list() if one["id"] not in there_before]
        return {name: found.count(name) for name in found if name.startswith("jitney-") and name != "jitney-test"}

    async def no_channel() -> None:
        async with asyncio.timeout(LIVENESS_S):
            while await redis.pubsub_channels(f"{Keys(queue_name).prefix}:tokens:*"):
                pass

    seen = []
    async with start_worker(engine={"max_num_seqs": 16, "check": False}):
        for start in range(0, 600, 100):
            statuses = []
            at_once = 100 if start == 0 else 25  # the first hundred open what the pools will ever hold
            for first in range(start, start + 100, at_once):
                statuses += await asyncio.gather(*(one(number) for number in range(first, first + at_once)))
            assert statuses.count(400) in (33, 34)
            assert statuses.count(200) == 100 - statuses.count(400)
            await no_channel()
            seen.append(await names())
        assert await client.generate([1], max_tokens=5, ignore_eos=True)
    single = ("jitney-channel", "jitney-heartbeat", "jitney-bell")
    assert max(one.get(name, 0) for one in seen for name in single) == 1
    assert sum(seen[-1].values()) <= sum(seen[1].values()) + 4
