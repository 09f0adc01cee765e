"""The reader's promise: every event of a job once, in order, whatever happens to the channel."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from tests.client.scripted_worker import PATIENCE_S, ScriptedWorker, Turn, eventually

from jitney.async_client import AsyncClient, AsyncJob
from jitney.cards import QueueCard, write_card
from jitney.channel import ChannelReader
from jitney.connection import Redis, connect
from jitney.embedded import EmbeddedServer
from jitney.errors import InvalidJob, JobNotFound, QueueUnavailable, StreamLost
from jitney.follower import Follower, Message
from jitney.joblog import LOG_PAGE, LogPage
from jitney.keys import Keys, new_job_id
from jitney.messages import Event

NEVER_S = 3_600.0


@pytest.fixture
async def turn(client: AsyncClient, worker: ScriptedWorker) -> Turn:
    """One claimed job that has said nothing yet."""
    await client.enqueue("hello")
    return await worker.take()


@pytest.fixture
async def alert(redis_url: str) -> AsyncIterator[ChannelReader]:
    """A reader that looks into the log again after a tenth of a second of silence."""
    async with ChannelReader(redis_url, quiet_s=0.1) as reader:
        yield reader


@pytest.fixture
async def trusting(redis_url: str) -> AsyncIterator[ChannelReader]:
    """A reader that never looks by itself: what it finds, the channel or a subscription told it."""
    async with ChannelReader(redis_url, quiet_s=NEVER_S) as reader:
        yield reader


async def texts(follower: Follower, upto: int | None = None) -> list[str]:
    """Texts of the events, up to seq `upto` or to the end."""
    said: list[str] = []
    async with asyncio.timeout(PATIENCE_S):
        async for batch in follower:
            assert batch, "a batch is never empty"
            said += [message.event.text for message in batch]
            if batch[-1].event.seq == upto:
                break
    return said


async def num_subscribers(redis: Redis, channel: str) -> int:
    ((_, number),) = await redis.pubsub_numsub(channel)
    return int(number)


async def num_clients(redis: Redis) -> int:
    return len([one for one in await redis.client_list() if one["name"] != "jitney-test"])


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


async def test_a_cursor_beyond_what_is_written_waits_until_it_is_passed(turn: Turn, trusting: ChannelReader) -> None:
    await turn.say("a")
    async with trusting.follow(turn.id, cursor=2) as stream:
        assert await stream.read(0.05) == []
        await turn.say("b", "c")
        assert await texts(stream, upto=3) == ["c"]


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
        both = b"\n".join((Event("tokens", 2, text="b").encode(), Event("tokens", 3, text="c").encode()))
        await redis.publish(turn.queue.keys.tokens(turn.id), both)
        assert await texts(stream, upto=3) == ["b", "c"]


async def write_unpublished(redis: Redis, turn: Turn, text: str) -> None:
    """Into the log and the record, as `say` does, but without a word on the channel."""
    keys, event = turn.queue.keys, turn.next_event(text)
    await redis.xadd(keys.tokens(turn.id), {"e": event.encode()}, id=f"{event.seq}-0")
    await redis.hset(keys.job(turn.id), mapping={"seq": event.seq, "n": turn.num_tokens + 1})
    turn.seq, turn.num_tokens = event.seq, turn.num_tokens + 1


async def test_a_gap_on_the_channel_is_filled_from_the_log(redis: Redis, turn: Turn, trusting: ChannelReader) -> None:
    async with trusting.follow(turn.id) as stream:
        await turn.say("a")
        assert await texts(stream, upto=1) == ["a"]
        await write_unpublished(redis, turn, "b")
        await turn.say("c")
        assert await texts(stream, upto=3) == ["b", "c"]


async def test_a_lost_last_message_is_found_after_a_silence(redis: Redis, turn: Turn, alert: ChannelReader) -> None:
    async with alert.follow(turn.id) as stream:
        await turn.say("a")
        assert await texts(stream, upto=1) == ["a"]
        await write_unpublished(redis, turn, "b")
        assert await texts(stream, upto=2) == ["b"]


async def test_a_killed_connection_is_made_again_and_nothing_is_missed(
    redis: Redis, turn: Turn, trusting: ChannelReader
) -> None:
    """What is said in the moment without a connection is found by the look that follows each confirmation."""
    async with trusting.follow(turn.id) as stream:
        await turn.say("a")
        assert await texts(stream, upto=1) == ["a"]
        keys, event = turn.queue.keys, turn.next_event("b")
        pipeline = redis.pipeline(transaction=True)
        pipeline.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        pipeline.xadd(keys.tokens(turn.id), {"e": event.encode()}, id=f"{event.seq}-0")
        pipeline.publish(keys.tokens(turn.id), event.encode())
        killed, _, num_receivers = await pipeline.execute()
        assert killed >= 1
        assert num_receivers == 0
        assert await texts(stream, upto=2) == ["b"]


async def test_strange_words_on_a_channel_disturb_nobody(redis: Redis, turn: Turn, trusting: ChannelReader) -> None:
    words = (b"\xff\xfe", b"[]", b'"x"', b"{}", b'{"type":"tokens","seq":"2"}', b'{"type":"tokens"}', b"", b"\n")
    async with trusting.follow(turn.id) as stream:
        for seq, word in enumerate(words, start=1):
            await turn.say(str(seq))
            assert await texts(stream, upto=seq) == [str(seq)]
            await redis.publish(turn.queue.keys.tokens(turn.id), word)
        await turn.finish("a")
        assert await texts(stream) == ["a", ""]


async def test_a_log_with_a_hole_is_said_to_be_lost(redis: Redis, turn: Turn, trusting: ChannelReader) -> None:
    await turn.say(*"abc")
    await redis.xdel(turn.queue.keys.tokens(turn.id), "2-0")
    async with trusting.follow(turn.id) as stream:
        assert await texts(stream, upto=1) == ["a"]
        with pytest.raises(StreamLost, match="hole after event 1"):
            await stream.read(PATIENCE_S)


async def test_an_unknown_job_is_not_found(redis_url: str, queue_name: str, trusting: ChannelReader) -> None:
    async with trusting.follow(new_job_id(queue_name)) as stream:
        with pytest.raises(JobNotFound):
            await stream.read(PATIENCE_S)


@pytest.mark.parametrize("job_id", ["", "x", "a:b.0123456789012345678901", "*", "../x", "q.{tag}", "q." + "x" * 300])
async def test_what_is_no_job_id_never_becomes_a_channel(job_id: str, trusting: ChannelReader) -> None:
    with pytest.raises(InvalidJob, match="is not a job id"):
        async with trusting.follow(job_id):
            pass


async def test_a_log_that_vanishes_is_told_after_a_silence(redis: Redis, turn: Turn, alert: ChannelReader) -> None:
    await turn.say("a")
    async with alert.follow(turn.id) as stream:
        assert await texts(stream, upto=1) == ["a"]
        await redis.delete(turn.queue.keys.tokens(turn.id), turn.queue.keys.job(turn.id))
        with pytest.raises(StreamLost, match="events up to 1 were read"):
            await stream.read(PATIENCE_S)


async def test_a_job_that_vanishes_while_it_waits_is_told(
    redis: Redis, client: AsyncClient, alert: ChannelReader, queue_name: str
) -> None:
    job = await client.enqueue("hello")
    async with alert.follow(job.id) as stream:
        assert await stream.read(0.01) == []
        await redis.delete(Keys(queue_name).job(job.id))
        with pytest.raises((StreamLost, JobNotFound)):  # which one: whether the first look came before
            await asyncio.wait_for(stream.read(), PATIENCE_S)


async def test_a_log_whose_record_is_gone_will_never_end(redis: Redis, turn: Turn, alert: ChannelReader) -> None:
    await turn.say("a")
    async with alert.follow(turn.id) as stream:
        assert await texts(stream, upto=1) == ["a"]
        await redis.delete(turn.queue.keys.job(turn.id))
        with pytest.raises(StreamLost):
            await asyncio.wait_for(stream.read(), PATIENCE_S)


async def test_an_ended_job_whose_log_is_gone_is_told_at_once(
    redis: Redis, turn: Turn, trusting: ChannelReader
) -> None:
    await turn.finish("a")
    await redis.delete(turn.queue.keys.tokens(turn.id))
    async with trusting.follow(turn.id) as stream:
        with pytest.raises(JobNotFound):
            await asyncio.wait_for(stream.read(), PATIENCE_S)


async def test_another_data_set_ends_the_streams_of_its_queue_alone(
    redis: Redis, turn: Turn, alert: ChannelReader, queue_name: str
) -> None:
    other = Keys(f"{queue_name}-other")
    await turn.queue.epoch()
    neighbour = new_job_id(other.queue)
    await redis.hset(other.job(neighbour), mapping={"state": "running", "seq": 0})
    await turn.say("a")
    async with alert.follow(turn.id) as stream, alert.follow(neighbour) as untouched:
        assert await texts(stream, upto=1) == ["a"]
        assert await untouched.read(0.01) == []
        await redis.set(turn.queue.keys.epoch, "another")
        with pytest.raises(StreamLost, match="was replaced"):
            await stream.read(PATIENCE_S)
        assert await untouched.read(0.01) == []


async def test_a_folded_log_reads_like_any_other(turn: Turn, trusting: ChannelReader) -> None:
    await turn.say(*(str(n) for n in range(LOG_PAGE + 10)))
    await turn.finish("end")
    assert await turn.queue.fold(turn.delivery.id) == "ok"
    async with trusting.follow(turn.id) as stream:
        assert await texts(stream) == [*(str(n) for n in range(LOG_PAGE + 10)), "end", ""]
    async with trusting.follow(turn.id, cursor=LOG_PAGE + 10) as stream:
        assert await texts(stream) == ["end", ""]


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


async def test_a_channel_left_and_joined_again_at_once_is_still_followed(turn: Turn, trusting: ChannelReader) -> None:
    for n in range(20):
        async with trusting.follow(turn.id, cursor=n) as stream:
            await turn.say(str(n))
            assert await texts(stream, upto=n + 1) == [str(n)]


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


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def test_no_server_at_all_is_said_at_once(queue_name: str) -> None:
    async with ChannelReader(f"redis://:secret@127.0.0.1:{closed_port()}/0", open_timeout_s=0.2) as reader:
        with pytest.raises(QueueUnavailable, match="Connect call failed") as raised:
            async with reader.follow(new_job_id(queue_name)):
                pass
        assert "secret" not in str(raised.value)


async def test_a_reader_outlives_a_restart_of_the_server(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path / "server", appendfsync="always") as server:
        redis = connect(server.url)
        try:
            async with AsyncClient(server.url, queue="q") as client:
                await write_card(redis, "q", QueueCard(model="m", max_model_len=64, vocab_size=10))
                job = await client.enqueue("hello")
                turn = await ScriptedWorker(redis, "q").take()
                await turn.say("a")
                async with client.reader.follow(job.id) as stream:
                    assert await texts(stream, upto=1) == ["a"]
                    server.kill()
                    assert await stream.read(0.2) == []
                    server.start()
                    await turn.finish("b")
                    assert await texts(stream) == ["b", ""]
        finally:
            await redis.aclose()


async def test_an_outage_without_end_is_told_to_those_who_wait(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "server").start()
    redis = connect(server.url)
    try:
        job_id = new_job_id("q")
        await redis.hset(Keys("q").job(job_id), mapping={"state": "running", "seq": 0})
        async with ChannelReader(server.url, max_outage_s=0.2) as reader, reader.follow(job_id) as stream:
            assert await stream.read(0.05) == []
            server.stop()
            with pytest.raises(QueueUnavailable):
                await asyncio.wait_for(stream.read(), PATIENCE_S)
    finally:
        await redis.aclose()
        server.stop()


async def test_closing_the_reader_ends_its_streams(redis_url: str, turn: Turn) -> None:
    reader = ChannelReader(redis_url)
    async with reader.follow(turn.id) as stream:
        waiting = asyncio.create_task(stream.read())
        await asyncio.sleep(0)
        await reader.aclose()
        with pytest.raises(QueueUnavailable, match="closed"):
            await waiting


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


async def test_an_abandoned_async_stream_unsubscribes(redis: Redis, client: AsyncClient, turn: Turn) -> None:
    await turn.say(*"abc")
    async with aclosing(client.job(turn.id).stream()) as events:
        async for event in events:
            assert event.text == "a"
            break

    async def nobody() -> bool:
        return await num_subscribers(redis, turn.queue.keys.tokens(turn.id)) == 0

    await eventually(nobody)


async def test_a_follower_keeps_no_more_than_it_may() -> None:
    """The bound itself, without a server: beyond it the buffer is dropped and the log is asked."""
    asked: list[int] = []

    async def nothing() -> LogPage:
        return LogPage([])

    def start_read(job_id: str, cursor: int) -> asyncio.Task[LogPage | None]:
        asked.append(cursor)
        return asyncio.create_task(nothing())

    for max_messages, max_bytes in ((3, 1_000_000), (1_000, 3 * len(tokens(1).payload))):
        follower = Follower("q.x", 0, start_read, max_messages=max_messages, max_bytes=max_bytes, max_outage_s=NEVER_S)
        assert await follower.read(0.05) == []
        asked.clear()
        for seq in (1, 2, 3):
            follower.offer([tokens(seq)])
        assert follower.newest == 3
        follower.offer([tokens(4)])
        assert follower.newest == 0
        assert await follower.read(0.05) == []
        assert asked == [0]


async def test_a_read_of_the_log_that_fails_is_tried_again() -> None:
    async def read(attempt: int) -> LogPage:
        if attempt < 3:
            raise RedisConnectionError("cut")
        return LogPage([tokens(1).payload])

    attempts = itertools.count(1)
    follower = Follower(
        "q.x",
        0,
        lambda job_id, cursor: asyncio.create_task(read(next(attempts))),
        max_messages=10,
        max_bytes=10_000,
        max_outage_s=NEVER_S,
    )
    assert [message.event.seq for message in await follower.read(PATIENCE_S)] == [1]


def tokens(seq: int) -> Message:
    event = Event("tokens", seq, text="word")
    return Message(event, event.encode())
