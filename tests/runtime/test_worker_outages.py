"""Redis is away for a while, at the worst moments: nothing accepted is lost, nothing is said twice."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from tests.engine.scripted_model import HashModel
from tests.runtime.cutting_proxy import CuttingProxy
from tests.runtime.harness import LIVENESS_S, Ears, Gated, StartWorker, Turnstile, crew, expected

from jitney import AsyncClient, scripts
from jitney.connection import Redis
from jitney.embedded import EmbeddedServer
from jitney.keys import QUEUES, Keys
from jitney.messages import Event
from jitney.queue import Append, Queue
from jitney_worker.runtime.worker import Worker
from jitney_worker.settings import load_settings
from jitney_worker.text.tokenizer import Tokenizer

LONG = 60
AHEAD = 4


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    """A server of this test's own, to be stopped and killed."""
    with EmbeddedServer(tmp_path) as running:
        yield running


@pytest.fixture
def redis_url(server: EmbeddedServer) -> str:
    return server.url


async def read_all(client: AsyncClient, job_id: str) -> tuple[int, ...]:
    """The answer, checked event by event: seq dense, each index once."""
    ids: list[int] = []
    seq = 0
    async for event in client.job(job_id).stream():
        seq += 1
        assert event.seq == seq
        assert event.type != "tokens" or event.index == len(ids)
        ids += event.token_ids
    return tuple(ids)


@pytest.mark.parametrize("how", ["hangs", "is killed"])
async def test_jobs_go_on_exactly_where_they_were_when_redis_is_back(
    server: EmbeddedServer,
    start_worker: StartWorker,
    client: AsyncClient,
    ears: Ears,
    how: Literal["hangs", "is killed"],
) -> None:
    """Away for longer than a lease: every claim of before is void, and the worker takes its own jobs again."""
    turnstile = Turnstile(HashModel())
    async with start_worker(turnstile, lease={"duration_s": 0.9}, worker={"max_unpublished_steps": AHEAD}):
        jobs = [await client.enqueue([n], max_tokens=LONG, ignore_eos=True) for n in range(1, 5)]
        while len(await turnstile.until_step()) < 4:
            turnstile.pass_one()
        turnstile.pass_one()
        await turnstile.until_step()
        if how == "hangs":
            os.kill(server.pid, signal.SIGSTOP)
        else:
            server.kill()
        num_steps = len(turnstile.steps)
        turnstile.open()
        await ears.until("leases_given_up")
        assert len(turnstile.steps) - num_steps <= AHEAD + 1
        if how == "hangs":
            os.kill(server.pid, signal.SIGCONT)
        else:
            server.start()
        answers = await asyncio.wait_for(asyncio.gather(*(read_all(client, job.id) for job in jobs)), LIVENESS_S)
        tries = [(await job.status()).tries for job in jobs]
    assert answers == [expected([n], LONG) for n in range(1, 5)]
    assert max(tries) > 1, "no lease ran out: the test proves nothing"


@pytest.mark.parametrize("how", ["hangs", "is killed"])
async def test_a_drain_ends_with_0_also_while_redis_is_away(
    server: EmbeddedServer,
    redis_url: str,
    queue_name: str,
    client: AsyncClient,
    tokenizer: Tokenizer,
    write_queue_card: Any,
    how: Literal["hangs", "is killed"],
) -> None:
    await write_queue_card(vocab_size=tokenizer.vocab_size, tokenizer_digest=tokenizer.digest)
    settings = load_settings(redis_url=redis_url, queue=queue_name, worker={"drain_timeout_s": 0.1})
    turnstile = Turnstile(HashModel())
    worker = Worker(settings, crew(settings, tokenizer, turnstile, {}))
    run = asyncio.create_task(worker.run())
    await client.enqueue([1], max_tokens=LONG, ignore_eos=True)
    await turnstile.until_step()
    if how == "hangs":
        os.kill(server.pid, signal.SIGSTOP)
    else:
        server.kill()
    turnstile.open()
    worker.drain()
    try:
        assert await asyncio.wait_for(run, LIVENESS_S / 3) == 0
    finally:
        if how == "hangs":
            os.kill(server.pid, signal.SIGCONT)


