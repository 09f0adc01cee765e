"""A server that came back with less than it had confirmed: for a reader the same log, or another one.

The power cut is acted out on the log itself: its last events go, and the record says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.client.reading import NEVER_S, num_subscribers, texts
from tests.client.scripted_worker import PATIENCE_S, ScriptedWorker, Turn, eventually

from jitney.async_client import AsyncClient
from jitney.channel import ChannelReader
from jitney.connection import Redis
from jitney.errors import JobNotFound, StreamLost
from jitney.follower import Follower
from jitney.gathering import gather
from jitney.keys import new_job_id


async def roll_back(redis: Redis, turn: Turn, seq: int) -> list[bytes]:
    """The log of one-token events ends at `seq` again. Returns what stood behind it."""
    keys = turn.queue.keys
    payloads = [fields[b"e"] for _, fields in await redis.xrange(keys.tokens(turn.id))]
    pipeline = redis.pipeline(transaction=True)
    pipeline.delete(keys.tokens(turn.id))
    for number, payload in enumerate(payloads[:seq], start=1):
        pipeline.xadd(keys.tokens(turn.id), {"e": payload}, id=f"{number}-0")
    pipeline.hset(keys.job(turn.id), mapping={"seq": seq, "n": seq})
    await pipeline.execute()
    turn.seq, turn.num_tokens, turn.next_index[0] = seq, seq, seq
    return payloads[seq:]


async def four_tokens(turn: Turn, stream: Follower) -> None:
    """Said and read: the cursor stands at 4."""
    await turn.say(*"abcd")
    assert await texts(stream, upto=4) == ["a", "b", "c", "d"]


async def reconnect(redis: Redis, turn: Turn) -> None:
    """As after a restart: the channel's connection is made anew, and its followers look into their logs."""
    channel = turn.queue.keys.tokens(turn.id)
    assert await redis.execute_command("CLIENT", "KILL", "TYPE", "pubsub") >= 1

    async def is_back() -> bool:
        return await num_subscribers(redis, channel) == 1

    await eventually(is_back)


@pytest.fixture
async def hasty(redis_url: str) -> AsyncIterator[ChannelReader]:
    """A reader that looks often, and gives a log a fifth of a second to grow again."""
    async with ChannelReader(redis_url, quiet_s=0.1, regrowth_s=0.2) as reader:
        yield reader


@pytest.fixture
async def patient(redis_url: str) -> AsyncIterator[ChannelReader]:
    """A reader that looks only when its connection was lost, and then waits for ever."""
    async with ChannelReader(redis_url, quiet_s=NEVER_S, regrowth_s=NEVER_S) as reader:
        yield reader


async def test_a_log_that_is_written_again_byte_for_byte_goes_on_as_if_nothing_had_been(
    redis: Redis, turn: Turn, patient: ChannelReader
) -> None:
    """The reader meets the log while it is too short, and goes on once its worker has written what was missing."""
    async with patient.follow(turn.id) as stream:
        await four_tokens(turn, stream)
        lost = await roll_back(redis, turn, 2)
        await reconnect(redis, turn)
        assert await stream.read(0.3) == []
        await turn.say_again(lost)
        await turn.say("e")
        await turn.finish("f")
        assert await texts(stream) == ["e", "f", ""]


async def test_a_log_that_has_grown_again_before_its_reader_looks_is_the_same_one(
    redis: Redis, turn: Turn, patient: ChannelReader
) -> None:
    async with patient.follow(turn.id) as stream:
        await four_tokens(turn, stream)
        await turn.say_again(await roll_back(redis, turn, 2))
        await reconnect(redis, turn)
        await turn.finish("e")
        assert await texts(stream) == ["e", ""]


