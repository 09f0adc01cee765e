"""A server that comes back without its last seconds: whoever wrote the lost end of a log writes it again."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis.asyncio.client import PubSub
from tests.engine.scripted_model import HashModel
from tests.runtime.harness import LIVENESS_S, Ears, StartWorker, Turnstile, crew, expected

from jitney import AsyncClient
from jitney.async_client import AsyncJob
from jitney.cards import write_card
from jitney.channel import REGROWTH_S
from jitney.connection import Redis, connect
from jitney.embedded import EmbeddedServer
from jitney.keys import JobId, Keys
from jitney.messages import Event
from jitney.queue import Append, Queue, pack_ids
from jitney.tasks import end_tasks
from jitney_worker.runtime import log_tail
from jitney_worker.runtime.log_tail import LogTail
from jitney_worker.runtime.publisher import LONG_APPEND
from jitney_worker.runtime.worker import Worker
from jitney_worker.settings import load_settings
from jitney_worker.text.tokenizer import Tokenizer

FOREVER = {"duration_s": 3_600}
PROMPT = [7, 8, 9]
LENGTH = 12


class Published:
    """All that was ever said on a job's channel, by seq. A repeat has to be the same bytes."""

    def __init__(self) -> None:
        self.events: dict[int, bytes] = {}
        self.num_repeats = 0
        self.ended = asyncio.Event()

    def hear(self, payload: bytes) -> None:
        event = Event.decode(payload)
        self.num_repeats += event.seq in self.events
        assert self.events.setdefault(event.seq, payload) == payload, f"event {event.seq} was said in two ways"
        if event.is_terminal:
            self.ended.set()

    @property
    def log(self) -> list[bytes]:
        return [self.events[seq] for seq in range(1, len(self.events) + 1)]


@asynccontextmanager
async def listening_to(redis: Redis, channel: str) -> AsyncIterator[Published]:
    """Until the job's end."""
    published = Published()

    async def listen(pubsub: PubSub) -> None:
        while not published.ended.is_set():
            message = await pubsub.get_message(ignore_subscribe_messages=True, timeout=LIVENESS_S)
            assert message is not None, "nothing more was said"
            published.hear(message["data"])

    async with redis.pubsub() as pubsub:
        await pubsub.subscribe(channel)
        assert (await pubsub.get_message(timeout=LIVENESS_S))["type"] == "subscribe"
        listening = asyncio.create_task(listen(pubsub))
        try:
            yield published
            await asyncio.wait_for(listening, LIVENESS_S)
        finally:
            await end_tasks([listening])


async def step_until(turnstile: Turnstile, job: AsyncJob, num_tokens: int) -> None:
    """Step by step, each published before the next; the engine then stands before another one."""
    async with asyncio.timeout(LIVENESS_S):
        while (said := (await job.status()).num_tokens) < num_tokens:
            turnstile.pass_one()
            await turnstile.until_step()
            while (await job.status()).num_tokens == said:
                pass


async def roll_back(redis: Redis, keys: Keys, job_id: JobId, seq: int) -> None:
    """The log, the record and the prompt ids as they were when event `seq` was the last."""
    log = keys.tokens(job_id)
    entries = await redis.xrange(log)
    kept = entries[:seq]
    assert len(kept) < len(entries), "nothing was lost: the test proves nothing"
    num_tokens = sum(len(Event.decode(fields[b"e"]).token_ids) for _, fields in kept)
    async with redis.pipeline(transaction=True) as transaction:
        transaction.delete(log)  # a stream remembers its highest id, also of what was deleted
        for entry_id, fields in kept:
            transaction.xadd(log, fields, id=entry_id)
        transaction.hset(keys.job(job_id), mapping={"seq": seq, "n": num_tokens})
        if not kept:
            transaction.delete(keys.ids(job_id))
            transaction.hincrby(keys.job(job_id), "pt", 40)  # an estimate again, and paid as such
            transaction.hincrby(keys.job(job_id), "paid", 40)
        await transaction.execute()


