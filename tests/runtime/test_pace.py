"""How often tokens are written: first and last ones at once, all others together now and then."""

from __future__ import annotations

import asyncio

from tests.engine.scripted_model import HashModel
from tests.runtime.harness import LIVENESS_S, StartWorker, Turnstile, expected

from jitney import AsyncClient
from jitney.connection import Redis
from jitney.keys import Fence, JobId
from jitney.messages import Event, JobSpec
from jitney.queue import Delivery, Queue
from jitney_worker.engine.sequence import SequenceId, SequenceParams, SequenceRequest
from jitney_worker.runtime.choice import Choice
from jitney_worker.runtime.pace import Backlog, Pace
from jitney_worker.runtime.running import RunningJob
from jitney_worker.text.spelling import Speller
from jitney_worker.text.tokenizer import Tokenizer

SELDOM = {"publish_interval_s": 60.0, "max_unpublished_steps": 8, "snapshot_every_s": 60.0}
MAX_HELD = 6
"""Three quarters of `max_unpublished_steps`."""


def test_everything_is_due_once_the_interval_is_over_or_too_many_steps_wait() -> None:
    pace = Pace(2.0, 6)
    asked = [(10.0, 1), (11.0, 2), (11.9, 5), (12.0, 6), (12.1, 1), (12.2, 6), (14.1, 2), (14.2, 1)]
    assert [pace.is_due(now, num_unpublished) for now, num_unpublished in asked] == [
        True,
        False,
        False,
        True,
        False,
        True,
        False,
        True,
    ]


def test_without_an_interval_everything_is_due_after_every_step() -> None:
    pace = Pace(0.0, 6)
    assert all(pace.is_due(5.0, 1) for _ in range(5))


def running(fence: str, tokenizer: Tokenizer) -> RunningJob:
    """A job that has said something and goes on."""
    request = SequenceRequest(SequenceId(f"q.{fence}/0/{fence}"), (1,), SequenceParams(max_tokens=9), (0, 0.0, 0, 0))
    delivery = Delivery(JobId(f"q.{fence}"), "interactive", "", Fence(fence), 1, 0, 0, 0, 0, 0.0, (), b"", None)
    choice = Choice(request, Speller(tokenizer), 1, 1)
    job = RunningJob(delivery, JobSpec(prompt=(1,)), (1,), [choice], 2, lambda ids, logprobs: [], "f")
    job.is_started = True
    return job


def test_a_job_that_waited_and_ends_is_written_once_and_the_steps_count_when_nobody_waits(tokenizer: Tokenizer) -> None:
    backlog, ending, other = Backlog(), running("a", tokenizer), running("b", tokenizer)
    backlog.add([ending, other], 1)
    assert (backlog.urgent(), backlog.take_steps()) == ([], 0)
    ending.expire()
    backlog.add([ending], 1)
    assert (backlog.urgent(), backlog.take_steps()) == ([ending], 0)
    backlog.add([other], 1)
    assert (backlog.everybody(), backlog.take_steps()) == ([other], 3)
    assert (backlog.everybody(), backlog.take_steps()) == ([], 0)


async def logged(queue: Queue, job_id: str) -> list[tuple[int, ...]]:
    """The token ids of each of the job's events that has any."""
    events = [Event.decode(payload) for payload in await queue.read_log(job_id, 0)]
    return [event.token_ids for event in events if event.type == "tokens"]


async def until_logged(queue: Queue, job_id: str, num_events: int) -> list[tuple[int, ...]]:
    async with asyncio.timeout(LIVENESS_S):
        while len(found := await logged(queue, job_id)) < num_events:
            pass
    return found