@pytest.mark.parametrize("more", [0, 1, 3])
async def test_a_log_with_other_events_behind_the_cursor_is_told_and_nothing_of_it_is_given_out(
    redis: Redis, turn: Turn, patient: ChannelReader, more: int
) -> None:
    """It has the same number of events as before, or more: the number alone says nothing."""
    async with patient.follow(turn.id) as stream:
        await four_tokens(turn, stream)
        await roll_back(redis, turn, 2)
        await redis.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        await turn.say("C", "D", *"more"[:more])
        with pytest.raises(StreamLost, match="has another event 4 than the one that was read"):
            await texts(stream)


async def test_other_events_are_noticed_on_a_connection_that_was_never_lost(
    redis: Redis, turn: Turn, patient: ChannelReader
) -> None:
    """The next event goes on at another token than the last one read: the log is asked, and is another one."""
    async with patient.follow(turn.id) as stream:
        await four_tokens(turn, stream)
        await roll_back(redis, turn, 2)
        await turn.start()  # another claim's first words: `started` stands where a token stood
        await turn.say("d")
        with pytest.raises(StreamLost, match="has another event 4"):
            await texts(stream)


async def test_a_strangers_word_with_a_wrong_index_is_not_believed(
    redis: Redis, turn: Turn, patient: ChannelReader
) -> None:
    """The channel may lie; the log then says that all is well."""
    async with patient.follow(turn.id) as stream:
        await turn.say(*"ab")
        assert await texts(stream, upto=2) == ["a", "b"]
        event = turn.next_event("lie")
        lie = event.encode().replace(b'"index":2', b'"index":0')
        await redis.publish(turn.queue.keys.tokens(turn.id), lie)
        await turn.finish("c")
        assert await texts(stream) == ["c", ""]


async def test_a_log_whose_own_tokens_do_not_add_up_is_told_after_those_that_do(
    turn: Turn, trusting: ChannelReader
) -> None:
    await turn.say(*"ab")
    turn.next_index[0] = 1
    await turn.say("again")
    async with trusting.follow(turn.id) as stream:
        assert await texts(stream, upto=2) == ["a", "b"]
        with pytest.raises(StreamLost, match="goes on with token 1 of choice 0 after 2 of them were read"):
            await texts(stream)


async def test_a_log_that_stays_shorter_is_told_after_a_while(redis: Redis, turn: Turn, hasty: ChannelReader) -> None:
    async with hasty.follow(turn.id) as stream:
        await turn.say(*"abc")
        assert await texts(stream, upto=3) == ["a", "b", "c"]
        await roll_back(redis, turn, 1)
        with pytest.raises(StreamLost, match="no longer reaches event 3, which was read: it ends at 1"):
            await texts(stream)


@pytest.mark.parametrize("state", ["waiting", "returned", "later", "done"])
async def test_a_shorter_log_that_no_worker_holds_is_told_at_once(
    redis: Redis, turn: Turn, patient: ChannelReader, state: str
) -> None:
    """Whoever takes the job up next writes other events."""
    async with patient.follow(turn.id) as stream:
        await turn.say(*"abc")
        assert await texts(stream, upto=3) == ["a", "b", "c"]
        await roll_back(redis, turn, 1)
        await redis.hset(turn.queue.keys.job(turn.id), "state", state)
        await reconnect(redis, turn)
        with pytest.raises(StreamLost, match="no longer reaches event 3"):
            await texts(stream)


async def test_a_cursor_beyond_the_log_of_a_waiting_job_is_told_at_once(
    client: AsyncClient, patient: ChannelReader
) -> None:
    job = await client.enqueue("hello")
    async with patient.follow(job.id, cursor=2) as stream:
        with pytest.raises(StreamLost, match="no longer reaches event 2"):
            await texts(stream)


async def test_a_cursor_beyond_the_log_of_an_ended_job_is_told_at_once(turn: Turn, patient: ChannelReader) -> None:
    await turn.finish("a")
    async with patient.follow(turn.id, cursor=3) as stream:
        with pytest.raises(StreamLost, match="no longer reaches event 3, which was read: it ends at 2"):
            await texts(stream)


