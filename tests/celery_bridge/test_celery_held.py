"""Held tasks are Celery tasks: results, canvas, callbacks, revocations, limits and events, through a real worker."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery import chain, chord, group
from celery.exceptions import SoftTimeLimitExceeded, TaskRevokedError, TimeLimitExceeded
from tests.celery_bridge.celery_programs import Worker
from tests.celery_bridge.conftest import Batch, events_of, got, until

from jitney.connection import Redis
from jitney.errors import InvalidJob, JobCancelled, JobFailed
from jitney.keys import JobId

pytestmark = pytest.mark.usefixtures("celery_worker_process")


def generate(app: Any, *args: Any, **options: Any) -> Any:
    """By name alone, as a program does that has nothing of jitney."""
    return app.send_task("jitney.generate", args=args, **options)


async def test_a_task_sent_by_name_returns_the_answer(app: Any, answering: Batch) -> None:
    answer = await got(generate(app, "hello", kwargs={"max_tokens": 4, "temperature": 0.0}))
    assert answer["text"] == "HELLO"
    assert answer["finish_reason"] == "stop"
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"]
    assert answer["model"] == "only"
    assert answer["id"].startswith("only.")


async def test_partial_text_is_in_the_info_of_the_result(app: Any, batch: Batch) -> None:
    result = generate(app, "hello")
    [turn] = await batch.turns()
    await turn.start()
    await turn.say("one ", "two")
    await until(lambda: result.state == "STREAMING" and result.info["text"] == "one two")
    assert result.info["id"] == turn.id
    assert result.info["num_tokens"] == 3
    await turn.say(" three")
    await until(lambda: result.info["text"] == "one two three")
    await turn.finish("!")
    assert (await got(result))["text"] == "one two three!"


async def test_chains_groups_and_chords(app: Any, answering: Batch) -> None:
    ask, echo, collect = app.tasks["jitney.generate"], app.tasks["test.echo"], app.tasks["test.collect"]
    assert await got(chain(ask.s("a"), echo.s()).apply_async()) == "<A>"
    assert (await got(chain(ask.s("b"), ask.s(max_tokens=3), echo.s()).apply_async())) == "<B>"
    together = group(ask.s(f"g{n}") for n in range(5)).apply_async()
    assert [answer["text"] for answer in await got(together)] == [f"G{n}" for n in range(5)]
    assert await got(chord((ask.s(f"c{n}") for n in range(5)), collect.s())()) == [f"C{n}" for n in range(5)]


async def test_links_and_errbacks_run_once(app: Any, batch: Batch, redis: Redis) -> None:
    await redis.delete("noted")
    note = app.tasks["test.note"]
    good = generate(app, "good", link=note.si("link"), link_error=note.si("no"))
    [turn] = await batch.turns()
    await turn.finish("x")
    await got(good)
    bad = generate(app, "bad", link=note.si("no"), link_error=note.si("errback"))
    [turn] = await batch.turns()
    await turn.fail({"type": "server_error", "code": "model_failed", "message": "it broke"})
    with pytest.raises(JobFailed, match="it broke"):
        await got(bad)
    await until(lambda: _noted(redis, 2))
    assert await redis.lrange("noted", 0, -1) == [b"('link',)", b"('errback',)"]


async def _noted(redis: Redis, number: int) -> bool:
    return await redis.llen("noted") >= number


async def test_an_ignored_result_is_not_stored(app: Any, answering: Batch, redis: Redis) -> None:
    await redis.delete("noted")
    result = generate(app, "a", ignore_result=True, link=app.tasks["test.note"].si("ran"))
    await until(lambda: _noted(redis, 1))
    assert await redis.exists(f"celery-task-meta-{result.id}") == 0


async def test_what_can_never_run_fails_and_says_what_is_wrong(app: Any, batch: Batch) -> None:
    with pytest.raises(InvalidJob, match="unknown field temprature"):
        await got(generate(app, "a", kwargs={"temprature": 0.5}))
    with pytest.raises(InvalidJob, match="prompt is given twice"):
        await got(generate(app, "a", kwargs={"prompt": "b"}))
    with pytest.raises(InvalidJob, match="unknown model or queue 'nowhere'"):
        await got(generate(app, "a", kwargs={"queue": "nowhere"}))


@pytest.mark.parametrize("terminate", [True, False])
async def test_a_revoked_task_ends_and_so_does_its_job(app: Any, batch: Batch, terminate: bool) -> None:
    result = generate(app, "hello")
    [turn] = await batch.turns()
    await turn.start()
    app.control.revoke(result.id, terminate=terminate)
    with pytest.raises(TaskRevokedError):
        await got(result)
    await until(lambda: _reason(batch, turn.id, "cancelled"))


async def _reason(batch: Batch, job_id: str, reason: str) -> bool:
    status = await batch.queue.status(JobId(job_id))
    return status is not None and status.reason == reason


async def test_time_limits_end_the_job(app: Any, batch: Batch) -> None:
    soft = generate(app, "soft", soft_time_limit=1)
    hard = generate(app, "hard", time_limit=1)
    turns = await batch.turns(2)
    with pytest.raises(SoftTimeLimitExceeded):
        await got(soft)
    with pytest.raises(TimeLimitExceeded):
        await got(hard)
    for turn in turns:
        await until(lambda job_id=turn.id: _reason(batch, job_id, "cancelled"))


async def test_a_job_that_somebody_cancels_fails_the_task(app: Any, batch: Batch) -> None:
    result = generate(app, "hello")
    [turn] = await batch.turns()
    await batch.queue.cancel(JobId(turn.id))
    with pytest.raises(JobCancelled, match=turn.id):
        await got(result)


async def test_a_task_with_a_countdown_waits_with_celery(app: Any, batch: Batch) -> None:
    result = generate(app, "later", countdown=2)
    sent_at = datetime.now(UTC)
    [turn] = await batch.turns()
    assert datetime.now(UTC) - sent_at >= timedelta(seconds=1.5)
    await turn.finish("x")
    await got(result)


async def test_a_task_that_is_not_begun_by_its_expiry_is_revoked(app: Any, batch: Batch) -> None:
    """Held, but its job still waits: for who has sent it, it has not begun."""
    begun = generate(app, "begun", expires=2)
    [first] = await batch.turns()
    await first.start()
    waiting = generate(app, "waiting", expires=2)
    with pytest.raises(TaskRevokedError, match="expired"):
        await got(waiting)
    await first.finish("in time")
    assert (await got(begun))["text"] == "in time"
    assert await batch.claim() == []


async def test_a_task_that_is_tried_again_asks_for_a_new_job(app: Any, batch: Batch) -> None:
    result = app.send_task("test.stubborn", args=["hello"])
    [first] = await batch.turns()
    await first.fail({"type": "server_error", "code": "model_failed", "message": "it broke"})
    [second] = await batch.turns()
    assert second.id != first.id
    await second.finish("at last")
    assert (await got(result))["text"] == "at last"
    again = app.send_task("test.stubborn", args=["hello"])
    for _ in range(2):
        [turn] = await batch.turns()
        await turn.fail({"type": "server_error", "code": "model_failed", "message": "it broke"})
    with pytest.raises(JobFailed, match="it broke"):
        await got(again)


async def test_a_task_with_a_run_of_its_own_asks_for_what_that_says(app: Any, batch: Batch) -> None:
    result = app.send_task("test.polite", args=["cats"])
    [turn] = await batch.turns()
    assert turn.spec.prompt == "Tell me of cats, please"
    await turn.finish("x")
    assert (await got(result))["text"] == "x"


async def test_monitors_hear_every_step(app: Any, batch: Batch) -> None:
    with events_of(app) as heard:
        result = generate(app, "secret words")
        [turn] = await batch.turns()
        await turn.finish("more secrets")
        await got(result)
        lost = generate(app, "b")
        await batch.turns()
        app.control.revoke(lost.id, terminate=True)
        with pytest.raises(TaskRevokedError):
            await got(lost)

        def steps(task_id: str) -> list[str]:
            return [event["type"] for event in heard if event.get("uuid") == task_id]

        await until(lambda: {"task-received", "task-started", "task-succeeded"} <= set(steps(result.id)))
        await until(lambda: {"task-received", "task-started", "task-revoked"} <= set(steps(lost.id)))
    [done] = [event for event in heard if event["type"] == "task-succeeded" and event["uuid"] == result.id]
    assert turn.id in done["result"]
    assert "secrets" not in done["result"]


async def test_a_held_task_is_active_and_the_step_says_how_many_there_are(
    app: Any, batch: Batch, celery_worker_process: Worker
) -> None:
    result = generate(app, "hello")
    [turn] = await batch.turns()
    inspect = app.control.inspect(timeout=30.0, limit=1)
    [active] = inspect.active().values()
    assert [task["id"] for task in active] == [result.id]
    [stats] = inspect.stats().values()
    assert stats["jitney"]["held"] == 1
    await turn.finish("x")
    await got(result)
