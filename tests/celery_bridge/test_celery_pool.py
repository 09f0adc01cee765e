"""The same tasks where there is no consumer of ours: a pool runs them, one for each of its processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import chain
from celery.exceptions import SoftTimeLimitExceeded, TaskRevokedError, TimeLimitExceeded
from tests.celery_bridge.celery_programs import Worker, running
from tests.celery_bridge.conftest import Batch, got, until

from jitney.errors import JobFailed
from jitney.keys import JobId


@pytest.fixture(scope="module", autouse=True)
def plain_worker(redis_url: str) -> Iterator[Worker]:
    with running(redis_url, "-c", "1", OF_A_TEST_HOLD="0", OF_A_TEST_POOL="prefork") as worker:
        yield worker


def ask(app: Any, prompt: str, **options: Any) -> Any:
    return app.send_task("jitney.generate", args=[prompt], **options)


async def cancelled(batch: Batch, job_id: str) -> bool:
    status = await batch.queue.status(JobId(job_id))
    return status is not None and status.reason == "cancelled"


async def test_a_plain_celery_worker_answers_and_tells_partial_text(app: Any, batch: Batch) -> None:
    echoed = chain(app.tasks["jitney.generate"].s("hello"), app.tasks["test.echo"].s()).apply_async()
    [turn] = await batch.turns()
    await turn.start()
    await turn.say("one")
    await until(lambda: echoed.parent.state == "STREAMING" and echoed.parent.info["text"])
    await turn.finish(" two")
    assert await got(echoed) == "<one two>"


async def test_a_plain_celery_worker_fails_with_its_job(app: Any, batch: Batch) -> None:
    result = ask(app, "bad")
    [turn] = await batch.turns()
    await turn.fail({"type": "server_error", "code": "model_failed", "message": "it broke"})
    with pytest.raises(JobFailed, match="it broke"):
        await got(result)


@pytest.mark.parametrize(
    ("limits", "error"),
    [({"soft_time_limit": 1}, SoftTimeLimitExceeded), ({"time_limit": 1}, TimeLimitExceeded)],
)
async def test_time_limits_of_a_plain_celery_worker_end_the_job(
    app: Any, batch: Batch, limits: dict[str, int], error: type[Exception]
) -> None:
    result = ask(app, "slow", **limits)
    [turn] = await batch.turns()
    with pytest.raises(error):
        await got(result)
    await until(lambda: cancelled(batch, turn.id))


async def test_a_plain_celery_worker_that_is_told_to_terminate_a_task_ends_its_job(app: Any, batch: Batch) -> None:
    result = ask(app, "slow")
    [turn] = await batch.turns()
    app.control.revoke(result.id, terminate=True)
    with pytest.raises(TaskRevokedError):
        await got(result)
    await until(lambda: cancelled(batch, turn.id))
