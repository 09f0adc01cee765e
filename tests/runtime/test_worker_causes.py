"""What a failure costs a job: another attempt where that may help, its end where it cannot."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field

import pytest
from tests.engine.scripted_model import HashModel
from tests.runtime.harness import LIVENESS_S, Ears, StartWorker, Turnstile, expected

from jitney import AsyncClient, JobFailed
from jitney.connection import Redis
from jitney.errors import InvalidJob, ModelError, Overloaded, StreamLost
from jitney.keys import Keys
from jitney.messages import Event
from jitney.queue import Queue
from jitney_worker.engine.protocol import ModelOutput, SchedulerOutput

LASTING = [InvalidJob("this can never run"), StreamLost("the log is gone")]
PASSING = [
    RuntimeError("out of memory"),
    ConnectionError("the device is away"),
    Overloaded("jobs", waiting_jobs=1, waiting_tokens=1, retry_after_s=1.0),
    ModelError("a damaged file, here"),
]


def kind(error: Exception) -> str:
    return type(error).__name__


@dataclass
class Raising:
    """Raises an error in step number `fails_in`."""

    error: Exception
    fails_in: int
    runner: HashModel = field(default_factory=HashModel)
    num_steps: int = 0
    failed: threading.Event = field(default_factory=threading.Event)

    def execute(self, scheduled: SchedulerOutput) -> ModelOutput:
        self.num_steps += 1
        if self.num_steps == self.fails_in:
            self.failed.set()
            raise self.error
        return self.runner.execute(scheduled)


@pytest.mark.parametrize("error", LASTING, ids=kind)
async def test_a_cause_that_lasts_ends_the_job_at_once_and_keeps_what_it_said(
    start_worker: StartWorker, client: AsyncClient, redis: Redis, queue_name: str, ears: Ears, error: Exception
) -> None:
    async with start_worker(Raising(error, fails_in=4)):
        job = await client.enqueue([1], max_tokens=12, ignore_eos=True)
        with pytest.raises(JobFailed) as caught:
            await job.result(LIVENESS_S)
        after = await client.enqueue([2], max_tokens=3, ignore_eos=True)
        assert (await after.result(LIVENESS_S)).token_ids == expected([2], 3)
    log = [Event.decode(payload) for payload in await Queue(redis, queue_name).read_log(job.id) or []]
    assert sum((event.token_ids for event in log), ()) == expected([1], 3)
    assert [event.seq for event in log] == list(range(1, len(log) + 1))
    assert log[-1].usage is not None
    assert log[-1].usage["completion_tokens"] == 3
    (dead,) = await Queue(redis, queue_name).dead()
    assert (dead.id, dead.reason, dead.num_tokens) == (job.id, error.code, 3)  # type: ignore[attr-defined]
    assert Event.decode(dead.event).error == caught.value.error
    assert (caught.value.code, (await job.status()).tries) == (error.code, 1)  # type: ignore[attr-defined]
    (said,) = ears.of("job_buried")
    assert (said["job"], said["is_retryable"]) == (job.id, False)
    assert ears.of("job_retried") == []


@pytest.mark.parametrize("error", PASSING, ids=kind)
async def test_a_cause_that_may_pass_costs_an_attempt_and_no_token(
    start_worker: StartWorker, client: AsyncClient, redis: Redis, queue_name: str, ears: Ears, error: Exception
) -> None:
    retry = {"backoff_s": 0.2, "jitter": 0.0}
    async with start_worker(Raising(error, fails_in=4)):
        job = await client.enqueue([1], max_tokens=12, ignore_eos=True, retry=retry)
        assert (await job.result(LIVENESS_S)).token_ids == expected([1], 12)
    assert (await job.status()).tries == 2
    assert await Queue(redis, queue_name).dead() == []
    (said,) = ears.of("job_retried")
    assert (said["job"], said["attempt"], said["delay_s"]) == (job.id, 1, 0.2)
    assert str(error) in said["error"]


async def test_a_lasting_cause_that_several_jobs_met_in_one_step_ends_none_of_them(
    start_worker: StartWorker, client: AsyncClient, redis: Redis, queue_name: str, ears: Ears
) -> None:
    """Nobody can tell whose it was. Who meets it alone, later, is to blame."""
    turnstile = Turnstile(Raising(LASTING[0], fails_in=5))
    async with start_worker(turnstile):
        jobs = [await client.enqueue([n], max_tokens=12, ignore_eos=True) for n in (1, 2)]
        while len(await turnstile.until_step()) < 2:
            turnstile.pass_one()
        assert len(turnstile.steps) < 5
        turnstile.open()
        for n, job in enumerate(jobs, 1):
            assert (await job.result(LIVENESS_S)).token_ids == expected([n], 12)
    assert [(await job.status()).tries for job in jobs] == [2, 2]
    assert (len(ears.of("job_retried")), ears.of("job_buried")) == (2, [])


async def test_what_was_computed_before_a_step_failed_is_published_however_slow_redis_is(
    start_worker: StartWorker, client: AsyncClient, redis: Redis, ears: Ears
) -> None:
    """One job was over before that step, and the other had got on: neither has lost an attempt without progress."""
    runner = Raising(RuntimeError("out of memory"), fails_in=5)
    turnstile, once = Turnstile(runner), {"max": 1, "backoff_s": 0.0}
    async with start_worker(turnstile):
        long = await client.enqueue([2], max_tokens=24, ignore_eos=True, retry=once)
        short = await client.enqueue([3], max_tokens=2, ignore_eos=True, retry=once)
        while len(await turnstile.until_step()) < 2:
            turnstile.pass_one()
        await redis.execute_command("CLIENT", "PAUSE", 10_000, "WRITE")
        try:
            turnstile.open()
            assert await asyncio.to_thread(runner.failed.wait, LIVENESS_S)
        finally:
            await redis.execute_command("CLIENT", "UNPAUSE")
        assert (await short.result(LIVENESS_S)).token_ids == expected([3], 2)
        assert (await long.result(LIVENESS_S)).token_ids == expected([2], 24)
    assert [(await job.status()).tries for job in (short, long)] == [1, 2]
    assert [said["job"] for said in ears.of("job_retried")] == [long.id]


async def test_a_log_that_is_gone_ends_its_job_without_another_attempt(
    start_worker: StartWorker, client: AsyncClient, redis: Redis, queue_name: str, ears: Ears
) -> None:
    turnstile = Turnstile(HashModel())
    async with start_worker(turnstile):
        job = await client.enqueue([1], max_tokens=300, ignore_eos=True)
        while (await job.status()).seq < 3:
            await turnstile.until_step()
            turnstile.pass_one()
        await redis.delete(Keys(queue_name).tokens(job.id))
        turnstile.pass_one()  # one more token to append: with all that are left the job would simply end
        await ears.until("job_buried")
        turnstile.open()
        (dead,) = await until_buried(Queue(redis, queue_name))
    assert (dead, (await job.status()).tries) == ((job.id, "stream_lost"), 1)


async def until_buried(queue: Queue) -> list[tuple[str, str]]:
    async with asyncio.timeout(LIVENESS_S):
        while not (dead := await queue.dead()):
            pass
    return [(one.id, one.reason) for one in dead]
