"""The reader's promise: every event of a job once, in order, to whoever follows it."""

from __future__ import annotations

import asyncio

from tests.client.reading import num_subscribers, texts
from tests.client.scripted_worker import PATIENCE_S, ScriptedWorker, Turn

from jitney.async_client import AsyncClient, AsyncJob
from jitney.channel import ChannelReader
from jitney.connection import Redis, connect
from jitney.joblog import LOG_PAGE
from jitney.messages import Event


async def test_a_subscriber_who_comes_after_the_end_reads_everything(turn: Turn, trusting: ChannelReader) -> None:
    await turn.say(*"abc")
    await turn.finish("d")
    async with trusting.follow(turn.id) as stream:
        assert await texts(stream) == ["a", "b", "c", "d", ""]
        assert stream.ended
        assert await stream.read() == []


async def test_what_was_said_before_and_after_subscribing_comes_once_and_in_order(
    turn: Turn, trusting: ChannelReader
) -> None:
    await turn.say(*"abc")
    async with trusting.follow(turn.id) as stream:
        assert await texts(stream, upto=3) == ["a", "b", "c"]
        await turn.say(*"de")
        assert await texts(stream, upto=5) == ["d", "e"]
        await turn.finish()
        assert await texts(stream) == ["", ""]


async def test_payloads_are_the_very_bytes_of_the_log(redis: Redis, turn: Turn, trusting: ChannelReader) -> None:
    await turn.say("a")
    async with trusting.follow(turn.id) as stream:
        batch = await stream.read(PATIENCE_S)
        await turn.finish("é")
        batch += [message async for more in stream for message in more]
    stored = await redis.xrange(turn.queue.keys.tokens(turn.id))
    assert [message.payload for message in batch] == [fields[b"e"] for _, fields in stored]


async def test_a_reader_goes_on_from_its_cursor(turn: Turn, trusting: ChannelReader) -> None:
    await turn.say(*"abcdef")
    async with trusting.follow(turn.id, cursor=4) as stream:
        assert await texts(stream, upto=6) == ["e", "f"]
        await turn.finish("g")
        assert await texts(stream) == ["g", ""]


async def test_a_cursor_at_the_end_of_an_ended_job_ends_at_once(turn: Turn, trusting: ChannelReader) -> None:
    await turn.finish("a")
    async with trusting.follow(turn.id, cursor=2) as stream:
        assert await texts(stream) == []


async def test_two_readers_share_a_subscription_and_miss_nothing(
    redis: Redis, turn: Turn, trusting: ChannelReader
) -> None:
    async with trusting.follow(turn.id) as early, trusting.follow(turn.id) as other:
        await turn.say("a")
        assert await texts(early, upto=1) == ["a"]
        async with trusting.follow(turn.id) as late:
            assert await num_subscribers(redis, turn.queue.keys.tokens(turn.id)) == 1
            await turn.finish("b")
            assert await texts(late) == ["a", "b", ""]
        assert await texts(early) == ["b", ""]
        assert await texts(other) == ["a", "b", ""]


async def test_a_reader_who_leaves_takes_nothing_from_another(turn: Turn, trusting: ChannelReader) -> None:
    async with trusting.follow(turn.id) as stays:
        async with trusting.follow(turn.id) as leaves:
            await turn.say("a")
            assert await texts(leaves, upto=1) == ["a"]
        await turn.finish("b")
        assert await texts(stays) == ["a", "b", ""]


async def test_fifty_streams_keep_to_their_own_words(
    client: AsyncClient, worker: ScriptedWorker, trusting: ChannelReader
) -> None:
    """Ten readers leave early, ten read only after the end (bug case B13)."""
    jobs = [await client.enqueue(f"job {n}") for n in range(50)]
    turns = await worker.claim(credit=50)
    by_id = {turn.id: turn for turn in turns}

    async def follow(number: int, job: AsyncJob) -> list[str]:
        turn = by_id[job.id]
        async with trusting.follow(job.id) as stream:
            if number % 5 == 0:
                await turn.say(f"{job.id}:0")
                return await texts(stream, upto=1)
            for n in range(20):
                await turn.say(f"{job.id}:{n}")
            await turn.finish("end")
            return await texts(stream)

    said = await asyncio.gather(*(follow(number, job) for number, job in enumerate(jobs)))
    for number, (job, words) in enumerate(zip(jobs, said, strict=True)):
        whole = [f"{job.id}:{n}" for n in range(20)] + ["end", ""]
        assert words == (whole[:1] if number % 5 == 0 else whole)


async def test_repeats_on_the_channel_are_dropped(redis: Redis, turn: Turn, trusting: ChannelReader) -> None:
    async with trusting.follow(turn.id) as stream:
        await turn.say(*"ab")
        assert await texts(stream, upto=2) == ["a", "b"]
        for seq in (1, 2, 2):
            await redis.publish(turn.queue.keys.tokens(turn.id), Event("tokens", seq, text="again").encode())
        await turn.finish("c")
        assert await texts(stream) == ["c", ""]


async def test_several_events_in_one_message_are_told_apart(redis: Redis, turn: Turn, trusting: ChannelReader) -> None:
    async with trusting.follow(turn.id) as stream:
        await turn.say("a")
        assert await texts(stream, upto=1) == ["a"]
        both = b"\n".join(
            (Event("tokens", 2, index=1, text="b").encode(), Event("tokens", 3, index=1, text="c").encode())
        )
        await redis.publish(turn.queue.keys.tokens(turn.id), both)
        assert await texts(stream, upto=3) == ["b", "c"]


async def test_a_folded_log_reads_like_any_other(turn: Turn, trusting: ChannelReader) -> None:
    await turn.say(*(str(n) for n in range(LOG_PAGE + 10)))
    await turn.finish("end")
    assert await turn.queue.fold(turn.delivery.id) == "ok"
    async with trusting.follow(turn.id) as stream:
        assert await texts(stream) == [*(str(n) for n in range(LOG_PAGE + 10)), "end", ""]
    async with trusting.follow(turn.id, cursor=LOG_PAGE + 10) as stream:
        assert await texts(stream) == ["end", ""]


async def test_a_channel_left_and_joined_again_at_once_is_still_followed(turn: Turn, trusting: ChannelReader) -> None:
    for n in range(20):
        async with trusting.follow(turn.id, cursor=n) as stream:
            await turn.say(str(n))
            assert await texts(stream, upto=n + 1) == [str(n)]


async def test_anybody_with_redis_cli_sees_readable_json(redis_url: str, turn: Turn) -> None:
    plain = connect(redis_url, name="jitney-test")
    async with plain.pubsub() as pubsub:
        await pubsub.subscribe(f"{{jitney:{turn.queue.name}}}:tokens:{turn.id}")
        assert (await pubsub.get_message(timeout=PATIENCE_S))["type"] == "subscribe"
        await turn.say("Once", " upon")
        heard = [(await pubsub.get_message(timeout=PATIENCE_S))["data"].decode() for _ in range(2)]
    await plain.aclose()
    assert heard == [
        '{"v":1,"type":"tokens","seq":1,"index":0,"token_ids":[0],"text":"Once"}',
        '{"v":1,"type":"tokens","seq":2,"index":1,"token_ids":[1],"text":" upon"}',
    ]