async def test_an_outage_while_a_job_is_read_in_does_not_end_it(
    server: EmbeddedServer,
    redis_url: str,
    queue_name: str,
    client: AsyncClient,
    redis: Redis,
    tokenizer: Tokenizer,
    write_queue_card: Any,
    ears: Ears,
) -> None:
    await write_queue_card(vocab_size=tokenizer.vocab_size, tokenizer_digest=tokenizer.digest)
    prompt = "Once upon a time"
    answer = expected(tokenizer.encode_prompt(prompt), 12)
    job = await client.enqueue(prompt, max_tokens=12, ignore_eos=True)
    queue = Queue(redis, queue_name)
    (delivery,) = (await queue.claim("other", "n1", credit=1, fingerprint="hash.1", lease_s=60)).deliveries
    said = [Event("started", 1, attempt=1), Event("tokens", 2, token_ids=answer[:3])]
    assert await queue.append([Append(job.id, delivery.fence, 1, 3, [event.encode() for event in said])]) == []
    await queue.release(job.id, delivery.fence)

    settings = load_settings(redis_url=redis_url, queue=queue_name)
    gated = Gated(tokenizer)
    worker = Worker(settings, crew(settings, gated, HashModel(), {}))  # type: ignore[arg-type]
    run = asyncio.create_task(worker.run())
    assert await asyncio.to_thread(gated.arrived.wait, LIVENESS_S)
    server.kill()
    gated.gate.set()
    await ears.until("intake_delayed", "finish_failed")
    server.start()
    assert await asyncio.wait_for(read_all(client, job.id), LIVENESS_S) == answer
    worker.drain()
    assert await asyncio.wait_for(run, LIVENESS_S) == 0


async def test_what_a_claim_gave_is_taken_up_when_its_reply_and_the_first_question_after_it_are_lost(
    redis_url: str,
    queue_name: str,
    client: AsyncClient,
    redis: Redis,
    tokenizer: Tokenizer,
    write_queue_card: Any,
    ears: Ears,
) -> None:
    await write_queue_card(vocab_size=tokenizer.vocab_size, tokenizer_digest=tokenizer.digest)
    async with CuttingProxy(redis_url).serve() as proxy:
        proxy.lose_reply_to = scripts.load("claim").sha.encode()
        job = await client.enqueue([1], max_tokens=5, ignore_eos=True)
        await redis.script_load(scripts.load("claim").source)  # or the first try would be answered NOSCRIPT
        # So long a lease that only `adopt` can bring the job back.
        settings = load_settings(redis_url=proxy.url, queue=queue_name, lease={"duration_s": 3_600})
        worker = Worker(settings, crew(settings, tokenizer, HashModel(), {}))
        run = asyncio.create_task(worker.run())
        await ears.until("claim_failed")
        assert (await job.status()).state == "running"
        assert proxy.num_lost == 1
        proxy.reopen()
        assert (await job.result(LIVENESS_S)).token_ids == expected([1], 5)
        assert (await job.status()).tries == 1
        worker.drain()
        assert await asyncio.wait_for(run, LIVENESS_S) == 0


async def test_a_log_that_is_gone_ends_its_job_at_once_and_no_other(
    start_worker: StartWorker, client: AsyncClient, redis: Redis, queue_name: str
) -> None:
    """As after a restart without the last writes: what follows would stand behind a hole."""
    turnstile = Turnstile(HashModel())
    async with start_worker(turnstile, lease={"duration_s": 3_600}):
        torn = await client.enqueue([1], max_tokens=LONG, ignore_eos=True)
        whole = await client.enqueue([2], max_tokens=LONG, ignore_eos=True)
        async with asyncio.timeout(LIVENESS_S):
            while (await torn.status()).seq < 2 or (await whole.status()).seq < 2:
                await turnstile.until_step()
                turnstile.pass_one()
        await redis.delete(Keys(queue_name).tokens(torn.id))
        turnstile.open()
        assert (await whole.result(LIVENESS_S)).token_ids == expected([2], LONG)
        async with asyncio.timeout(LIVENESS_S):
            while (await torn.status()).state != "done":
                pass
        assert (await torn.status()).reason == "failed"


async def test_a_worker_serves_on_when_redis_comes_back_empty(
    start_worker: StartWorker, client: AsyncClient, redis: Redis
) -> None:
    """B39: its queue is known again, and what is enqueued then runs."""
    async with start_worker(lease={"duration_s": 0.6}, worker={"snapshot_every_s": 0.01}):
        first = await client.enqueue([1], max_tokens=3, ignore_eos=True)
        assert (await first.result(LIVENESS_S)).token_ids == expected([1], 3)
        await redis.flushall()
        async with asyncio.timeout(LIVENESS_S):
            while await redis.hlen(QUEUES) == 0:
                pass
        again = await client.enqueue([2], max_tokens=4, ignore_eos=True)
        assert (await again.result(LIVENESS_S)).token_ids == expected([2], 4)