async def test_a_cursor_beyond_the_log_of_a_running_job_is_told_unless_the_log_reaches_it_soon(
    turn: Turn, hasty: ChannelReader, patient: ChannelReader
) -> None:
    await turn.say("a")
    async with hasty.follow(turn.id, cursor=3) as stream:
        with pytest.raises(StreamLost, match="no longer reaches event 3, which was read: it ends at 1"):
            await texts(stream)
    async with patient.follow(turn.id, cursor=3) as stream:
        assert await stream.read(0.05) == []
        await turn.say(*"bcd")
        assert await texts(stream, upto=4) == ["d"]


async def test_whoever_waits_for_the_whole_answer_gets_that_of_the_log_that_was_written_last(
    redis: Redis, client: AsyncClient, turn: Turn
) -> None:
    reading = asyncio.create_task(client.job(turn.id).result(PATIENCE_S))

    async def is_following() -> bool:
        return await num_subscribers(redis, turn.queue.keys.tokens(turn.id)) == 1

    await eventually(is_following)
    await turn.say(*"abcd")
    assert [event.text async for event in _first(client, turn.id, 4)] == ["a", "b", "c", "d"]
    await roll_back(redis, turn, 2)
    await turn.say("C", "D", "E")
    await turn.finish("F")
    await redis.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
    result = await reading
    assert (result.text, result.token_ids, result.usage["completion_tokens"]) == ("abCDEF", (0, 1, 0, 1, 2), 5)


async def _first(client: AsyncClient, job_id: str, count: int) -> AsyncIterator[object]:
    """On the same reader as the result, so that what is seen here has reached its follower too."""
    async for event in client.job(job_id).stream():
        yield event
        if event.seq == count:
            return


async def test_a_log_that_can_never_be_read_is_told_to_whoever_waits_for_all_of_it(
    redis: Redis, client: AsyncClient, turn: Turn
) -> None:
    """It is begun again a few times, not for ever."""
    await turn.say(*"abc")
    await redis.xdel(turn.queue.keys.tokens(turn.id), "2-0")
    with pytest.raises(StreamLost, match="hole after event 1"):
        await client.job(turn.id).result(PATIENCE_S)


async def test_a_job_that_vanishes_while_its_answer_is_waited_for_is_lost_and_not_unknown(
    redis: Redis, turn: Turn, alert: ChannelReader
) -> None:
    await turn.say("a")
    waiting = asyncio.create_task(gather(alert, turn.id))
    async with alert.follow(turn.id) as stream:
        assert await texts(stream, upto=1) == ["a"]
    await redis.delete(turn.queue.keys.tokens(turn.id), turn.queue.keys.job(turn.id))
    with pytest.raises(StreamLost):
        await asyncio.wait_for(waiting, PATIENCE_S)


async def test_an_answer_of_a_job_that_never_was_is_not_found(alert: ChannelReader, worker: ScriptedWorker) -> None:
    with pytest.raises(JobNotFound):
        await gather(alert, new_job_id(worker.queue.name))


async def test_a_job_of_a_new_data_set_is_followed_by_a_process_that_knew_the_old_one(
    redis: Redis, client: AsyncClient, worker: ScriptedWorker, turn: Turn, alert: ChannelReader
) -> None:
    """The identity of the data set is a matter of each job: those of the old one are lost, the new one's are not."""
    await turn.queue.epoch()
    await turn.say("a")
    async with alert.follow(turn.id) as old:
        assert await texts(old, upto=1) == ["a"]
        await redis.set(turn.queue.keys.epoch, "another")
        job = await client.enqueue("hello")
        async with alert.follow(job.id) as new:
            assert await new.read(0.0) == []
            with pytest.raises(StreamLost, match="was replaced"):
                await texts(old)
            fresh = await worker.take()
            await fresh.finish("b")
            assert await texts(new) == ["b", ""]