async def test_a_first_token_is_written_at_once_and_those_after_it_together(
    start_worker: StartWorker, client: AsyncClient, redis: Redis, queue_name: str
) -> None:
    queue, turnstile, answer = Queue(redis, queue_name), Turnstile(HashModel()), expected([1], 30)
    async with start_worker(turnstile, worker=SELDOM):
        try:
            job = await client.enqueue([1], max_tokens=30, ignore_eos=True)
            await turnstile.until_step()
            turnstile.pass_one()
            assert await until_logged(queue, job.id, 1) == [answer[:1]]
            for _ in range(MAX_HELD - 1):
                await turnstile.until_step()
                turnstile.pass_one()
            await turnstile.until_step()
            assert await logged(queue, job.id) == [answer[:1]]  # five steps wait, and nothing has asked for them
            turnstile.pass_one()
            assert await until_logged(queue, job.id, 2) == [answer[:1], answer[1 : MAX_HELD + 1]]
        finally:
            turnstile.open()
        assert (await job.result(LIVENESS_S)).token_ids == answer


async def test_an_end_is_written_at_once_and_takes_nobody_elses_tokens_with_it(
    start_worker: StartWorker, client: AsyncClient, redis: Redis, queue_name: str
) -> None:
    queue, turnstile = Queue(redis, queue_name), Turnstile(HashModel())
    async with start_worker(turnstile, worker=SELDOM | {"max_unpublished_steps": 400}):
        try:
            long = await client.enqueue([1], max_tokens=40, ignore_eos=True)
            await turnstile.until_step()
            short = await client.enqueue([2], max_tokens=3, ignore_eos=True)
            async with asyncio.timeout(LIVENESS_S):
                while short.id not in turnstile.steps[-1]:
                    turnstile.pass_one()
                    await turnstile.until_step()
                for _ in range(3):
                    turnstile.pass_one()
                    await turnstile.until_step()
                assert (await short.result(LIVENESS_S)).token_ids == expected([2], 3)
            assert await logged(queue, long.id) == [expected([1], 1)]
        finally:
            turnstile.open()
        assert (await long.result(LIVENESS_S)).token_ids == expected([1], 40)


async def test_a_long_step_does_not_hold_back_what_the_steps_before_it_gave(
    start_worker: StartWorker, client: AsyncClient, redis: Redis, queue_name: str
) -> None:
    queue, turnstile, answer = Queue(redis, queue_name), Turnstile(HashModel()), expected([1], 30)
    async with start_worker(turnstile, worker=SELDOM | {"publish_interval_s": 0.2}):
        try:
            job = await client.enqueue([1], max_tokens=30, ignore_eos=True)
            for _ in range(4):
                await turnstile.until_step()
                turnstile.pass_one()
            await turnstile.until_step()
            async with asyncio.timeout(LIVENESS_S):
                while sum(map(len, await logged(queue, job.id))) < 4:
                    pass
        finally:
            turnstile.open()
        assert (await job.result(LIVENESS_S)).token_ids == answer


async def test_without_an_interval_each_step_is_written_when_it_ends(
    start_worker: StartWorker, client: AsyncClient, redis: Redis, queue_name: str
) -> None:
    queue, turnstile, answer = Queue(redis, queue_name), Turnstile(HashModel()), expected([1], 10)
    async with start_worker(turnstile, worker=SELDOM | {"publish_interval_s": 0.0}):
        try:
            job = await client.enqueue([1], max_tokens=10, ignore_eos=True)
            for number in range(1, 9):
                await turnstile.until_step()
                turnstile.pass_one()
                assert await until_logged(queue, job.id, number) == [(token_id,) for token_id in answer[:number]]
        finally:
            turnstile.open()
        assert (await job.result(LIVENESS_S)).token_ids == answer


async def test_an_engine_that_may_not_run_ahead_never_waits_for_the_interval(
    start_worker: StartWorker, client: AsyncClient
) -> None:
    """With room for one step, each is due: the engine would wait for the write, and the write for the engine."""
    turnstile = Turnstile(HashModel())
    async with start_worker(turnstile, worker=SELDOM | {"max_unpublished_steps": 1}):
        turnstile.open()
        job = await client.enqueue([1], max_tokens=60, ignore_eos=True)
        assert (await job.result(LIVENESS_S)).token_ids == expected([1], 60)