@pytest.mark.parametrize("last_seq", [0, 1, 3, 6], ids=["nothing is left", "no token", "some", "all but one"])
async def test_a_log_that_lost_its_end_gets_it_back_byte_for_byte(
    start_worker: StartWorker, client: AsyncClient, redis: Redis, queue_name: str, last_seq: int
) -> None:
    turnstile, keys, queue = Turnstile(HashModel()), Keys(queue_name), Queue(redis, queue_name)
    async with start_worker(turnstile, lease=FOREVER):
        job = await client.enqueue(PROMPT, max_tokens=LENGTH, ignore_eos=True)
        await turnstile.until_step()
        async with listening_to(redis, keys.tokens(job.id)) as published:
            await step_until(turnstile, job, 6)
            num_paid = await redis.hget(keys.job(job.id), "paid")
            await roll_back(redis, keys, job.id, last_seq)
            await step_until(turnstile, job, 7)
            assert await redis.get(keys.ids(job.id)) == pack_ids(PROMPT)
            assert await redis.hget(keys.job(job.id), "paid") == num_paid
            turnstile.open()
            assert (await job.result(LIVENESS_S)).token_ids == expected(PROMPT, LENGTH)
        log = await queue.read_log(job.id)
        status = await job.status()
    assert published.num_repeats == 7 - last_seq
    assert log == published.log
    assert (status.tries, status.num_tokens, status.num_prompt_tokens) == (1, LENGTH, len(PROMPT))


def test_a_reader_waits_for_a_lost_end_as_long_as_an_engine_may_take_for_a_step() -> None:
    """Told of a loss before that, it would be told of one that is none."""
    assert load_settings().lease.stall_after_s <= REGROWTH_S


async def test_a_log_that_lost_its_end_before_the_last_event_is_ended_all_the_same(
    start_worker: StartWorker, client: AsyncClient, redis: Redis, queue_name: str
) -> None:
    """It is `finish` that meets the gap."""
    turnstile, keys, queue = Turnstile(HashModel()), Keys(queue_name), Queue(redis, queue_name)
    async with start_worker(turnstile, lease=FOREVER):
        job = await client.enqueue(PROMPT, max_tokens=LENGTH, ignore_eos=True)
        await turnstile.until_step()
        async with listening_to(redis, keys.tokens(job.id)) as published:
            await step_until(turnstile, job, LENGTH - 1)
            await roll_back(redis, keys, job.id, 4)
            turnstile.open()
            assert (await job.result(LIVENESS_S)).token_ids == expected(PROMPT, LENGTH)
        log = await queue.read_log(job.id)
        status = await job.status()
    assert published.num_repeats == LENGTH - 4
    assert log == published.log
    assert (status.tries, status.reason, status.num_tokens) == (1, "finished", LENGTH)


async def test_a_long_end_is_given_back_too_beside_other_jobs(
    start_worker: StartWorker, client: AsyncClient, redis: Redis, queue_name: str
) -> None:
    turnstile, keys, queue = Turnstile(HashModel()), Keys(queue_name), Queue(redis, queue_name)
    length = 3 * LONG_APPEND
    async with start_worker(turnstile, lease=FOREVER):
        job = await client.enqueue(PROMPT, max_tokens=length, ignore_eos=True)
        await turnstile.until_step()
        async with listening_to(redis, keys.tokens(job.id)) as published:
            await step_until(turnstile, job, 2 * LONG_APPEND)
            other = await client.enqueue([1], max_tokens=length, ignore_eos=True)
            await roll_back(redis, keys, job.id, 2)
            turnstile.open()
            assert (await job.result(LIVENESS_S)).token_ids == expected(PROMPT, length)
            assert (await other.result(LIVENESS_S)).token_ids == expected([1], length)
        log = await queue.read_log(job.id)
    assert published.num_repeats == 2 * LONG_APPEND - 1
    assert log == published.log


@pytest.mark.parametrize("whose", ["this claim", "the claim before"])
async def test_a_worker_gives_a_log_back_what_it_wrote_itself_and_no_more(
    start_worker: StartWorker, client: AsyncClient, redis: Redis, queue_name: str, whose: str
) -> None:
    """What an earlier owner wrote nobody has any more; then the job is tried again, and says the same tokens."""
    turnstile, keys, queue = Turnstile(HashModel()), Keys(queue_name), Queue(redis, queue_name)
    job = await client.enqueue(PROMPT, max_tokens=LENGTH, ignore_eos=True, retry={"backoff_s": 0.0})
    (delivery,) = (await queue.claim("other", "n1", credit=1, fingerprint="hash.1", lease_s=60)).deliveries
    said = [Event("started", 1, attempt=1)]
    said += [Event("tokens", 2 + n, index=n, token_ids=(t,)) for n, t in enumerate(expected(PROMPT, 3))]
    events = [event.encode() for event in said]
    assert await queue.append([Append(job.id, delivery.fence, 1, 3, events, pack_ids(PROMPT), len(PROMPT))]) == []
    await queue.release(job.id, delivery.fence)
    async with start_worker(turnstile, lease=FOREVER):
        await turnstile.until_step()
        await step_until(turnstile, job, 6)
        before = await queue.read_log(job.id) or []
        assert [Event.decode(payload).type for payload in before] == ["started", *3 * ["tokens"]] * 2
        await roll_back(redis, keys, job.id, len(said) if whose == "this claim" else len(said) - 1)
        turnstile.open()
        assert (await job.result(LIVENESS_S)).token_ids == expected(PROMPT, LENGTH)
        log = await queue.read_log(job.id) or []
        status = await job.status()
    assert [Event.decode(payload).seq for payload in log] == list(range(1, len(log) + 1))
    assert (log[: len(before)] == before) == (whose == "this claim")
    assert status.tries == (1 if whose == "this claim" else 2)


