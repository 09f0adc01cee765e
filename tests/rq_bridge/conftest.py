"""A real RQ queue, worker processes of ours on it, and a scripted worker that answers what they ask for."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
from redis import Redis as SyncRedis
from rq import Queue
from rq.job import Job
from rq.registry import StartedJobRegistry
from tests.client.scripted_worker import PATIENCE_S, ScriptedWorker, Turn
from tests.conftest import WriteCard
from tests.e2e.programs import Program, program

from jitney.connection import Redis

HEARTBEAT_S = 1
FAR_S = 10_000.0


@pytest.fixture(autouse=True)
def _no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("JITNEY_", "RQ_"))]:
        monkeypatch.delenv(name)


@pytest.fixture
def rq_connection(redis_url: str) -> Iterator[SyncRedis]:
    with SyncRedis.from_url(redis_url) as connection:
        yield connection


@pytest.fixture
def rq_queue(rq_connection: SyncRedis) -> Queue:
    """An RQ queue that no other test knows."""
    return Queue(f"rq{secrets.token_hex(6)}", connection=rq_connection, serializer="json")


StartRqWorker = Callable[..., AbstractContextManager[Program]]


@pytest.fixture
def start_rq_worker(redis_url: str, rq_queue: Queue) -> StartRqWorker:
    """`with start_rq_worker("--concurrency", "4") as process:` a `jitney rq-worker` on this test's queue."""

    def start(*options: str, **environment: str) -> AbstractContextManager[Program]:
        known = {"JITNEY_RQ__HEARTBEAT_S": str(HEARTBEAT_S), "JITNEY_LOG_LEVEL": "info", **environment}
        return program("rq-worker", rq_queue.name, "--redis-url", redis_url, *options, environment=known)

    return start


@pytest.fixture(scope="module")
def served(redis_url: str) -> Iterator[Queue]:
    """An RQ queue with a worker process of ours on it, for all tests of a file."""
    name = f"served{secrets.token_hex(6)}"
    environment = {"JITNEY_RQ__HEARTBEAT_S": str(HEARTBEAT_S)}
    with (
        SyncRedis.from_url(redis_url) as connection,
        program("rq-worker", name, "--redis-url", redis_url, environment=environment) as running,
    ):
        running.until_line("ready")
        yield Queue(name, connection=connection, serializer="json")


class Jitney:
    """The other side: claims what the RQ jobs have asked for."""

    def __init__(self, worker: ScriptedWorker, queue_name: str) -> None:
        self.worker = worker
        self.queue_name = queue_name

    async def take(self, num_jobs: int = 1) -> list[Turn]:
        """So many jobs, all of them claimed and none of them ended."""
        turns: list[Turn] = []
        async with asyncio.timeout(PATIENCE_S * 3):
            while len(turns) < num_jobs:
                turns += await self.worker.claim(credit=num_jobs - len(turns))
                await asyncio.sleep(0.01)
        return turns

    async def take_one(self) -> Turn:
        (turn,) = await self.take()
        return turn

    async def reason(self, job_id: str) -> str:
        """How a job ended; '' while it has not."""
        status = await self.worker.queue.status(job_id)
        assert status is not None
        return status.reason

    async def ends(self, job_id: str, reason: str) -> None:
        await eventually(lambda: self.reason(job_id), reason)

    async def num_waiting(self) -> int:
        return (await self.worker.queue.backlog()).num_jobs


@pytest.fixture
async def jitney(redis: Redis, queue_name: str, write_queue_card: WriteCard) -> Jitney:
    await write_queue_card()
    return Jitney(ScriptedWorker(redis, queue_name), queue_name)


async def eventually(ask: Callable[[], Any], wanted: Any) -> None:
    """Until `ask()` answers it; the last answer otherwise."""
    found: Any = None
    deadline = time.monotonic() + PATIENCE_S * 2
    while time.monotonic() < deadline:
        found = ask()
        if asyncio.iscoroutine(found):
            found = await found
        if found == wanted:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"still {found!r}, not {wanted!r}")


async def has_status(job: Job, status: str) -> None:
    await eventually(lambda: job.get_status().value, status)


def abandon(queue: Queue) -> None:
    """RQ's own maintenance, at a time when every sign of life is long ago."""
    StartedJobRegistry(queue=queue).cleanup(timestamp=time.time() + FAR_S)
