"""Ownership and endings: leases, faults, drains, hand-overs between two workers of one queue."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from tests.engine.scripted_model import HashModel
from tests.runtime.harness import LIVENESS_S, LONGER_THAN_A_PAUSE_S, Ears, Gated, StartWorker, Turnstile, crew, expected

from jitney import AsyncClient
from jitney.connection import Redis
from jitney.keys import Keys
from jitney.messages import Event
from jitney.queue import Append, Queue, pack_ids
from jitney.workers import list_workers
from jitney_worker.engine.protocol import ModelOutput, SchedulerOutput
from jitney_worker.runtime.worker import Worker
from jitney_worker.settings import load_settings
from jitney_worker.text.tokenizer import Tokenizer

LONG = 300


@dataclass
class Stumbling:
    """Raises in the steps that the test names, as a device that runs out of memory does."""

    fails: set[int]
    runner: HashModel = field(default_factory=HashModel)
    num_calls: int = 0

    def execute(self, scheduled: SchedulerOutput) -> ModelOutput:
        self.num_calls += 1
        if self.num_calls in self.fails:
            raise RuntimeError("out of memory")
        return self.runner.execute(scheduled)


async def test_a_step_that_raises_costs_every_job_a_pause_and_no_token(
    start_worker: StartWorker, client: AsyncClient
) -> None:
    runner = Stumbling(fails={4})
    async with start_worker(runner):
        jobs = [await client.enqueue([n], max_tokens=12, ignore_eos=True) for n in (1, 2, 3)]
        for n, job in enumerate(jobs, 1):
            assert (await job.result(LIVENESS_S)).token_ids == expected([n], 12)
            statuses = [await job.status() for job in jobs]
    assert runner.num_calls > 4
    assert max(status.tries for status in statuses) == 2


async def test_a_worker_whose_every_step_raises_ends_with_1_and_its_jobs_stay(
    redis_url: str, queue_name: str, start_worker: StartWorker, client: AsyncClient, tokenizer: Tokenizer, redis: Redis
) -> None:
    settings = load_settings(redis_url=redis_url, queue=queue_name)
    worker = Worker(settings, crew(settings, tokenizer, Stumbling(fails=set(range(1, 1_000))), {}))
    run = asyncio.create_task(worker.run())
    jobs = [await client.enqueue([n], max_tokens=4, ignore_eos=True) for n in range(1, 9)]
    assert await asyncio.wait_for(run, LIVENESS_S) == 1
    async with start_worker():
        for n, job in enumerate(jobs, 1):
            assert (await job.result(LIVENESS_S)).token_ids == expected([n], 4)


async def test_a_drain_lets_running_jobs_finish_and_claims_no_more(
    redis_url: str, queue_name: str, client: AsyncClient, tokenizer: Tokenizer, redis: Redis, start_worker: StartWorker
) -> None:
    turnstile = Turnstile(HashModel())
    async with start_worker(turnstile, engine={"max_num_seqs": 1}, worker={"claim_ahead": 0}) as worker:
        running = await client.enqueue([1], max_tokens=30, ignore_eos=True)
        await turnstile.until_step()
        worker.drain()
        waiting = await client.enqueue([2], max_tokens=3, ignore_eos=True)
        turnstile.open()
        assert (await running.result(LIVENESS_S)).token_ids == expected([1], 30)
    assert (await waiting.status()).state == "waiting"
    async with start_worker():
        assert (await waiting.result(LIVENESS_S)).token_ids == expected([2], 3)


@pytest.mark.parametrize("max_tokens", [5, 511], ids=["will run", "will be refused"])
async def test_a_drain_waits_for_a_job_that_is_still_being_read_in(
    redis_url: str,
    queue_name: str,
    client: AsyncClient,
    tokenizer: Tokenizer,
    write_queue_card: Any,
    ears: Ears,
    max_tokens: int,
) -> None:
    await write_queue_card(vocab_size=tokenizer.vocab_size, tokenizer_digest=tokenizer.digest)
    settings = load_settings(redis_url=redis_url, queue=queue_name, worker={"drain_timeout_s": 3_600})
    gated = Gated(tokenizer)
    worker = Worker(settings, crew(settings, gated, HashModel(), {"num_blocks": 8}))  # type: ignore[arg-type]
    run = asyncio.create_task(worker.run())
    job = await client.enqueue("Once", max_tokens=max_tokens, ignore_eos=True)
    assert await asyncio.to_thread(gated.arrived.wait, LIVENESS_S)
    worker.drain()
    await ears.until("draining")
    gated.gate.set()
    assert await asyncio.wait_for(run, LIVENESS_S) == 0
    assert (await job.status()).reason == ("finished" if max_tokens == 5 else "failed")


async def test_a_drain_in_a_hurry_hands_over_and_the_peer_goes_on_with_the_next_token(
    redis_url: str, queue_name: str, client: AsyncClient, tokenizer: Tokenizer, start_worker: StartWorker
) -> None:
    turnstile = Turnstile(HashModel())
    async with start_worker(turnstile, worker={"id": "first"}) as first:
        jobs = [await client.enqueue([n], max_tokens=LONG, ignore_eos=True) for n in (1, 2)]
        while len(await turnstile.until_step()) < 2:
            turnstile.pass_one()
        turnstile.open()
        streams = [asyncio.create_task(_collect(client, job.id)) for job in jobs]
        async for event in jobs[1].stream():
            if event.index > 5:
                break
        async with start_worker(worker={"id": "second"}):
            first.drain()
            first.drain()
            collected = await asyncio.wait_for(asyncio.gather(*streams), LIVENESS_S)
    for n, (ids, attempts) in enumerate(collected, 1):
        assert ids == expected([n], LONG)
        assert attempts in ([1], [1, 1])  # a clean hand-over burns no attempt
    assert [1, 1] in [attempts for _, attempts in collected], "nothing was handed over: the test proves nothing"


async def _collect(client: AsyncClient, job_id: str) -> tuple[tuple[int, ...], list[int | None]]:
    ids: list[int] = []
    attempts: list[int | None] = []
    async for event in client.job(job_id).stream():
        assert event.type != "tokens" or event.index == len(ids)
        ids += event.token_ids
        attempts += [event.attempt] if event.type == "started" else []
    return tuple(ids), attempts


async def test_a_forward_pass_longer_than_the_lease_does_not_lose_the_job(
    start_worker: StartWorker, client: AsyncClient, redis: Redis, queue_name: str
) -> None:
    """B41 c: renewal does not depend on the thread that computes."""
    turnstile = Turnstile(HashModel())
    leases = Keys(queue_name).leases("interactive")
    async with start_worker(turnstile, lease={"duration_s": LONGER_THAN_A_PAUSE_S, "stall_after_s": 60}):
        job = await client.enqueue([1], max_tokens=5, ignore_eos=True)
        await turnstile.until_step()
        expiry = first = await redis.zscore(leases, job.id)
        async with asyncio.timeout(LIVENESS_S):
            while expiry < first + 1_500 * LONGER_THAN_A_PAUSE_S:  # a lease and a half later the job is still ours
                expiry = await redis.zscore(leases, job.id)
        turnstile.open()
        assert (await job.result(LIVENESS_S)).token_ids == expected([1], 5)
        assert (await job.status()).tries == 1


async def test_a_lost_lease_makes_the_worker_drop_the_job_and_take_others(
    start_worker: StartWorker, client: AsyncClient, redis: Redis, queue_name: str
) -> None:
    """B41 b: the job was given to somebody else meanwhile; what this worker still says of it is refused."""
    turnstile = Turnstile(HashModel())
    queue = Queue(redis, queue_name)
    async with start_worker(turnstile, engine={"max_num_seqs": 1}):
        job = await client.enqueue([1], max_tokens=50, ignore_eos=True)
        await turnstile.until_step()
        await redis.zadd(Keys(queue_name).leases("interactive"), {job.id: 1})
        claimed = await queue.claim("thief", "t1", credit=1, fingerprint="hash.1", lease_s=60)
        assert [delivery.id for delivery in claimed.deliveries] == [job.id]
        turnstile.open()
        following = await client.enqueue([2], max_tokens=5, ignore_eos=True)
        assert (await following.result(LIVENESS_S)).token_ids == expected([2], 5)
        status = await job.status()
        assert (status.owner, status.seq) == ("thief", 0)


async def test_a_job_whose_lease_is_lost_leaves_at_the_next_boundary_and_its_blocks_are_free(
    redis_url: str,
    queue_name: str,
    client: AsyncClient,
    redis: Redis,
    tokenizer: Tokenizer,
    write_queue_card: Any,
    ears: Ears,
) -> None:
    """The engine is looked at where it stands before a step: nothing moves there."""
    await write_queue_card(vocab_size=tokenizer.vocab_size, tokenizer_digest=tokenizer.digest)
    turnstile = Turnstile(HashModel())
    settings = load_settings(redis_url=redis_url, queue=queue_name, lease={"duration_s": LONGER_THAN_A_PAUSE_S})
    made = crew(settings, tokenizer, turnstile, {"num_blocks": 32})
    worker = Worker(settings, made)
    run = asyncio.create_task(worker.run())
    lost = await client.enqueue(list(range(1, 101)), max_tokens=50, ignore_eos=True)
    kept = await client.enqueue([2], max_tokens=5, ignore_eos=True)
    while len(await turnstile.until_step()) < 2:
        turnstile.pass_one()
    assert made.engine.capacity().num_free_blocks == 32 - 7 - 1
    await redis.zadd(Keys(queue_name).leases("interactive"), {lost.id: 1})
    await Queue(redis, queue_name).claim("thief", "t1", credit=1, fingerprint="hash.1", lease_s=3_600)
    await ears.until("job_lost")
    turnstile.pass_one()
    assert await turnstile.until_step() == [kept.id]
    assert made.engine.capacity().num_free_blocks == 32 - 1
    turnstile.open()
    assert (await kept.result(LIVENESS_S)).token_ids == expected([2], 5)
    worker.drain()
    assert await asyncio.wait_for(run, LIVENESS_S) == 0
    capacity = made.engine.capacity()
    assert (capacity.num_free_blocks, capacity.num_running, capacity.num_waiting) == (32, 0, 0)
    assert (await lost.status()).owner == "thief"


async def test_a_job_claimed_ahead_goes_to_a_peer_with_a_free_seat(
    start_worker: StartWorker, client: AsyncClient, redis: Redis, queue_name: str
) -> None:
    turnstile = Turnstile(HashModel())
    full = {"id": "full", "claim_ahead_patience_s": 0.05, "snapshot_every_s": 0.01}
    async with start_worker(turnstile, engine={"max_num_seqs": 1}, worker=full):
        try:
            seated = await client.enqueue([1], max_tokens=LONG, ignore_eos=True)
            await turnstile.until_step()
            ahead = await client.enqueue([2], max_tokens=4, ignore_eos=True)
            async with asyncio.timeout(LIVENESS_S):
                while (await ahead.status()).owner != "full":
                    pass
            async with start_worker(worker={"id": "idle"}):
                async with asyncio.timeout(LIVENESS_S):
                    while (await ahead.status()).owner == "full":
                        turnstile.pass_one()
                        await turnstile.until_step()
                assert (await ahead.result(LIVENESS_S)).token_ids == expected([2], 4)
        finally:
            turnstile.open()
        assert (await seated.result(LIVENESS_S)).token_ids == expected([1], LONG)


async def test_a_worker_shows_its_seats_and_who_left_at_which_step(
    start_worker: StartWorker, client: AsyncClient, redis: Redis, queue_name: str
) -> None:
    async with start_worker(worker={"id": "shown", "snapshot_every_s": 0.01}):
        jobs = [await client.enqueue([n], max_tokens=n + 2, ignore_eos=True) for n in range(1, 6)]
        for job in jobs:
            await job.result(LIVENESS_S)
        async with asyncio.timeout(LIVENESS_S):
            while len((view := (await list_workers(redis, queue_name))[0]).departures) < 5:
                pass
        assert (view.id, view.state, view.max_num_seqs) == ("shown", "ready", 4)
        left = {departure.job: departure for departure in view.departures}
        for n, job in enumerate(jobs, 1):
            departure = left[job.id]
            assert (departure.num_output_tokens, departure.reason) == (n + 2, "length")
            assert departure.left_step - departure.joined_step == n + 1
    assert await list_workers(redis, queue_name) == []


async def test_a_choice_that_left_is_shown_with_its_own_tokens_and_not_those_of_the_whole_job(
    start_worker: StartWorker, client: AsyncClient, redis: Redis, queue_name: str
) -> None:
    async with start_worker(worker={"snapshot_every_s": 0.01}):
        job = await client.enqueue([7], n=3, max_tokens=5, ignore_eos=True)
        await job.result(LIVENESS_S)
        async with asyncio.timeout(LIVENESS_S):
            while len((view := (await list_workers(redis, queue_name))[0]).departures) < 3:
                pass
    left = [(departure.choice, departure.num_output_tokens) for departure in view.departures]
    assert sorted(left) == [(0, 5), (1, 5), (2, 5)]


@pytest.mark.parametrize("policy", ["continuous", "static"])
async def test_both_policies_give_the_same_answers(start_worker: StartWorker, client: AsyncClient, policy: str) -> None:
    jobs = [await client.enqueue([n], max_tokens=n % 9 + 1, ignore_eos=True) for n in range(1, 21)]
    turnstile = Turnstile(HashModel())
    turnstile.open()
    async with start_worker(turnstile, policy=policy):
        for n, job in enumerate(jobs, 1):
            assert (await job.result(LIVENESS_S)).token_ids == expected([n], n % 9 + 1)
    joined = [sequence for before, after in pairwise(turnstile.steps) for sequence in set(after) - set(before)]
    joined_a_running_batch = [
        sequence
        for before, after in pairwise(turnstile.steps)
        if set(before) & set(after)
        for sequence in set(after) - set(before)
    ]
    assert len(joined) >= 16
    assert bool(joined_a_running_batch) == (policy == "continuous")


async def test_an_answer_that_was_whole_when_its_worker_died_is_ended_without_computing(
    start_worker: StartWorker, client: AsyncClient, redis: Redis, queue_name: str
) -> None:
    """Death between the last append and the finish."""

    queue, answer = Queue(redis, queue_name), expected([9], 4)
    job = await client.enqueue([9], max_tokens=4, ignore_eos=True)
    (delivery,) = (await queue.claim("dead", "d1", credit=1, fingerprint="hash.1", lease_s=60)).deliveries
    events = [
        Event("started", 1, attempt=1, prompt_tokens=1, cached_tokens=0),
        Event("tokens", 2, token_ids=answer, text="text", finish_reason="length"),
    ]
    written = Append(delivery.id, delivery.fence, 1, 4, [e.encode() for e in events], pack_ids([9]), 1)
    assert await queue.append([written]) == []
    await redis.zadd(Keys(queue_name).leases("interactive"), {job.id: 1})
    model = HashModel()
    async with start_worker(model):
        result = await job.result(LIVENESS_S)
        last = [event async for event in job.stream()][-1]
    assert (result.token_ids, result.text, result.finish_reason) == (answer, "text", "length")
    assert (last.type, last.seq) == ("finished", 3)
    assert model.steps == []


async def test_a_job_that_is_over_leaves_no_timer_behind(
    start_worker: StartWorker, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its deadline may be days away."""
    loop, timers = asyncio.get_running_loop(), list[asyncio.TimerHandle]()
    call_later = loop.call_later

    def noting(delay: float, *rest: Any, **more: Any) -> asyncio.TimerHandle:
        timer = call_later(delay, *rest, **more)
        if delay > 1_800:
            timers.append(timer)
        return timer

    monkeypatch.setattr(loop, "call_later", noting)
    async with start_worker():
        jobs = [await client.enqueue([n], max_tokens=2, ignore_eos=True, timeout_s=3_600.0) for n in range(1, 6)]
        for job in jobs:
            await job.result(LIVENESS_S)
    assert [timer.cancelled() for timer in timers] == 5 * [True]
