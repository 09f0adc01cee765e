"""Who records the end of a task; jobs that are away or refused for a while; what one attempt asks for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.celery_bridge.celery_programs import running
from tests.celery_bridge.conftest import Batch, got

from jitney import AsyncClient
from jitney.bridging import Partial
from jitney.cards import QueueCard, write_card
from jitney.celery.asking import answer, asked_of
from jitney.celery.settling import Settlement
from jitney.connection import Redis, connect
from jitney.embedded import EmbeddedServer
from jitney.errors import InvalidJob, StreamLost
from jitney.keys import Keys, settled_key
from jitney.records import Limits


async def test_one_of_two_celery_workers_records(redis: Redis) -> None:
    first, second = Settlement(redis, "a-task"), Settlement(redis, "a-task")
    assert await first.claim()
    waiting = asyncio.create_task(second.claim())
    await asyncio.sleep(0)
    assert not waiting.done()
    await first.done()
    assert not await waiting
    assert await second.is_over(redelivered=True)


async def test_the_other_celery_worker_records_when_the_first_one_dies(redis: Redis) -> None:
    first, second = Settlement(redis, "b-task"), Settlement(redis, "b-task")
    assert await first.claim()
    assert 0 < await redis.pttl(settled_key("b-task")) <= 60_000
    waiting = asyncio.create_task(second.claim())
    await redis.delete(settled_key("b-task"))  # its claim has run out
    assert await waiting


async def test_a_celery_task_that_is_sent_again_is_recorded_again(redis: Redis) -> None:
    earlier, later = Settlement(redis, "c-task"), Settlement(redis, "c-task")
    assert await earlier.claim()
    await earlier.done()
    assert await later.is_over(redelivered=True)
    assert not await later.is_over(redelivered=False)
    assert await later.claim()


def test_an_attempt_of_a_celery_task_asks_for_one_job() -> None:
    first = asked_of("id", 0, ["hello"], {"max_tokens": 3})
    assert first == asked_of("id", 0, [], {"prompt": "hello", "max_tokens": 3})
    assert first.key != asked_of("id", 1, ["hello"], {"max_tokens": 3}).key
    assert first.key != asked_of("other", 0, ["hello"], {"max_tokens": 3}).key
    assert len(asked_of("x" * 10_000, 0, ["hello"], {}).key) < 100


def test_a_celery_task_goes_on_with_the_answer_before_it() -> None:
    assert asked_of("id", 0, [{"object": "jitney.answer", "text": "so far"}], {}).spec.prompt == "so far"
    with pytest.raises(InvalidJob, match="prompt"):
        asked_of("id", 0, [{"text": "of something else"}], {})
    with pytest.raises(InvalidJob, match="by position"):
        asked_of("id", 0, ["a", None, 3], {})
    with pytest.raises(InvalidJob, match="queue is int"):
        asked_of("id", 0, ["a"], {"queue": 3})


async def test_a_celery_task_waits_while_the_queue_is_full(redis_url: str, batch: Batch) -> None:
    limits = Limits(max_waiting_jobs=1)
    async with AsyncClient(redis_url, limits=limits) as client:
        await client.enqueue("in the way")
        waiting = asyncio.create_task(answer(client, asked_of("full", 0, ["hello"], {}), Partial()))
        [first] = await batch.turns()
        await first.finish("x")
        [second] = await batch.turns()
        await second.finish("y")
        assert (await waiting)["text"] == "y"


async def test_a_celery_task_asks_anew_for_a_job_that_vanished_but_not_for_ever(
    redis_url: str, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jitney.celery.asking.MAX_LOSSES", 2)
    async with AsyncClient(redis_url) as client:
        waiting = asyncio.create_task(answer(client, asked_of("lost", 0, ["hello"], {}), Partial()))
        for _ in range(2):
            [turn] = await batch.turns()
            await turn.start()
            keys = Keys("only")
            async with client.redis.pipeline(transaction=True) as pipeline:
                await pipeline.delete(keys.job(turn.id), keys.tokens(turn.id), keys.body(turn.id)).execute()
        with pytest.raises(StreamLost):
            await waiting


async def test_a_held_celery_task_outlives_the_server_of_its_job(app: Any, redis_url: str, tmp_path: Path) -> None:
    """The broker is another server here, as it may be."""
    with EmbeddedServer(tmp_path, tethered=True, appendfsync="always") as jobs:
        redis = connect(jobs.url, name="jitney-test")
        await write_card(redis, "only", QueueCard(model="a-model", max_model_len=2_048, vocab_size=1_000))
        batch = Batch(redis, "only")
        with running(redis_url, JITNEY_REDIS_URL=jobs.url):
            result = app.send_task("jitney.generate", args=["hello"])
            [turn] = await batch.turns()
            await turn.start()
            jobs.kill()
            during = app.send_task("jitney.generate", args=["sent during the outage"])
            await asyncio.sleep(1.0)  # long enough for calls to fail, and to be made again
            jobs.start()
            await turn.finish("x")
            assert (await got(result))["text"] == "x"
            [turn] = await batch.turns()
            await turn.finish("y")
            assert (await got(during))["text"] == "y"
        await redis.aclose()
