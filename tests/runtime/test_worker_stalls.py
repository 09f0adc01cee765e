"""A stuck engine: liveness is progress, not steps, and whoever makes none holds nobody up."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.engine.scripted_model import HashModel
from tests.runtime.harness import LIVENESS_S, Ears, StartWorker, Turnstile, crew, expected

from jitney import AsyncClient
from jitney.connection import Redis
from jitney.errors import JobFailed
from jitney.messages import Event
from jitney.queue import Queue
from jitney.workers import list_workers
from jitney_worker.engine.engine import LocalEngine
from jitney_worker.engine.protocol import ModelOutput, SchedulerOutput, SequenceDelta
from jitney_worker.engine.sequence import SequenceId, SequenceParams, SequenceRequest
from jitney_worker.engine.settings import EngineSettings
from jitney_worker.runtime.bridge import Add, Bridge
from jitney_worker.runtime.engine_thread import EngineThread, still_runs
from jitney_worker.runtime.pace import Pace
from jitney_worker.runtime.stall_clock import StallClock
from jitney_worker.runtime.worker import Worker
from jitney_worker.settings import load_settings
from jitney_worker.text.tokenizer import Tokenizer

FOREVER = 3_600
REPOSITORY = Path(__file__).parents[2]
POISON = 13
"""A prompt that holds this token makes a step that never ends."""


@dataclass
class Hanging:
    """A runner that hangs in every step with the poison in it, until the test lets it go."""

    runner: HashModel = field(default_factory=HashModel)
    arrived: threading.Event = field(default_factory=threading.Event)
    free: threading.Event = field(default_factory=threading.Event)

    def execute(self, scheduled: SchedulerOutput) -> ModelOutput:
        if any(POISON in item.sequence.request.prompt_ids for item in scheduled.scheduled):
            self.arrived.set()
            assert self.free.wait(LIVENESS_S)
        return self.runner.execute(scheduled)


async def run_until_its_end(
    redis_url: str, queue_name: str, tokenizer: Tokenizer, runner: Any, *, stall_after_s: float, **worker: Any
) -> int:
    """A worker that is not told to stop; its exit code."""
    lease = {"duration_s": FOREVER, "stall_after_s": stall_after_s}
    settings = load_settings(redis_url=redis_url, queue=queue_name, lease=lease, worker=worker)
    return await asyncio.wait_for(Worker(settings, crew(settings, tokenizer, runner, {})).run(), LIVENESS_S)


async def state_of(redis: Redis, queue_name: str, worker_id: str) -> str:
    return next(view.state for view in await list_workers(redis, queue_name) if view.id == worker_id)


async def test_a_stuck_worker_hands_its_jobs_to_a_peer_at_once_and_serves_on_when_its_engine_comes_back(
    start_worker: StartWorker, client: AsyncClient, redis: Redis, queue_name: str, ears: Ears
) -> None:
    """The lease would last an hour. What the engine then says of them late stands in no log."""
    hanging = Hanging()
    lease = {"duration_s": FOREVER, "stall_after_s": 2.0}
    async with start_worker(hanging, lease=lease, worker={"id": "stuck", "snapshot_every_s": 0.01}):
        try:
            retry = {"backoff_s": 600.0, "jitter": 0.0}  # it was not their fault: nobody waits for it
            jobs = [await client.enqueue([n, POISON], max_tokens=5, ignore_eos=True, retry=retry) for n in (1, 2)]
            assert await asyncio.to_thread(hanging.arrived.wait, LIVENESS_S)
            await ears.until("job_retried", num_times=2)
            async with asyncio.timeout(LIVENESS_S):
                while await state_of(redis, queue_name, "stuck") != "stuck":
                    pass
            spared = await client.enqueue([3], max_tokens=5, ignore_eos=True)
            async with start_worker(worker={"id": "peer"}):
                for n, job in enumerate(jobs, 1):
                    assert (await job.result(LIVENESS_S)).token_ids == expected([n, POISON], 5)
                assert (await spared.result(LIVENESS_S)).token_ids == expected([3], 5)
        finally:
            hanging.free.set()
        await ears.until("engine_recovered")
        async with asyncio.timeout(LIVENESS_S):
            while await state_of(redis, queue_name, "stuck") != "ready":
                pass
        later = await client.enqueue([4, POISON], max_tokens=5, ignore_eos=True)
        assert (await later.result(LIVENESS_S)).token_ids == expected([4, POISON], 5)
        for job in jobs:
            log = [Event.decode(payload) for payload in await Queue(redis, queue_name).read_log(job.id) or []]
            assert [event.seq for event in log] == list(range(1, len(log) + 1))
            assert sum(len(event.token_ids) for event in log) == 5
        tries = [(await job.status()).tries for job in [*jobs, spared, later]]
    assert tries == [2, 2, 1, 1]
    assert (len(ears.of("engine_stuck")), ears.of("leases_given_up")) == (1, [])


async def test_a_worker_that_stays_stuck_ends_with_1_and_does_not_wait_for_its_engine(
    redis_url: str, queue_name: str, start_worker: StartWorker, client: AsyncClient, tokenizer: Tokenizer, ears: Ears
) -> None:
    hanging = Hanging()
    job = await client.enqueue([POISON], max_tokens=5, ignore_eos=True)
    try:
        assert await run_until_its_end(redis_url, queue_name, tokenizer, hanging, stall_after_s=0.2) == 1
        assert still_runs()
        assert len(ears.of("engine_stuck")) == 1
        async with start_worker():
            assert (await job.result(LIVENESS_S)).token_ids == expected([POISON], 5)
    finally:
        hanging.free.set()


async def test_the_process_of_a_worker_that_stays_stuck_ends_though_its_engine_never_does(
    redis_url: str, queue_name: str, start_worker: StartWorker, client: AsyncClient, tiny_directory: Path
) -> None:
    job = await client.enqueue([1], max_tokens=5, ignore_eos=True)
    arguments = ("-m", "tests.runtime.hanging_worker", redis_url, queue_name, str(tiny_directory))
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, cwd=REPOSITORY)
    try:
        assert await asyncio.wait_for(process.wait(), LIVENESS_S) == 1
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    async with start_worker():
        assert (await job.result(LIVENESS_S)).token_ids == expected([1], 5)
        assert (await job.status()).tries == 2


async def test_a_job_that_hangs_every_worker_is_buried_and_who_hung_with_it_is_not(
    redis_url: str, queue_name: str, start_worker: StartWorker, client: AsyncClient, tokenizer: Tokenizer, redis: Redis
) -> None:
    """B50: a supervisor starts one worker after the other."""
    workers = [Hanging() for _ in range(3)]
    poison = await client.enqueue([POISON], max_tokens=5, ignore_eos=True)
    beside = [await client.enqueue([n], max_tokens=5, ignore_eos=True) for n in (1, 2)]
    try:
        for number, hanging in enumerate(workers):
            worker = {"id": f"w{number}", "max_attempts": 3}
            assert await run_until_its_end(redis_url, queue_name, tokenizer, hanging, stall_after_s=0.3, **worker) == 1
        async with start_worker():
            for n, job in enumerate(beside, 1):
                assert (await job.result(LIVENESS_S)).token_ids == expected([n], 5)
            with pytest.raises(JobFailed) as caught:
                await poison.result(LIVENESS_S)
        (dead,) = await Queue(redis, queue_name).dead()
    finally:
        for hanging in workers:
            hanging.free.set()
    assert caught.value.code == "engine_stuck"
    assert (dead.id, dead.reason) == (poison.id, "max_attempts")
    assert b"engine_stuck" in dead.last_error
    assert (await poison.status()).tries == 3


class Dozing(LocalEngine):
    """Steps and steps, and schedules nobody while it dozes."""

    dozes = True

    def step(self) -> list[SequenceDelta]:
        return [] if self.dozes else super().step()


async def test_an_engine_that_steps_and_computes_nothing_is_stuck(
    redis_url: str, queue_name: str, start_worker: StartWorker, client: AsyncClient, tokenizer: Tokenizer, ears: Ears
) -> None:
    """B08: running == 0 and waiting > 0, while everything looks alive. The second time in a row is the end."""
    settings = load_settings(redis_url=redis_url, queue=queue_name, lease={"duration_s": FOREVER, "stall_after_s": 0.3})
    made = crew(settings, tokenizer, HashModel(), {})
    made.engine.__class__ = Dozing
    job = await client.enqueue([1], max_tokens=5, ignore_eos=True)
    assert await asyncio.wait_for(Worker(settings, made).run(), LIVENESS_S) == 1
    await ears.until("engine_stuck", num_times=2)
    async with start_worker():
        assert (await job.result(LIVENESS_S)).token_ids == expected([1], 5)
        assert (await job.status()).tries == 3


@dataclass
class Driven:
    """An engine thread with a turnstile in front of its model, and a loop that publishes everything at once."""

    turnstile: Turnstile
    thread: EngineThread
    engine: LocalEngine
    bridge: Bridge

    def progress_at(self) -> float:
        """When the engine last got on, in monotonic seconds."""
        return time.monotonic() - self.thread.clock.stalled_for_s()


@pytest.fixture
async def driven() -> Any:
    turnstile, bridge = Turnstile(HashModel()), Bridge(8)
    settings = EngineSettings(max_model_len=512, num_blocks=64, max_num_seqs=4, max_num_batched_tokens=16)
    engine = LocalEngine(settings, turnstile)
    bridge.connect(asyncio.get_running_loop(), lambda: bridge.published(len(bridge.collect())))
    thread = EngineThread(engine, bridge, Pace(0.0, 1), snapshot_every_s=1.0)
    yield Driven(turnstile, thread, engine, bridge)
    bridge.stop()
    turnstile.open()
    await asyncio.to_thread(thread.join, LIVENESS_S)


def sequence(name: str, num_prompt_tokens: int) -> Add:
    prompt = tuple(range(1, num_prompt_tokens + 1))
    return Add(SequenceRequest(SequenceId(f"{name}/0/f"), prompt, SequenceParams(max_tokens=4), (0, 0.0, 0, 0)))


async def test_a_chunk_of_a_prompt_is_progress_though_nobody_gains_a_token(driven: Driven) -> None:
    driven.bridge.send(sequence("long", 100))
    driven.thread.start()
    await driven.turnstile.until_step()
    for _ in range(5):
        passed_at = time.monotonic()
        assert driven.progress_at() < passed_at
        driven.turnstile.pass_one()
        await driven.turnstile.until_step()
        assert driven.progress_at() > passed_at
    assert driven.engine.snapshot().num_generated_tokens == 0


async def test_a_step_that_computes_nothing_is_no_progress_however_many_there_are(driven: Driven) -> None:
    """More of them than may be unpublished: there is nothing to publish of them."""
    stepped = threading.Semaphore(0)

    class Counting(Dozing):
        def step(self) -> list[SequenceDelta]:
            stepped.release()
            return super().step()

    driven.engine.__class__ = Counting
    driven.bridge.send(sequence("any", 3))
    driven.thread.start()
    assert await asyncio.to_thread(stepped.acquire, timeout=LIVENESS_S)
    seen_at = time.monotonic()
    for _ in range(20):
        assert await asyncio.to_thread(stepped.acquire, timeout=LIVENESS_S)
    assert driven.progress_at() < seen_at


def test_the_clock_stands_while_the_engine_waits_for_others() -> None:
    clock = StallClock()
    wait_until(lambda: clock.stalled_for_s() > 0.01)
    with clock.paused():
        stalled = clock.stalled_for_s()
        began_at = time.monotonic()
        wait_until(lambda: time.monotonic() - began_at > 0.05)
        assert clock.stalled_for_s() == stalled
    assert stalled <= clock.stalled_for_s() < stalled + 0.05
    wait_until(lambda: clock.stalled_for_s() > stalled)
    clock.progressed()
    assert clock.stalled_for_s() < stalled


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIVENESS_S
    while not is_so():
        assert time.monotonic() < deadline


async def test_a_redis_that_takes_nothing_for_long_does_not_make_the_engine_stuck(
    start_worker: StartWorker, client: AsyncClient, redis: Redis, queue_name: str, ears: Ears
) -> None:
    """The engine has work, and waits until what it computed has been written: that is no fault of its own."""
    lease = {"duration_s": FOREVER, "stall_after_s": 0.1}
    async with start_worker(lease=lease, worker={"max_unpublished_steps": 1}):
        first = await client.enqueue([1], max_tokens=2, ignore_eos=True)
        assert (await first.result(LIVENESS_S)).token_ids == expected([1], 2)
        job = await client.enqueue([2], max_tokens=200, ignore_eos=True)
        async with asyncio.timeout(LIVENESS_S):
            while (await job.status()).seq < 2:
                pass
        await redis.execute_command("CLIENT", "PAUSE", 600, "ALL")
        assert (await job.result(LIVENESS_S)).token_ids == expected([2], 200)
        assert (await job.status()).tries == 1
    assert ears.of("engine_stuck") == []
