"""Messages that come twice, workers that die or stand still, connections that drop: one run is visible."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from tests.celery_bridge.celery_programs import make_app, running
from tests.celery_bridge.conftest import Batch, events_of, got, until

from jitney.connection import Redis, connect
from jitney.embedded import EmbeddedServer
from jitney.errors import JobFailed
from jitney.keys import JobId

VISIBILITY_S = 3.0
SHORT = {"OF_A_TEST_VISIBILITY_S": str(VISIBILITY_S)}


@pytest.fixture(autouse=True)
async def _clean(redis: Redis, batch: Batch) -> AsyncIterator[None]:
    """What the worker of an earlier test had not acknowledged is no business of this one's."""
    await redis.delete("noted", "unacked", "unacked_index", "celery")
    yield
    assert await batch.claim() == []


def ask(app: Any, prompt: str = "hello") -> Any:
    return app.send_task("jitney.generate", args=[prompt], link=app.tasks["test.note"].si(prompt))


async def is_settled(redis: Redis) -> bool:
    """Nothing is with a worker, nothing waits with the broker."""
    return await redis.hlen("unacked") == 0 and await redis.llen("celery") == 0


async def noted(redis: Redis) -> list[bytes]:
    await until(lambda: is_settled(redis))
    notes: list[bytes] = await redis.lrange("noted", 0, -1)
    return notes


async def again(redis: Redis) -> bytes:
    """The message that a worker holds, as the broker hands it out a second time."""
    [held] = await redis.hvals("unacked")
    message, _, _ = orjson.loads(held)
    message["headers"]["redelivered"] = True
    message["properties"]["delivery_info"]["redelivered"] = True
    return orjson.dumps(message)


async def test_a_task_longer_than_the_visibility_timeout_is_handed_out_once(
    app: Any, batch: Batch, redis_url: str, redis: Redis
) -> None:
    with running(redis_url, **SHORT) as worker:
        result = ask(app)
        [turn] = await batch.turns()
        [(_, first)] = await redis.zrange("unacked_index", 0, -1, withscores=True)

        async def is_long_past() -> bool:
            [(_, dated)] = await redis.zrange("unacked_index", 0, -1, withscores=True)
            return dated > first + VISIBILITY_S + 1

        await until(is_long_past)  # dated anew again and again, and so never out of date
        with running(redis_url, "-n", "other@%h", **SHORT) as other:  # which looks for lost messages as it starts
            await turn.finish("x")
            await got(result)
            assert await noted(redis) == [b"('hello',)"]
            assert "received" not in other.log.replace("test.note", "")
        assert worker.log.count("Task jitney.generate") == 2  # received, succeeded


async def test_a_worker_that_stood_still_changes_nothing_any_more(
    app: Any, batch: Batch, redis_url: str, redis: Redis
) -> None:
    note = app.tasks["test.note"]
    with running(redis_url, "-n", "still@%h", **SHORT) as still:
        good = ask(app)
        bad = app.send_task("jitney.generate", args=["bad"], link_error=note.si("errback"))
        turns = {turn.spec.prompt: turn for turn in await batch.turns(2)}
        still.send(signal.SIGSTOP)
        await asyncio.sleep(VISIBILITY_S + 0.5)  # the timeout itself is what is tested
        with running(redis_url, "-n", "other@%h", **SHORT) as other:
            await until(lambda: other.log.count("jitney.generate[") == 2)
            await turns["hello"].finish("x")
            await turns["bad"].fail({"type": "server_error", "code": "model_failed", "message": "it broke"})
            assert (await got(good))["text"] == "x"
            with pytest.raises(JobFailed):
                await got(bad)
            for result in (good, bad):  # as if it had been stopped just before it wrote this
                meta = {"status": "STREAMING", "result": {"text": ""}, "traceback": None, "task_id": result.id}
                await redis.set(f"celery-task-meta-{result.id}", orjson.dumps(meta))
            still.send(signal.SIGCONT)
            stats = app.control.inspect(timeout=30.0, limit=2)
            await until(lambda: [each["jitney"]["held"] for each in (stats.stats() or {}).values()] == [0, 0])
            assert sorted(await noted(redis)) == [b"('errback',)", b"('hello',)"]
            assert (await got(app.AsyncResult(good.id)))["id"] == turns["hello"].id
            with pytest.raises(JobFailed, match="it broke"):
                await got(app.AsyncResult(bad.id))


async def test_what_a_killed_worker_held_is_found_by_the_next_one(
    app: Any, batch: Batch, redis_url: str, redis: Redis
) -> None:
    with running(redis_url, **SHORT) as first:
        results = [ask(app, prompt) for prompt in ("a", "b")]
        turns = await batch.turns(2)
        await turns[0].start()
        first.kill()
        await turns[1].finish("ended while nobody looked")
    await asyncio.sleep(VISIBILITY_S)
    with running(redis_url, **SHORT):
        await until(lambda: app.AsyncResult(results[1].id).ready() or app.AsyncResult(results[0].id).ready())
        await turns[0].finish("went on")
        texts = {(await got(result))["text"] for result in results}
        assert texts == {"went on", "ended while nobody looked"}
        assert sorted(await noted(redis)) == [b"('a',)", b"('b',)"]


async def test_a_warm_shutdown_gives_back_what_has_not_ended(
    app: Any, batch: Batch, redis_url: str, redis: Redis
) -> None:
    with running(redis_url) as first, events_of(app) as heard:
        result = ask(app)
        [turn] = await batch.turns()
        await turn.start()
        assert await asyncio.to_thread(first.end) == 0
        assert "1 held tasks go back to the broker" in first.log
        await until(lambda: [event for event in heard if event["type"] == "task-rejected" and event["requeue"]])
    assert (await redis.hlen("unacked"), await redis.llen("celery")) == (0, 1)
    status = await batch.queue.status(JobId(turn.id))
    assert status is not None
    assert status.state == "running"
    with running(redis_url):
        await until(lambda: redis.hlen("unacked"))
        await turn.finish("x")
        assert (await got(result))["id"] == turn.id
        assert await noted(redis) == [b"('hello',)"]


