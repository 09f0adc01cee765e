"""One RQ job as one job of ours: found again by whoever holds the RQ job next, and told of while it runs."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from rq.defaults import RQ_KEY_PREFIX
from rq.job import Job

from jitney.async_client import AsyncClient, AsyncJob
from jitney.bridging import Partial, follow
from jitney.connection import pause_s
from jitney.errors import JitneyError, JobNotFound, Overloaded, QueueUnavailable, StreamLost
from jitney.messages import JobSpec
from jitney.rq.held import Held
from jitney.submission import spec_from

META: Final = "jitney"
"""The member of `job.meta` that is ours."""

MAX_LOSSES: Final = 4
"""How often a job may vanish from Redis before its RQ job fails: each time it is asked for anew."""

WITHDRAW_WITHIN_S: Final = 10.0

T = TypeVar("T")


async def generate(
    held: Held,
    prompt: str | Sequence[int] | None = None,
    messages: Sequence[dict[str, Any]] | None = None,
    *,
    queue: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """The answer to a prompt or a chat, as `jitney.bridging` shapes it; until then its text in `job.meta["jitney"]`.

    queue: a queue, alias or model. options: as `AsyncClient.enqueue` takes them. Outages of Redis and a full queue are
    waited out: the RQ job has its own time limit. Raises InvalidJob, UnknownQueue, JobFailed, JobCancelled, JobExpired;
    StreamLost for a job that vanished again and again. Cancelled itself, it cancels the job.
    """
    asked = Asked(spec_from({"prompt": prompt, "messages": messages, **options}), queue, run_key(held.job))
    try:
        return await _answer(held, asked)
    except asyncio.CancelledError:
        await _withdraw(held.client, asked)
        raise


@dataclass(frozen=True, slots=True)
class Asked:
    """What one run of an RQ job wants. key: of all its attempts."""

    spec: JobSpec
    queue: str | None
    key: str


def run_key(job: Job) -> str:
    """What is the same for every attempt at one run of an RQ job, and different for every other run.

    A retry, an attempt after an abandoned one, and a requeued job belong to the same run. A repetition (`Repeat`) is
    another one, and so is a job that is enqueued anew under an id that was used before.
    """
    run = (RQ_KEY_PREFIX, job.origin, job.id, job.created_at.isoformat(), job.repeats_left)
    return "rq-" + hashlib.sha256(repr(run).encode()).hexdigest()[:40]


async def attach(client: AsyncClient, asked: Asked) -> AsyncJob:
    """The run's job: the one that an earlier attempt has begun or finished, else a new one.

    One that ended otherwise does not count: the attempt after it begins anew. Each has its number in its idempotency
    key, so that nobody need remember which attempt this is.
    """
    for number in itertools.count():
        enqueue = partial(client.enqueue_spec, asked.spec, queue=asked.queue, idempotency_key=f"{asked.key}-{number}")
        job = await _patiently(enqueue)
        status = await _patiently(job.status)
        if status.state != "done" or status.reason == "finished":
            return job
    raise AssertionError("numbers do not end")


async def _answer(held: Held, asked: Asked) -> dict[str, Any]:
    num_losses = 0
    while True:
        try:
            job = await attach(held.client, asked)
            return await _follow(held, job)
        except QueueUnavailable:
            continue  # while it was read: `attach` waits until somebody answers
        except (StreamLost, JobNotFound):
            num_losses += 1
            if num_losses >= MAX_LOSSES:
                raise


async def _follow(held: Held, job: AsyncJob) -> dict[str, Any]:
    told = Partial()

    async def show() -> None:
        await held.save_meta(**{META: told.shape()})

    return await follow(job, told, show)


async def _withdraw(client: AsyncClient, asked: Asked) -> None:
    """Cancel the run's job, found as it was made. While the server does not answer, it runs on to its own end."""
    with contextlib.suppress(JitneyError, TimeoutError):
        async with asyncio.timeout(WITHDRAW_WITHIN_S):
            await (await attach(client, asked)).cancel()


async def _patiently(ask: Callable[[], Awaitable[T]]) -> T:
    """Ask until somebody answers, and until there is room."""
    num_failures = 0
    while True:
        try:
            return await ask()
        except QueueUnavailable:
            num_failures += 1
            await asyncio.sleep(pause_s(num_failures))
        except Overloaded as full:
            await asyncio.sleep(full.retry_after_s)
