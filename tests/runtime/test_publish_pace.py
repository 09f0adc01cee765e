"""How often tokens are written: first and last ones at once, all others together now and then."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from tests.engine.scripted_model import HashModel
from tests.runtime.harness import LIVENESS_S, StartWorker, Turnstile, expected

from jitney import AsyncClient
from jitney.connection import Redis
from jitney.keys import Fence, JobId
from jitney.messages import Event, JobSpec
from jitney.queue import Delivery, Ending, Queue
from jitney_worker.engine.engine import LocalEngine
from jitney_worker.engine.protocol import Capacity, SequenceDelta
from jitney_worker.engine.sequence import SequenceId, SequenceParams, SequenceRequest
from jitney_worker.engine.settings import EngineSettings
from jitney_worker.runtime.aboard import Aboard
from jitney_worker.runtime.bridge import Add, Bridge, StepReport
from jitney_worker.runtime.choice import Choice
from jitney_worker.runtime.engine_thread import EngineThread
from jitney_worker.runtime.heartbeat import Leases
from jitney_worker.runtime.meters import Meters
from jitney_worker.runtime.pace import Backlog, Pace
from jitney_worker.runtime.reports import Reports
from jitney_worker.runtime.roster import Roster
from jitney_worker.runtime.running import RunningJob
from jitney_worker.runtime.server_time import ServerTime
from jitney_worker.text.rules import StopRules
from jitney_worker.text.spelling import Speller
from jitney_worker.text.tokenizer import Tokenizer

SELDOM = {"publish_interval_s": 60.0, "max_unpublished_steps": 8, "snapshot_every_s": 60.0}
MAX_HELD = 6
"""Three quarters of `max_unpublished_steps`."""


def test_everything_is_due_once_the_interval_is_over_or_too_many_steps_wait() -> None:
    pace = Pace(2.0, 6)
    asked = [(10.0, 1), (11.0, 2), (11.9, 5), (12.0, 1), (12.1, 1), (12.2, 6), (14.1, 2), (14.2, 1)]
    due_at = [now for now, num_unpublished in asked if pace.is_due(now, num_unpublished)]
    assert due_at == [10.0, 12.0, 12.2, 14.2]


def test_without_an_interval_everything_is_due_after_every_step() -> None:
    pace = Pace(0.0, 6)
    assert all(pace.is_due(5.0, 1) for _ in range(5))


def running(fence: str, *spellers: Speller) -> RunningJob:
    """A job that has said something and goes on; one choice for each speller."""
    delivery = Delivery(JobId(f"q.{fence}"), "interactive", "", Fence(fence), 1, 0, 0, 0, 0, 0.0, (), b"", None)
    choices = []
    for number, speller in enumerate(spellers):
        params = SequenceParams(max_tokens=9, choice=number)
        request = SequenceRequest(SequenceId(f"q.{fence}/{number}/{fence}"), (1,), params, (0, 0.0, 0, 0))
        choices.append(Choice(request, speller, 0, 0))
    job = RunningJob(delivery, JobSpec(prompt=(1,)), (1,), choices, 2, lambda ids, logprobs: [], "f")
    job.is_started = True
    return job


def test_a_job_that_waited_and_ends_is_written_once_and_the_steps_count_when_nobody_waits(tokenizer: Tokenizer) -> None:
    backlog, ending, other = Backlog(), running("a", Speller(tokenizer)), running("b", Speller(tokenizer))
    backlog.add([ending, other], 1)
    assert (backlog.urgent(), backlog.take_steps()) == ([], 0)
    ending.expire()
    backlog.add([ending], 1)
    assert (backlog.urgent(), backlog.take_steps()) == ([ending], 0)
    backlog.add([other], 1)
    assert (backlog.everybody(), backlog.take_steps()) == ([other], 3)
    assert (backlog.everybody(), backlog.take_steps()) == ([], 0)


class Dumb(Speller):
    """Cannot spell anything."""

    def push_all(self, token_ids: Sequence[int]) -> str:
        raise KeyError(token_ids[0])


def gain(job: RunningJob, choice: int, *token_ids: int) -> None:
    job.gain(job.choices[choice], SequenceDelta(job.choices[choice].request.id, 1, token_ids))


def test_a_choice_that_cannot_be_spelled_takes_no_words_of_another_along(tokenizer: Tokenizer) -> None:
    job = running("a", Speller(tokenizer), Dumb(tokenizer))
    gain(job, 0, 5)
    gain(job, 1, 6)
    with pytest.raises(KeyError):
        job.write()
    assert (job.next_seq, job.choices[0].pending_ids, job.choices[0].num_logged) == (2, [5], 0)


def test_what_cannot_be_spelled_stops_no_ending(tokenizer: Tokenizer) -> None:
    for end in (RunningJob.expire, lambda job: job.fail({"code": "x"}), lambda job: job.bury({"code": "x"})):
        job = running("a", Dumb(tokenizer))
        gain(job, 0, 5)
        end(job)
        assert job.is_over
        assert job.num_tokens == 0
        ending = job.write()
        assert isinstance(ending, Ending)
        assert len(ending.events) == 1


async def test_what_was_computed_before_a_deadline_is_said_though_it_was_not_due(
    start_worker: StartWorker, client: AsyncClient
) -> None:
    turnstile = Turnstile(HashModel())
    async with start_worker(turnstile, worker=SELDOM):
        try:
            job = await client.enqueue([1], max_tokens=30, ignore_eos=True, timeout_s=4.0)
            await pass_steps(turnstile, 4)
            async with asyncio.timeout(LIVENESS_S):
                events = [event async for event in job.stream()]
        finally:
            turnstile.open()
    assert [event.type for event in events] == ["started", "tokens", "tokens", "expired"]
    assert [event.token_ids for event in events[1:3]] == [expected([1], 4)[:1], expected([1], 4)[1:]]


def test_the_first_words_of_a_suspect_make_room_though_nothing_else_has_changed(tokenizer: Tokenizer) -> None:
    """They change neither seats nor snapshots, and nothing may be due for long."""
    capacity = Capacity(free_seats=3, num_running=1, num_waiting=0, num_free_blocks=9, num_blocks=9)
    aboard = Aboard(Leases(), Bridge(8), StopRules(tokenizer), lambda fence, job: None)
    roster = Roster(worker_id="w", queue="q", model="m", fingerprint="f", features={})
    calls: list[str] = []
    meters = Meters(ServerTime(), looks_up_prefixes=True)
    reports = Reports(aboard, roster, meters, capacity, lambda: calls.append("room"))
    suspect = running("a", Speller(tokenizer))
    suspect.delivery, suspect.is_started = replace(suspect.delivery, strikes=1, seq=1), False
    aboard.add(suspect)

    def absorb(*token_ids: int, is_due: bool = False) -> list[RunningJob]:
        delta = SequenceDelta(suspect.choices[0].request.id, 1, token_ids)
        return reports.absorb(StepReport((delta,) if token_ids else (), capacity, is_due=is_due))

    absorb()
    assert calls == []
    assert absorb(5) == [suspect]
    assert calls == ["room"]
    suspect.write()
    absorb(6)
    assert calls == ["room"]
    absorb(is_due=True)
    assert calls == ["room"] * 2


async def test_the_loop_hears_at_once_that_a_waiting_sequence_was_let_in() -> None:
    """Nobody has gained a first token by it, but another job may be claimed."""
    settings = EngineSettings(max_model_len=512, num_blocks=64, max_num_seqs=4, max_num_batched_tokens=16)
    turnstile, bridge, wakes = Turnstile(HashModel()), Bridge(100), list[None]()
    bridge.connect(asyncio.get_running_loop(), lambda: wakes.append(None))
    thread = EngineThread(LocalEngine(settings, turnstile), bridge, Pace(60.0, 100), snapshot_every_s=60.0)
    for name, num_prompt_tokens in (("a", 16), ("b", 60)):
        params, key = SequenceParams(max_tokens=50), (0, 0.0, 0, ord(name))
        prompt = tuple(range(1, num_prompt_tokens + 1))
        bridge.send(Add(SequenceRequest(SequenceId(f"q.{name}/0/f"), prompt, params, key)))
    thread.start()
    try:
        await turnstile.until_step()
        num_wakes = []
        for _ in range(3):  # the first token of a; b's first chunk beside it; another chunk of b
            turnstile.pass_one()
            await turnstile.until_step()
            num_wakes.append(len(wakes))
        assert num_wakes == [1, 2, 2]
    finally:
        bridge.stop()
        turnstile.open()
        await asyncio.to_thread(thread.join, LIVENESS_S)


async def pass_steps(turnstile: Turnstile, count: int) -> None:
    """Let so many steps through, and wait until the engine stands before the next one."""
    for _ in range(count):
        await turnstile.until_step()
        turnstile.pass_one()
    await turnstile.until_step()


async def logged(queue: Queue, job_id: JobId) -> list[tuple[int, ...]]:
    """The token ids of each of the job's events that has any."""
    events = [Event.decode(payload) for payload in await queue.read_log(job_id, 0) or ()]
    return [event.token_ids for event in events if event.type == "tokens"]


async def until_logged(queue: Queue, job_id: JobId, num_events: int) -> list[tuple[int, ...]]:
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
            await pass_steps(turnstile, MAX_HELD - 1)
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
            await pass_steps(turnstile, 4)
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
