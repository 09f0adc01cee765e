"""What a reader may hold: messages, subscriptions, connections; and that it lets go of them."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
from tests.client.reading import NEVER_S, num_subscribers, texts, tokens
from tests.client.scripted_worker import PATIENCE_S, ScriptedWorker, Turn, eventually

from jitney.async_client import AsyncClient
from jitney.channel import ChannelReader
from jitney.connection import Redis
from jitney.errors import JobNotFound, QueueUnavailable
from jitney.follower import Follower
from jitney.joblog import LogPage
from jitney.keys import new_job_id


async def num_clients(redis: Redis) -> int:
    return len([one for one in await redis.client_list() if one["name"] != "jitney-test"])


async def test_early_closed_streams_leave_neither_subscription_nor_connection(
    redis: Redis, client: AsyncClient, worker: ScriptedWorker, trusting: ChannelReader
) -> None:
    """Bug case B46: a third closed early, a third failing."""
    jobs = [await client.enqueue("hello") for _ in range(30)]
    for turn in await worker.claim(credit=30):
        await turn.say("a")
    async with trusting.follow(jobs[0].id) as stream:
        await stream.read(PATIENCE_S)
    before = await num_clients(redis)

    async def one(number: int) -> None:
        job_id = jobs[number % 30].id if number % 3 else new_job_id(worker.queue.name)
        async with trusting.follow(job_id) as stream:
            if number % 3 == 0:
                with pytest.raises(JobNotFound):
                    await stream.read(PATIENCE_S)
            elif number % 3 == 1:
                await stream.read(PATIENCE_S)

    for start in range(0, 600, 100):
        await asyncio.gather(*(one(number) for number in range(start, start + 100)))

    async def nobody() -> bool:
        return await redis.pubsub_channels(f"{worker.queue.keys.prefix}*") == []

    await eventually(nobody)
    assert await num_clients(redis) <= before + 7  # the log's own connections, at most eight


async def test_an_abandoned_async_stream_unsubscribes(redis: Redis, client: AsyncClient, turn: Turn) -> None:
    await turn.say(*"abc")
    async with aclosing(client.job(turn.id).stream()) as events:
        async for event in events:
            assert event.text == "a"
            break

    async def nobody() -> bool:
        return await num_subscribers(redis, turn.queue.keys.tokens(turn.id)) == 0

    await eventually(nobody)


async def test_a_slow_reader_loses_nothing(redis_url: str, turn: Turn) -> None:
    async with (
        ChannelReader(redis_url, quiet_s=NEVER_S, max_messages=10) as small,
        small.follow(turn.id) as slow,
        small.follow(turn.id) as fast,
    ):
        assert await slow.read(0.01) == []
        expected = []
        for n in range(60):
            words = [f"{n}.{k}" for k in range(10)]
            await turn.say(*words)
            assert await texts(fast, upto=turn.seq) == words
            expected += words
        await turn.finish()
        assert await texts(slow) == [*expected, "", ""]


async def test_a_timeout_or_a_cancellation_while_reading_loses_nothing(turn: Turn, trusting: ChannelReader) -> None:
    async with trusting.follow(turn.id) as stream:
        said: list[str] = []
        for n in range(50):
            reading = asyncio.create_task(stream.read())
            if n % 2:
                await asyncio.sleep(0)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await turn.say(str(n))
            said += [message.event.text for message in await stream.read(0.0)]
        await turn.finish()
        said += await texts(stream)
    assert said == [*(str(n) for n in range(50)), "", ""]


async def test_closing_the_reader_ends_its_streams(redis_url: str, turn: Turn) -> None:
    reader = ChannelReader(redis_url)
    async with reader.follow(turn.id) as stream:
        waiting = asyncio.create_task(stream.read())
        await asyncio.sleep(0)
        await reader.aclose()
        with pytest.raises(QueueUnavailable, match="closed"):
            await waiting


async def test_a_follower_keeps_no_more_than_it_may() -> None:
    """The bound itself, without a server: beyond it the buffer is dropped and the log is asked."""
    asked: list[int] = []

    async def nothing() -> LogPage:
        return LogPage([])

    def start_read(job_id: str, cursor: int) -> asyncio.Task[LogPage | None]:
        asked.append(cursor)
        return asyncio.create_task(nothing())

    for max_messages, max_bytes in ((3, 1_000_000), (1_000, 3 * len(tokens(1).payload))):
        follower = Follower(
            "q.x",
            0,
            start_read,
            max_messages=max_messages,
            max_bytes=max_bytes,
            max_outage_s=NEVER_S,
            regrowth_s=NEVER_S,
        )
        assert await follower.read(0.05) == []
        asked.clear()
        for seq in (1, 2, 3):
            follower.offer([tokens(seq)])
        assert follower.newest == 3
        follower.offer([tokens(4)])
        assert follower.newest == 0
        assert await follower.read(0.05) == []
        assert asked == [0]
