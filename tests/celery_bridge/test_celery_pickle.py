"""B64: nothing that lies in a queue is ever unpickled."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from kombu import Producer
from kombu.exceptions import DecodeError
from tests.celery_bridge.celery_programs import running
from tests.celery_bridge.conftest import Batch, got, until

from jitney.celery import install
from jitney.connection import Redis


class Touching:
    """Loading it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def send_pickle(app: Any, path: Path, task_id: str, **headers: str) -> None:
    with app.connection() as connection:
        Producer(connection).publish(
            pickle.dumps(([Touching(path)], {}, {})),
            routing_key="celery",
            headers={"task": "jitney.generate", "id": task_id, **headers},
            content_type="application/x-python-serialize",
            content_encoding="binary",
        )


@pytest.mark.parametrize("accept", ["json", "json pickle"])
async def test_a_celery_message_that_is_a_pickle_is_refused_and_never_loaded(
    app: Any, batch: Batch, redis_url: str, redis: Redis, tmp_path: Path, accept: str
) -> None:
    """Also in an application that takes pickles for tasks of its own."""
    touched = tmp_path / "touched"
    assert pickle.loads(pickle.dumps(Touching(touched))) is None
    assert touched.exists()  # it would work
    touched.unlink()
    with running(redis_url, OF_A_TEST_ACCEPT=accept, C_FORCE_ROOT="1") as worker:
        send_pickle(app, touched, "bad", lang="py")
        await asyncio.to_thread(worker.until, "x-python-serialize")
        result = app.send_task("jitney.generate", args=["good"])
        [turn] = await batch.turns()
        await turn.finish("x")
        assert (await got(result))["text"] == "x"
        await until(lambda: _is_gone(redis))
    assert not touched.exists()
    assert await batch.claim() == []


async def _is_gone(redis: Redis) -> bool:
    return await redis.hlen("unacked") == 0 and await redis.llen("celery") == 0


async def test_a_celery_result_that_is_a_pickle_is_never_loaded(app: Any, redis: Redis, tmp_path: Path) -> None:
    await redis.set("celery-task-meta-bad", pickle.dumps(Touching(tmp_path / "touched")))
    with pytest.raises((DecodeError, ValueError)):
        await asyncio.to_thread(lambda: app.AsyncResult("bad").result)
    assert not (tmp_path / "touched").exists()


def test_installing_into_a_celery_application_that_takes_pickles_warns() -> None:
    taking = Celery("taking", broker="memory://")
    taking.conf.accept_content = ["json", "pickle"]
    with pytest.warns(UserWarning, match='accept_content=\\["json"\\]'):
        install(taking)


def test_the_ready_made_celery_application_takes_json_alone() -> None:
    from jitney.celery.app import app as ready_made

    for name in ("accept_content", "result_accept_content"):
        assert list(ready_made.conf[name]) == ["json"]
    for name in ("task_serializer", "result_serializer", "event_serializer"):
        assert ready_made.conf[name] == "json"
