"""What gets lost on the way, and how a reader finds it, or says that it cannot."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Mapping
from pathlib import Path

import pytest
import redis.asyncio as aredis
from redis.exceptions import BusyLoadingError, MasterDownError, ReadOnlyError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from tests.api.refusing_redis import RefusingRedis
from tests.client.reading import NEVER_S, texts, tokens
from tests.client.scripted_worker import PATIENCE_S, ScriptedWorker, Turn, eventually

from jitney.async_client import AsyncClient
from jitney.cards import QueueCard, write_card
from jitney.channel import ChannelReader
from jitney.connection import Redis, connect
from jitney.embedded import EmbeddedServer
from jitney.errors import InvalidJob, JobNotFound, QueueUnavailable, StreamLost
from jitney.follower import Follower
from jitney.joblog import LogPage, LogReader
from jitney.keys import Keys, new_job_id


async def write_unpublished(redis: Redis, turn: Turn, text: str) -> None:
    """Into the log and the record, as `say` does, but without a word on the channel."""
    keys, event = turn.queue.keys, turn.next_event(text)
    await redis.xadd(keys.tokens(turn.id), {"e": event.encode()}, id=f"{event.seq}-0")
    await redis.hset(keys.job(turn.id), mapping={"seq": event.seq, "n": turn.num_tokens + 1})
    turn.seq, turn.num_tokens = event.seq, turn.num_tokens + 1
    turn.next_index[0] += 1


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


@pytest.mark.parametrize("damage", ["no hash", "no seq"])
async def test_one_record_that_is_none_keeps_no_other_reader_from_a_lost_message(
    redis: Redis, client: AsyncClient, turn: Turn, worker: ScriptedWorker, alert: ChannelReader, damage: str
) -> None:
    """All quiet jobs of a process are looked after together."""
    await client.enqueue("broken")
    broken = await worker.take()
    record = turn.queue.keys.job(broken.id)
    async with alert.follow(turn.id) as stream, alert.follow(broken.id) as other:
        assert await stream.read(0.1) == await other.read(0.1) == []
        if damage == "no hash":
            await redis.set(record, "not a hash")
        else:
            await redis.hset(record, "seq", "not a number")
        await write_unpublished(redis, turn, "a")
        assert await texts(stream, upto=1) == ["a"]
        if damage == "no hash":
            with pytest.raises(QueueUnavailable, match="WRONGTYPE"):
                await other.read(PATIENCE_S)


async def test_whoever_reads_on_after_an_error_hears_what_was_said_meanwhile(
    redis: Redis, turn: Turn, trusting: ChannelReader
) -> None:
    record = turn.queue.keys.job(turn.id)
    async with trusting.follow(turn.id) as stream:
        await turn.say("a")
        assert await texts(stream, upto=1) == ["a"]
        kept = await redis.dump(record)
        await redis.set(record, "not a hash")
        stream.look()
        with pytest.raises(QueueUnavailable, match="WRONGTYPE"):
            await stream.read(PATIENCE_S)
        await redis.restore(record, 0, kept, replace=True)
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


@pytest.mark.parametrize(
    "refusal", [b"LOADING reading", b"MASTERDOWN no link", b"READONLY a replica", b"CLUSTERDOWN no slot"]
)
async def test_a_reader_outlives_a_failover_whatever_the_server_says_meanwhile(
    server: EmbeddedServer, turn: Turn, refusal: bytes
) -> None:
    async with RefusingRedis(server.port) as between:
        url = server.url.replace(f":{server.port}/", f":{between.port}/")
        async with ChannelReader(url, quiet_s=0.1) as reader, reader.follow(turn.id) as stream:
            await turn.say("a")
            assert await texts(stream, upto=1) == ["a"]
            await between.refuse(refusal)
            await turn.say("b")
            reading = asyncio.create_task(texts(stream))

            async def has_been_refused() -> bool:
                await asyncio.sleep(0)
                return between.num_refused >= 4  # by the channel and by the log

            await eventually(has_been_refused)
            assert not reading.done()
            await between.relent()
            await turn.finish("c")
            assert await reading == ["b", "c", ""]


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


@pytest.mark.parametrize(
    "error", [RedisConnectionError, RedisTimeoutError, BusyLoadingError, MasterDownError, ReadOnlyError, OSError]
)
async def test_a_read_of_the_log_that_fails_is_tried_again(error: type[Exception]) -> None:
    async def read(attempt: int) -> LogPage:
        if attempt < 3:
            raise error("not now")
        return LogPage([tokens(1).payload])

    attempts = itertools.count(1)
    follower = Follower(
        "q.x",
        0,
        lambda job_id, cursor: asyncio.create_task(read(next(attempts))),
        max_messages=10,
        max_bytes=10_000,
        max_outage_s=NEVER_S,
        regrowth_s=NEVER_S,
    )
    assert [message.event.seq for message in await follower.read(PATIENCE_S)] == [1]


@pytest.mark.parametrize("error", [AttributeError("'NoneType' object has no attribute 'writelines'"), KeyError("x")])
async def test_whatever_breaks_the_connection_the_next_one_is_made(
    turn: Turn, alert: ChannelReader, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """redis-py lets errors through that are none of its own: one of them ended every stream of a process, for good."""
    subscribe, errors = aredis.client.PubSub.subscribe, [error]

    async def broken_once(self: aredis.client.PubSub, *channels: bytes) -> None:
        if errors:
            raise errors.pop()
        await subscribe(self, *channels)

    monkeypatch.setattr(aredis.client.PubSub, "subscribe", broken_once)
    async with alert.follow(turn.id) as stream:
        await turn.say("a")
        assert await texts(stream, upto=1) == ["a"]
    assert errors == []


async def test_a_reader_that_failed_serves_the_next_followers(
    redis: Redis, turn: Turn, alert: ChannelReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of our own in the watch is told to everybody once, and not kept for whoever comes later."""
    news, failures = LogReader.news, [RuntimeError("a bug")]

    async def broken_once(self: LogReader, seen: Mapping[str, int]) -> set[str]:
        if self is alert._logs and failures:  # the reader of an API in this process looks too
            raise failures.pop()
        return await news(self, seen)

    monkeypatch.setattr(LogReader, "news", broken_once)
    async with alert.follow(turn.id) as stream:
        with pytest.raises(QueueUnavailable, match="a bug"):
            await texts(stream, upto=1)
    async with alert.follow(turn.id) as stream:
        await turn.say("a")
        assert await texts(stream, upto=1) == ["a"]
        await write_unpublished(redis, turn, "b")  # which only the watch can find
        assert await texts(stream, upto=2) == ["b"]