async def test_a_lost_end_that_is_longer_than_what_is_kept_is_computed_again(
    start_worker: StartWorker,
    client: AsyncClient,
    redis: Redis,
    queue_name: str,
    ears: Ears,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(log_tail, "MAX_EVENTS", 3)
    turnstile, keys, queue = Turnstile(HashModel()), Keys(queue_name), Queue(redis, queue_name)
    async with start_worker(turnstile, lease=FOREVER):
        job = await client.enqueue(PROMPT, max_tokens=LENGTH, ignore_eos=True, retry={"backoff_s": 0.0})
        await turnstile.until_step()
        await step_until(turnstile, job, 8)
        await roll_back(redis, keys, job.id, 3)
        turnstile.open()
        await ears.until("job_retried")
        assert (await job.result(LIVENESS_S)).token_ids == expected(PROMPT, LENGTH)
        log = await queue.read_log(job.id)
    assert log is not None
    assert [Event.decode(payload).seq for payload in log] == list(range(1, len(log) + 1))
    assert (await job.status()).tries == 2


async def test_after_a_power_cut_the_log_is_the_one_that_was_published(
    tmp_path: Path, queue_name: str, tokenizer: Tokenizer
) -> None:
    """The disk holds an older state of the same data set; the worker has lived through it."""
    with EmbeddedServer(tmp_path) as server:
        redis, turnstile = connect(server.url), Turnstile(HashModel())
        settings = load_settings(redis_url=server.url, queue=queue_name, lease=FOREVER)
        made = crew(settings, tokenizer, turnstile, {})
        await write_card(redis, queue_name, made.card())
        worker = Worker(settings, made)
        run = asyncio.create_task(worker.run())
        published = Published()
        async with AsyncClient(server.url, queue=queue_name) as client:
            job = await client.enqueue(PROMPT, max_tokens=LENGTH, ignore_eos=True)
            await turnstile.until_step()
            await step_until(turnstile, job, 3)
            on_disk, synced = server.data_dir / "appendonlydir", server.data_dir / "synced"
            shutil.copytree(on_disk, synced)
            await step_until(turnstile, job, 8)
            for payload in await Queue(redis, queue_name).read_log(job.id) or []:
                published.hear(payload)
            server.kill()
            shutil.rmtree(on_disk)
            synced.rename(on_disk)
            server.start()
            assert (await job.status()).num_tokens == 3, "nothing was lost: the test proves nothing"
            turnstile.open()
            assert (await job.result(LIVENESS_S)).token_ids == expected(PROMPT, LENGTH)
            for payload in await Queue(redis, queue_name).read_log(job.id) or []:
                published.hear(payload)
            assert (await job.status()).tries == 1
        assert published.num_repeats == 9
        worker.drain()
        assert await asyncio.wait_for(run, LIVENESS_S) == 0
        await redis.aclose()


def numbered(*seqs: int) -> list[bytes]:
    return [b"%d" % seq for seq in seqs]


def test_a_tail_gives_what_came_after_and_nothing_that_it_does_not_know() -> None:
    tail = LogTail(5)
    assert tail.after(4) == []
    tail.extend(5, numbered(5, 6))
    tail.extend(7, numbered(7))
    assert [tail.after(seq) for seq in (3, 4, 5, 6, 7, 8)] == [
        [],  # written before this claim
        numbered(5, 6, 7),
        numbered(6, 7),
        numbered(7),
        [],  # all there
        [],  # more than was ever written
    ]


@pytest.mark.parametrize(("size", "num_kept"), [(10, log_tail.MAX_EVENTS), (1_000, log_tail.MAX_BYTES // 1_000)])
def test_a_tail_is_bounded_in_events_and_in_bytes(size: int, num_kept: int) -> None:
    tail = LogTail(1)
    for seq in range(1, 1_001):
        tail.extend(seq, [b"%d" % seq + b"." * (size - len(str(seq)))])
    assert len(tail.after(1_000 - num_kept)) == num_kept
    assert tail.after(999 - num_kept) == []
    assert tail.after(999)[0].startswith(b"1000.")
