"""Streams over HTTP that are lost again and again: no event twice, none left out, and an end to waiting."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.api.api_wire import PATIENCE_S, until
from tests.api.conftest import Api, ScriptedJob, ScriptedWorker, StartApi
from tests.api.test_api_command import ready_port
from tests.api.test_api_command import start as start_program
from tests.faults.proxy import Proxy

from jitney import AsyncClient, Client, InvalidJob, JobFailed, JobNotFound, QueueUnavailable, StreamLost
from jitney.connection import Redis
from jitney.http_link import HttpLink
from jitney.keys import JobId, new_job_id
from jitney.messages import Event, usage_of
from jitney.position import Message

HEAD_BYTES = 400
"""About what stands before the first event: cuts from here on fall into the events."""


def link_to(port: int, model: str, **bounds: float) -> HttpLink:
    return HttpLink(f"http://127.0.0.1:{port}", api_key=None, destination=model, name="test", **bounds)


class Reading:
    """One reader in the background. `upto(seq)` waits until it has seen that event."""

    def __init__(self, link: HttpLink, job_id: str, cursor: int = 0) -> None:
        self.messages: list[Message] = []
        self._moved = asyncio.Event()
        self.task = asyncio.create_task(self._read(link, job_id, cursor))

    async def _read(self, link: HttpLink, job_id: str, cursor: int) -> None:
        async with link.follow(job_id, cursor) as batches:
            async for batch in batches:
                assert batch
                self.messages += batch
                self._moved.set()

    async def upto(self, seq: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not self.messages or self.messages[-1].event.seq < seq:
                self._moved.clear()
                moved = asyncio.create_task(self._moved.wait())
                await asyncio.wait({moved, self.task}, return_when=asyncio.FIRST_COMPLETED)
                moved.cancel()
                if self.task.done():
                    self.task.result()

    async def payloads(self) -> list[bytes]:
        """All of them, once it has come to the end."""
        await asyncio.wait_for(self.task, PATIENCE_S * 2)
        return [message.payload for message in self.messages]


async def log_of(job: ScriptedJob) -> list[bytes]:
    return await job.queue.read_log(JobId(job.id), 0, count=10_000)


@pytest.fixture
async def proxy(api: Api) -> AsyncIterator[Proxy]:
    async with Proxy(api.port) as proxy:
        yield proxy


@pytest.fixture
async def link(proxy: Proxy, api: Api) -> AsyncIterator[HttpLink]:
    """Through the proxy."""
    link = link_to(proxy.port, api.model)
    yield link
    await link.aclose()


@pytest.fixture
async def job(api: Api, worker: ScriptedWorker) -> ScriptedJob:
    await api.create_job()
    return await worker.claim()


# --- lost connections ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
async def test_a_stream_that_is_cut_at_random_bytes_is_the_log(
    proxy: Proxy, link: HttpLink, job: ScriptedJob, seed: int
) -> None:
    rng = random.Random(seed)
    proxy.slice_bytes = rng.choice([None, 1, 7, 1_000])

    async def cut() -> None:
        for _ in range(15):
            proxy.cut_in_reply(HEAD_BYTES + rng.randrange(1_500))
            await proxy.cuts(1)
        proxy.cut_reply_after = None

    cutting = asyncio.create_task(cut())
    reading = Reading(link, job.id)
    for number in range(120):
        await job.say(f"word {number} " * rng.randrange(1, 6), "é\n\ndata: {}\r\n")
        if number % 10 == 9:
            await reading.upto(job.seq)
    await job.finish("end")
    payloads = await reading.payloads()
    cutting.cancel()
    assert payloads == await log_of(job)
    assert proxy.num_cut > 5


async def test_an_api_that_is_killed_and_started_again_loses_nothing_and_repeats_nothing(
    api: Api, redis_url: str, job: ScriptedJob
) -> None:
    first = await start_program("--port", "0", JITNEY_REDIS_URL=redis_url)
    port = await ready_port(first)
    link = link_to(port, api.model)
    reading = Reading(link, job.id)
    await job.say(*"abc")
    await reading.upto(job.seq)
    first.kill()
    await first.wait()
    await job.say(*"def")
    second = await start_program("--port", str(port), JITNEY_REDIS_URL=redis_url)
    assert await ready_port(second) == port
    await reading.upto(job.seq)
    await job.finish()
    assert await reading.payloads() == await log_of(job)
    second.send_signal(signal.SIGTERM)
    await asyncio.wait_for(second.communicate(), PATIENCE_S)
    await first.communicate()
    await link.aclose()


async def test_an_api_that_stops_in_peace_hands_its_readers_on(
    start_api: StartApi, api: Api, proxy: Proxy, link: HttpLink, job: ScriptedJob
) -> None:
    going = await start_api()
    proxy.target = going.port
    reading = Reading(link, job.id)
    await job.say(*"abc")
    await reading.upto(job.seq)
    proxy.target = api.port
    going.server.should_exit = True
    await proxy_links(proxy, 2)
    await job.say(*"def")
    await job.finish()
    assert await reading.payloads() == await log_of(job)
    assert proxy.num_cut == 0  # it said that it is going


async def proxy_links(proxy: Proxy, num: int) -> None:
    async def num_ever() -> bool:
        return len(proxy._ever) >= num

    await until(num_ever, True)


async def test_a_whole_answer_outlives_its_connections(
    proxy: Proxy, link: HttpLink, api: Api, job: ScriptedJob
) -> None:
    async with AsyncClient(f"http://127.0.0.1:{proxy.port}") as client:
        waiting = asyncio.create_task(client.job(job.id).result(PATIENCE_S))
        for text in "abc":
            await job.say(text)
            num_before = len(proxy._ever)
            await proxy_links(proxy, 1)
            proxy.reset()
            await proxy_links(proxy, num_before + 1)
        await job.fail(message="no luck")
        with pytest.raises(JobFailed, match="no luck") as raised:
            await waiting
    assert raised.value.text == "abc"


# --- silence ---------------------------------------------------------------------------------------


async def test_keep_alives_hold_a_connection_and_their_absence_ends_it(start_api: StartApi, job: ScriptedJob) -> None:
    api = await start_api(keep_alive_s=0.1, headers_hold_s=0)
    async with Proxy(api.port) as proxy:
        link = link_to(proxy.port, api.model, read_timeout_s=4.0)
        reading = Reading(link, job.id)
        heard = proxy.num_passed["down"]

        async def has_been_silent_for_longer_than_the_timeout() -> bool:
            return proxy.num_passed["down"] - heard > 50 * len(b"10\r\n: keep-alive\n\n\r\n")

        await until(has_been_silent_for_longer_than_the_timeout, True)
        assert len(proxy._ever) == 1
        proxy.hang("down")
        await proxy_links(proxy, 2)
        proxy.heal()
        await job.say(*"abc")
        await job.finish()
        assert await reading.payloads() == await log_of(job)
        await link.aclose()


async def test_an_outage_has_an_end(proxy: Proxy, api: Api, job: ScriptedJob) -> None:
    link = link_to(proxy.port, api.model, max_outage_s=0.5)
    reading = Reading(link, job.id)
    await job.say("a")
    await reading.upto(job.seq)
    proxy.refuse()
    with pytest.raises(QueueUnavailable, match="the API does not answer") as raised:
        await reading.payloads()
    assert raised.value.__cause__ is not None
    assert [message.event.seq for message in reading.messages] == [1, 2]
    await link.aclose()


async def test_a_connection_that_is_cut_in_the_same_event_each_time_is_no_answer(
    proxy: Proxy, api: Api, job: ScriptedJob
) -> None:
    """Otherwise it would be asked for without pause, for ever."""
    await job.say("x" * 100_000)
    link = link_to(proxy.port, api.model, max_outage_s=0.5)
    proxy.cut_in_reply(5_000)
    reading = Reading(link, job.id, cursor=1)
    with pytest.raises(QueueUnavailable):
        await reading.payloads()
    assert proxy.num_cut > 1
    await link.aclose()


async def test_a_closed_client_ends_its_streams(proxy: Proxy, api: Api, job: ScriptedJob) -> None:
    link = link_to(proxy.port, api.model)
    reading = Reading(link, job.id)
    await job.say("a")
    await reading.upto(job.seq)
    await link.aclose()
    with pytest.raises(QueueUnavailable, match="closed"):
        await reading.payloads()
    with pytest.raises(QueueUnavailable, match="closed"):
        await link.status(JobId(job.id))
    with pytest.raises(QueueUnavailable, match="closed"):
        await Reading(link, job.id).payloads()


async def test_a_stream_left_early_leaves_the_api_too(api: Api, job: ScriptedJob, redis: Redis) -> None:
    with Client(f"http://127.0.0.1:{api.port}") as client:

        def first_of_three() -> None:
            for _ in range(3):
                assert next(client.job(job.id).stream()).type == "started"

        await job.say("a")
        await asyncio.to_thread(first_of_three)

        async def nobody() -> bool:
            return await redis.pubsub_channels(f"*{api.model}*") == []

        await until(nobody, True)


# --- cursors, and logs that are other ones ---------------------------------------------------------


async def test_from_every_cursor_on_it_is_the_rest_of_the_log(link: HttpLink, job: ScriptedJob) -> None:
    live = [Reading(link, job.id, cursor) for cursor in range(3)]
    await job.say(*"abc")
    await job.finish("d")
    log = await log_of(job)
    for cursor, reading in enumerate(live):
        assert await reading.payloads() == log[cursor:]
    for cursor in range(len(log) + 1):
        assert await Reading(link, job.id, cursor).payloads() == log[cursor:]
    for cursor in (len(log) + 1, len(log) + 2):
        with pytest.raises(StreamLost):
            await Reading(link, job.id, cursor).payloads()


@pytest.mark.parametrize("cursor", [-1, "2", 1.5])
async def test_what_is_no_cursor_is_refused(link: HttpLink, job: ScriptedJob, cursor: Any) -> None:
    with pytest.raises(InvalidJob, match="cursor"):
        await Reading(link, job.id, cursor).payloads()


async def test_an_unknown_job_is_not_found_and_a_vanished_one_is_lost(
    proxy: Proxy, link: HttpLink, api: Api, job: ScriptedJob, redis: Redis
) -> None:
    with pytest.raises(JobNotFound):
        await Reading(link, new_job_id(api.model)).payloads()
    reading = Reading(link, job.id)
    await job.say("a")
    await reading.upto(job.seq)
    proxy.refuse()
    await redis.delete(job.queue.keys.tokens(job.id), job.queue.keys.job(job.id))
    proxy.heal()
    with pytest.raises(StreamLost):
        await reading.payloads()


async def roll_back(redis: Redis, job: ScriptedJob, seq: int) -> list[bytes]:
    """The log ends at `seq` again, as after a power cut. Returns what stood behind it."""
    keys, payloads = job.queue.keys, await log_of(job)
    async with redis.pipeline(transaction=True) as pipeline:
        pipeline.delete(keys.tokens(job.id))
        for number, payload in enumerate(payloads[:seq], start=1):
            pipeline.xadd(keys.tokens(job.id), {"e": payload}, id=f"{number}-0")
        pipeline.hset(keys.job(job.id), mapping={"seq": seq, "n": max(0, seq - 1)})
        await pipeline.execute()
    job.seq, job.num_tokens, job.positions[0] = seq, max(0, seq - 1), max(0, seq - 1)
    return payloads[seq:]


async def test_a_log_that_was_rolled_back_and_grew_otherwise_is_lost(
    proxy: Proxy, link: HttpLink, job: ScriptedJob, redis: Redis
) -> None:
    """With the numbers alone it would look like the same one."""
    reading = Reading(link, job.id)
    await job.say(*"abc")
    await reading.upto(job.seq)
    proxy.refuse()
    await roll_back(redis, job, 2)
    await job.say(*"BCD")
    await job.finish()
    proxy.heal()
    with pytest.raises(StreamLost, match="another event 4 than the one that was read"):
        await reading.payloads()


async def test_a_log_that_was_rolled_back_and_written_again_goes_on(
    proxy: Proxy, link: HttpLink, job: ScriptedJob, redis: Redis
) -> None:
    reading = Reading(link, job.id)
    await job.say(*"abc")
    await reading.upto(job.seq)
    proxy.refuse()
    await roll_back(redis, job, 2)
    proxy.heal()
    await job.say(*"bcd")
    await job.finish()
    assert await reading.payloads() == await log_of(job)


@pytest.mark.parametrize(("kept", "ending"), [(2, "finish"), (1, "finish"), (1, "fail")])
async def test_a_job_that_ended_before_what_was_read_is_lost(
    proxy: Proxy, link: HttpLink, job: ScriptedJob, redis: Redis, kept: int, ending: str
) -> None:
    """The log ends at the event that was read, one before it, and two before it: three answers, one meaning."""
    reading = Reading(link, job.id)
    await job.say(*"abc")
    await reading.upto(job.seq)
    proxy.refuse()
    await roll_back(redis, job, kept)
    await getattr(job, ending)()
    proxy.heal()
    with pytest.raises(StreamLost):
        await reading.payloads()


async def test_a_stream_that_ends_like_a_whole_one_before_the_job_does_is_gone_on_with() -> None:
    """Some proxy's way to end what took too long for it."""
    events = [
        Event("started", 1, attempt=1),
        Event("tokens", 2, token_ids=(1,), text="a"),
        Event("finished", 3, choices=(), usage=usage_of(1, 1)),
    ]
    payloads = [event.encode() for event in events]
    asked: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        asked.append(head.lower().partition(b"last-event-id: ")[2].partition(b"\r")[0])
        num = len(asked)
        told = [b"id: %d\ndata: %b\n\n" % (seq, payloads[seq - 1]) for seq in range(max(1, num - 1), num + 1)]
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + b"".join(told))
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        link = link_to(server.sockets[0].getsockname()[1], "q")
        assert await Reading(link, new_job_id("q")).payloads() == payloads
        await link.aclose()
    assert asked == [b"", b"0", b"1"]
