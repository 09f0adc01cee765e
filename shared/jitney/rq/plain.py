"""The functions that RQ imports by name, for its own workers: each holds one job, and waits for it.

`jitney rq-worker` never calls them: it awaits many jobs of the same names beside each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Any, Final

from redis import Redis as SyncRedis
from rq import get_current_job
from rq.job import Job
from rq.serializers import JSONSerializer

from jitney.async_client import AsyncClient
from jitney.client import Client
from jitney.errors import JitneyError, SettingsError
from jitney.logs import logger
from jitney.loop_thread import LoopThread
from jitney.rq.generation import META, WITHDRAW_WITHIN_S
from jitney.rq.held import HeldJobs, begin, is_hopeless

META_EVERY_S: Final = 1.0

_log = logger(part="rq")


def generate(
    prompt: str | Sequence[int] | None = None,
    messages: Sequence[dict[str, Any]] | None = None,
    *,
    queue: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """The answer to a prompt (text or token ids) or a chat, for `queue.enqueue("jitney.rq.generate", …)`.

    queue: a queue, alias or model of ours. options: as `AsyncClient.enqueue` takes them. The answer is JSON: see
    `jitney.bridging.answer_of`. While it is generated, `job.meta["jitney"]` has its id, text and number of tokens.
    """
    answer: dict[str, Any] = _hold("jitney.rq.generate")
    return answer


def run_batch(batch_id: str) -> dict[str, Any]:
    """A batch of `/v1/batches`, from its input file to its output file; how many of its lines were done."""
    counts: dict[str, Any] = _hold("jitney.rq.run_batch")
    return counts


def cancel(job: Job, connection: SyncRedis) -> None:
    """For `on_stopped=Callback("jitney.rq.cancel")` under RQ's own workers, which kill the process that waits.

    `jitney rq-worker` cancels without it.
    """
    ours = job.get_meta().get(META)
    if isinstance(ours, dict) and "id" in ours:
        with Client(name="jitney-rq-cancel") as client, contextlib.suppress(JitneyError):
            client.job(ours["id"]).cancel()


def _hold(name: str) -> Any:
    """Await the held job of that name, with the arguments of the RQ job that is being performed."""
    job = get_current_job()
    if job is None:
        raise SettingsError(f"{name} is a job of RQ: enqueue it, or use jitney.Client")
    if job.serializer is not JSONSerializer:
        _log.warning("worker_unpickles", hint="start it with --serializer json: pickled jobs can run anything")
    thread = LoopThread("jitney-held")  # not this one: here RQ's alarm goes off, which an event loop would swallow
    try:
        return thread.run(lambda: _await_alone(name, job))
    except Exception as error:
        if is_hopeless(error):
            job.retries_left = 0  # RQ would ask again, in vain
        raise
    finally:
        thread.close(_settle)


async def _await_alone(name: str, job: Job) -> Any:
    perform = HeldJobs().find(name)
    async with AsyncClient(name="jitney-rq") as client:
        held = _Alone(client, job)
        try:
            return await begin(perform, held)
        finally:
            held.store()


async def _settle() -> None:
    """A job that is broken off takes back what it began."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        await asyncio.wait(others, timeout=WITHDRAW_WITHIN_S)


class _Alone:
    """The one job of this process. See `Held`."""

    def __init__(self, client: AsyncClient, job: Job) -> None:
        self.client = client
        self.job = job
        self._stored_at = -META_EVERY_S

    async def save_meta(self, **fields: Any) -> None:
        self.job.meta.update(fields)
        if time.monotonic() >= self._stored_at + META_EVERY_S:
            self.store()

    def store(self) -> None:
        self.job.save_meta()
        self._stored_at = time.monotonic()
