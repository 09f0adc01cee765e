"""One job, two claims: what belongs to the first is never taken for the second. And who may claim at all."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import orjson
import pytest
from tests.engine.scripted_model import HashModel
from tests.runtime.harness import LIVENESS_S, StartWorker, Turnstile, crew, expected

from jitney import AsyncClient, JobCancelled, JobFailed
from jitney.connection import Redis
from jitney.keys import Fence, Keys
from jitney.queue import Queue
from jitney_worker.engine.engine import LocalEngine
from jitney_worker.engine.protocol import Capacity, TokenLogprobs
from jitney_worker.runtime.control import cancelled_fence
from jitney_worker.runtime.worker import Worker
from jitney_worker.settings import load_settings
from jitney_worker.text.tokenizer import Tokenizer

FOREVER = {"duration_s": 3_600}
"""A lease so long that its renewal tells the worker nothing while a test lasts."""


async def test_a_worker_that_claims_its_own_job_again_says_every_token_once(
    start_worker: StartWorker, client: AsyncClient, redis: Redis, queue_name: str
) -> None:
    """The lease ran out unnoticed: the engine still computes for the first claim when the second one arrives."""
    turnstile = Turnstile(HashModel())
    async with start_worker(turnstile, lease=FOREVER):
        job = await client.enqueue([1], max_tokens=30, ignore_eos=True, stop=["no such words"])
        async with asyncio.timeout(LIVENESS_S):
            while (await job.status()).seq < 4:
                await turnstile.until_step()
                turnstile.pass_one()
        await turnstile.until_step()
        await redis.zadd(Keys(queue_name).leases("interactive"), {job.id: 1})
        async with asyncio.timeout(LIVENESS_S):
            while (await job.status()).tries < 2:
                pass
        turnstile.open()
        events = [event async for event in job.stream()]
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert tuple(token for event in events for token in event.token_ids) == expected([1], 30)
    assert [event.attempt for event in events if event.type == "started"] == [1, 2]
    assert events[-1].type == "finished"


async def test_a_cancelled_job_leaves_the_engine_while_it_still_reads_its_prompt(
    start_worker: StartWorker, client: AsyncClient
) -> None:
    """It says nothing for a hundred steps, so no refused append could tell the worker."""
    turnstile = Turnstile(HashModel())
    long_prompt = [n % 90 + 1 for n in range(400)]
    async with start_worker(turnstile, engine={"long_prefill_token_threshold": 4}, lease=FOREVER):
        try:
            beside = await client.enqueue([1], max_tokens=300, ignore_eos=True)
            reading = await client.enqueue(long_prompt, max_tokens=5, ignore_eos=True)
            while reading.id not in await turnstile.until_step():
                turnstile.pass_one()
            await reading.cancel()
            while reading.id in turnstile.steps[-1]:
                turnstile.pass_one()
                await turnstile.until_step()
        finally:
            turnstile.open()
        assert (await beside.result(LIVENESS_S)).token_ids == expected([1], 300)
        with pytest.raises(JobCancelled):
            await reading.result(LIVENESS_S)
    assert sum(reading.id in step for step in turnstile.steps) < 50


async def test_a_cancelled_job_that_waits_for_a_seat_makes_room_for_the_next_one(
    start_worker: StartWorker, client: AsyncClient
) -> None:
    turnstile = Turnstile(HashModel())
    async with start_worker(turnstile, engine={"max_num_seqs": 1}, lease=FOREVER):
        try:
            seated = await client.enqueue([1], max_tokens=20, ignore_eos=True)
            await turnstile.until_step()
            ahead = await client.enqueue([2], max_tokens=20, ignore_eos=True)
            following = await client.enqueue([3], max_tokens=3, ignore_eos=True)
            await _until_running(ahead)
            await ahead.cancel()
            await _until_running(following)
        finally:
            turnstile.open()
        assert (await seated.result(LIVENESS_S)).token_ids == expected([1], 20)
        assert (await following.result(LIVENESS_S)).token_ids == expected([3], 3)
    assert ahead.id not in {job for step in turnstile.steps for job in step}


async def _until_running(job: Any) -> None:
    async with asyncio.timeout(LIVENESS_S):
        while (await job.status()).state != "running":
            pass


async def test_a_cancel_that_names_an_earlier_claim_does_not_touch_the_present_one(
    start_worker: StartWorker, client: AsyncClient, redis: Redis, queue_name: str
) -> None:
    turnstile = Turnstile(HashModel())
    channel = Keys(queue_name).ctl("w1")
    async with start_worker(turnstile):
        try:
            job = await client.enqueue([1], max_tokens=20, ignore_eos=True)
            await turnstile.until_step()
            async with asyncio.timeout(LIVENESS_S):
                while (await redis.pubsub_numsub(channel))[0][1] == 0:
                    pass
            for said in (b"\xff", b"[1]", orjson.dumps({"type": "cancel", "id": job.id, "fence": "earlier.1.1"})):
                await redis.publish(channel, said)
        finally:
            turnstile.open()
        assert (await job.result(LIVENESS_S)).token_ids == expected([1], 20)


@pytest.mark.parametrize(
    ("said", "fence"),
    [
        (b'{"type":"cancel","id":"q.x","fence":"a.1.1"}', "a.1.1"),
        (b'{"type":"cancel","id":"q.x","fence":7}', None),
        (b'{"type":"hello","fence":"a.1.1"}', None),
        (b'"cancel"', None),
        (b"\xff\xfe", None),
    ],
)
def test_a_control_message_is_understood_or_passed_over(said: bytes, fence: str | None) -> None:
    assert cancelled_fence(said) == (None if fence is None else Fence(fence))


async def test_the_ledger_counts_the_true_prompt_of_an_answer_that_came_in_one_write(
    start_worker: StartWorker, client: AsyncClient, tokenizer: Tokenizer
) -> None:
    text = "Once upon a time " * 9
    async with start_worker():
        job = await client.enqueue(text, max_tokens=1, ignore_eos=True)
        usage = (await job.result(LIVENESS_S)).usage
        assert (await job.status()).num_prompt_tokens == usage["prompt_tokens"] == len(tokenizer.encode_prompt(text))


class Choking:
    """Spells log probabilities until it meets a token it cannot bear."""

    def __init__(self, token_id: int) -> None:
        self._token_id = token_id

    def __call__(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        if self._token_id in token_ids:
            raise KeyError(self._token_id)
        return [{"token_id": token_id} for token_id in token_ids]


async def test_an_answer_that_cannot_be_spelled_fails_alone(
    redis_url: str, queue_name: str, client: AsyncClient, tokenizer: Tokenizer, write_queue_card: Any
) -> None:
    await write_queue_card(vocab_size=tokenizer.vocab_size, tokenizer_digest=tokenizer.digest)
    settings = load_settings(redis_url=redis_url, queue=queue_name)
    bad_answer, good_answer = expected([1], 20), expected([2], 20)
    poison = next(token for token in bad_answer if token not in good_answer)
    made = crew(settings, tokenizer, HashModel(), {})
    worker = Worker(settings, replace(made, spell_logprobs=Choking(poison)))
    run = asyncio.create_task(worker.run())
    bad = await client.enqueue([1], max_tokens=20, ignore_eos=True, logprobs=0)
    good = await client.enqueue([2], max_tokens=20, ignore_eos=True, logprobs=0)
    with pytest.raises(JobFailed, match="could not be spelled"):
        await bad.result(LIVENESS_S)
    assert (await good.result(LIVENESS_S)).token_ids == good_answer
    events = [event async for event in bad.stream()]
    said = tuple(token for event in events for token in event.token_ids)
    assert said == bad_answer[: len(said)]
    assert events[-1].usage is not None
    assert events[-1].usage["completion_tokens"] == len(said)
    worker.drain()
    assert await asyncio.wait_for(run, LIVENESS_S) == 0


class Breaking(LocalEngine):
    """Its books are out of order after the first step."""

    steps = 0

    def step(self) -> Any:
        self.steps += 1
        return super().step()

    def capacity(self) -> Capacity:
        if self.steps:
            raise RuntimeError("blocks do not add up")
        return super().capacity()


async def test_a_worker_whose_engine_thread_is_gone_ends_with_1_and_a_peer_takes_its_jobs(
    redis_url: str,
    queue_name: str,
    client: AsyncClient,
    redis: Redis,
    tokenizer: Tokenizer,
    start_worker: StartWorker,
) -> None:
    settings = load_settings(redis_url=redis_url, queue=queue_name, lease=FOREVER, worker={"id": "broken"})
    made = crew(settings, tokenizer, HashModel(), {})
    assert isinstance(made.engine, LocalEngine)
    made.engine.__class__ = Breaking
    run = asyncio.create_task(Worker(settings, made).run())
    job = await client.enqueue([1], max_tokens=5, ignore_eos=True)
    assert await asyncio.wait_for(run, LIVENESS_S) == 1
    assert (await Queue(redis, queue_name).status(job.id)).owner == ""  # type: ignore[union-attr]
    async with start_worker():
        assert (await job.result(LIVENESS_S)).token_ids == expected([1], 5)


@pytest.mark.parametrize(
    ("num_blocks", "num_tokens"), [(32, 127), (8, 127), (2, 31)], ids=["larger", "equal", "smaller"]
)
async def test_an_answer_without_a_limit_keeps_the_length_that_the_cache_of_its_first_owner_allowed(
    start_worker: StartWorker, client: AsyncClient, num_blocks: int, num_tokens: int
) -> None:
    """Eight blocks of sixteen hold 128 tokens and the one that is never computed: 127 after a prompt of two."""
    turnstile = Turnstile(HashModel())
    async with start_worker(
        turnstile, engine={"num_blocks": 8}, worker={"id": "first", "drain_timeout_s": 0.0}
    ) as first:
        job = await client.enqueue([1, 2], ignore_eos=True)
        async with asyncio.timeout(LIVENESS_S):
            while (await job.status()).num_tokens < 3:
                await turnstile.until_step()
                turnstile.pass_one()
        first.drain()
        turnstile.open()
    assert (await job.status()).num_tokens < 31, "there was nothing left to say: the test proves nothing"
    async with start_worker(engine={"num_blocks": num_blocks}):
        result = await job.result(LIVENESS_S)
        started = [event async for event in job.stream() if event.type == "started"]
    assert (result.token_ids, result.finish_reason) == (expected([1, 2], num_tokens), "length")
    assert [event.max_tokens for event in started] == [127, num_tokens]
