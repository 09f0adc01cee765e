"""A server for each module, because Celery's names are not a queue's; an application, a worker process, and a batch."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from celery.result import AsyncResult
from tests.celery_bridge.celery_programs import LIVENESS_S, Worker, make_app, running
from tests.client.scripted_worker import ScriptedWorker, Turn

from jitney.cards import QueueCard, write_card
from jitney.connection import Redis
from jitney.embedded import EmbeddedServer
from jitney.tasks import end_tasks

# A result unsubscribes when it is forgotten: whenever that is, and from a server that may be gone by then.
AsyncResult.__del__ = lambda _: None


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(tmp_path_factory.mktemp("valkey"), tethered=True) as started:
        yield started


@pytest.fixture(scope="module")
def redis_url(server: EmbeddedServer) -> str:
    return server.url


@pytest.fixture(scope="module")
def app(redis_url: str) -> Iterator[Any]:
    """The producers' application."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = make_app(redis_url)
    yield made
    made.close()


@pytest.fixture(scope="module")
def celery_worker_process(redis_url: str) -> Iterator[Worker]:
    """One for the tests that do it no harm."""
    with running(redis_url) as worker:
        yield worker


class Batch(ScriptedWorker):
    """The worker of jitney's side: takes jobs when it is told to, or answers every one."""

    async def turns(self, number: int = 1) -> list[Turn]:
        """So many jobs, once they are there."""
        turns: list[Turn] = []
        async with asyncio.timeout(LIVENESS_S):
            while len(turns) < number:
                turns += await self.claim(credit=64)
                await asyncio.sleep(0.02)
        return turns

    async def answer_all(self) -> None:
        """For ever: each job says its prompt in capitals."""
        while True:
            for turn in await self.claim(credit=64):
                await turn.start()
                await turn.finish(str(turn.spec.prompt).upper())
            await asyncio.sleep(0.02)


@pytest.fixture
async def batch(redis: Redis) -> Batch:
    await write_card(redis, "only", QueueCard(model="a-model", max_model_len=2_048, vocab_size=1_000))
    return Batch(redis, "only")


@pytest.fixture
async def answering(batch: Batch) -> AsyncIterator[Batch]:
    """Every job is answered at once."""
    task = asyncio.create_task(batch.answer_all())
    yield batch
    await end_tasks([task])


async def got(result: Any) -> Any:
    """The value of a Celery result, or what it raises; without standing in the event loop's way."""
    await until(result.ready)  # a group's `get` in another thread than that which sent it may wait in vain
    return await asyncio.to_thread(result.get, LIVENESS_S)


async def until(holds: Callable[[], Any]) -> Any:
    """Ask again and again until the answer is something."""
    async with asyncio.timeout(LIVENESS_S):
        while True:
            found = holds()
            if asyncio.iscoroutine(found):
                found = await found
            if found:
                return found
            await asyncio.sleep(0.05)


@contextlib.contextmanager
def events_of(app: Any) -> Iterator[list[dict[str, Any]]]:
    """What a monitor such as Flower hears, of workers that are there: each says every two seconds that it lives."""
    heard: list[dict[str, Any]] = []
    stop, listens = threading.Event(), threading.Event()

    def hear(event: dict[str, Any]) -> None:
        heard.append(event)
        listens.set()

    def listen() -> None:
        with app.connection() as connection:
            receiver = app.events.Receiver(connection, handlers={"*": hear})
            with receiver.consumer_context() as (own, _, _):
                while not stop.is_set():
                    with contextlib.suppress(TimeoutError):
                        own.drain_events(timeout=0.2)

    thread = threading.Thread(target=listen)
    thread.start()
    try:
        assert listens.wait(LIVENESS_S), "no worker lives"
        yield heard
    finally:
        stop.set()
        thread.join(LIVENESS_S)