async def test_a_warm_shutdown_waits_for_what_ends_in_time(
    app: Any, batch: Batch, redis_url: str, redis: Redis
) -> None:
    with running(redis_url, JITNEY_CELERY__DRAIN_S="60") as worker:
        result = app.send_task("jitney.generate", args=["hello"])
        [turn] = await batch.turns()
        ending = asyncio.create_task(asyncio.to_thread(worker.end))
        await asyncio.to_thread(worker.until, "for 1 held tasks")
        await turn.finish("x")
        assert await ending == 0
        assert (await got(result))["text"] == "x"
        assert await is_settled(redis)


async def test_messages_that_come_twice(app: Any, batch: Batch, redis_url: str, redis: Redis) -> None:
    with running(redis_url) as worker:
        result = ask(app, "twice")
        [turn] = await batch.turns()
        copy = await again(redis)
        await redis.lpush("celery", copy)
        await asyncio.to_thread(worker.until, "received")
        await until(lambda: worker.log.count("received") == 2)
        await turn.finish("x")
        await got(result)
        assert await noted(redis) == [b"('twice',)"]
        # And once more: its worker died between recording it and acknowledging it.
        await redis.lpush("celery", copy)
        await until(lambda: worker.log.count("jitney.generate[") == 4)
        assert await noted(redis) == [b"('twice',)"]
        # Whoever sends it again under its old id is no broker, and is served.
        await asyncio.to_thread(lambda: app.send_task("jitney.generate", args=["twice"], task_id=result.id))
        await until(lambda: worker.log.count("succeeded") >= 3)


async def test_a_message_that_came_twice_is_revoked_once_and_for_all(
    app: Any, batch: Batch, redis_url: str, redis: Redis
) -> None:
    with running(redis_url) as worker:
        result = ask(app, "twice")
        [turn] = await batch.turns()
        await redis.lpush("celery", await again(redis))
        await until(lambda: worker.log.count("received") == 2)
        app.control.revoke(result.id, terminate=True)
        await until(lambda: _is_cancelled(batch, turn.id))
        later = ask(app, "later")
        [turn] = await batch.turns()
        await turn.finish("x")
        await got(later)
        assert await noted(redis) == [b"('later',)"]
        assert app.AsyncResult(result.id).state == "REVOKED"
        assert "JobCancelled" not in worker.log


async def _is_cancelled(batch: Batch, job_id: str) -> bool:
    status = await batch.queue.status(JobId(job_id))
    return status is not None and status.reason == "cancelled"


async def test_connections_that_the_broker_drops(app: Any, batch: Batch, redis_url: str, redis: Redis) -> None:
    with running(redis_url) as worker:
        result = ask(app)
        [turn] = await batch.turns()
        for kind in ("normal", "pubsub"):
            await redis.execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")
        await asyncio.to_thread(worker.until, "onnection to broker lost")
        await turn.finish("x")
        assert (await got(result))["text"] == "x"
        later = ask(app, "later")
        [turn] = await batch.turns()
        await turn.finish("y")
        assert (await got(later))["text"] == "y"
        assert await noted(redis) == [b"('hello',)", b"('later',)"]


async def test_a_broker_that_is_restarted(batch: Batch, redis_url: str, tmp_path: Path) -> None:
    """The jobs are on another server here: they go on meanwhile."""
    with EmbeddedServer(tmp_path, tethered=True, appendfsync="always") as server:
        broker, app = connect(server.url, name="jitney-test"), make_app(server.url)
        with running(server.url, JITNEY_REDIS_URL=redis_url) as worker:
            result = ask(app)
            [turn] = await batch.turns()
            server.kill()
            await asyncio.to_thread(worker.until, "Cannot connect to")  # and goes on trying
            server.start()
            await until(lambda: worker.log.count("generate[") == 2)  # received again, long before the timeout
            await turn.finish("x")
            assert (await got(app.AsyncResult(result.id)))["text"] == "x"
            assert await noted(broker) == [b"('hello',)"]
        app.close()
        await broker.aclose()


async def test_a_celery_result_waits_for_its_backend(
    batch: Batch, redis_url: str, redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with EmbeddedServer(tmp_path, tethered=True, appendfsync="always") as backend:
        monkeypatch.setenv("OF_A_TEST_BACKEND", backend.url)
        app = make_app(redis_url)
        with running(redis_url) as worker:
            result = app.send_task("jitney.generate", args=["hello"])
            [turn] = await batch.turns()
            backend.kill()
            await turn.finish("x")
            await until(lambda: "result_backend_away" in worker.log or "Traceback" in worker.log)
            backend.start()
            assert (await got(app.AsyncResult(result.id)))["text"] == "x"
            await until(lambda: is_settled(redis))
        app.close()


async def test_a_celery_worker_that_prefetches_nothing_holds_all_the_same(
    app: Any, batch: Batch, redis_url: str, redis: Redis
) -> None:
    with running(redis_url, "-c", "2", "--disable-prefetch", OF_A_TEST_POOL="prefork"):
        results = [ask(app, str(number)) for number in range(12)]
        turns = await batch.turns(12)
        await asyncio.gather(*(turn.finish("x") for turn in turns))
        for result in results:
            await got(result)
        assert len(await noted(redis)) == 12
