"""What a task asks for, as a job: the same job for every delivery of one attempt of the task."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from redis.exceptions import RedisError

from jitney.async_client import AsyncClient, AsyncJob
from jitney.bridging import ANSWER, Partial, follow
from jitney.connection import pause_s
from jitney.errors import InvalidJob, JitneyError, NotDurable, Overloaded, QueueUnavailable, StreamLost
from jitney.logs import logger
from jitney.messages import JobSpec
from jitney.submission import spec_from

MAX_LOSSES: Final = 4
"""How often a job may vanish from Redis before its task fails: each time it is asked for anew."""

MAX_CANCELS: Final = 6
MIN_WAIT_S: Final = 0.2
"""However soon a full queue expects to have room."""

_log = logger(part="celery")


@dataclass(frozen=True, slots=True)
class Asked:
    """One attempt of one task. key: a redelivered task finds the job that it has; a retried one asks for another."""

    spec: JobSpec
    queue: str | None
    key: str


def asked_of(task_id: str, retries: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Asked:
    """What `jitney.generate(*args, **kwargs)` asks for. Raises InvalidJob that names the argument."""
    if len(args) > 2:
        raise InvalidJob("jitney.generate takes prompt and messages by position; name the other options", param="args")
    options = dict(kwargs)
    for name, value in zip(("prompt", "messages"), args, strict=False):
        if name in options:
            raise InvalidJob(f"{name} is given twice: by position and by name", param=name)
        options[name] = value
    options["prompt"] = _text_of(options.get("prompt"))
    queue = options.pop("queue", None)
    if queue is not None and not isinstance(queue, str):
        raise InvalidJob(f"queue is {type(queue).__name__}; give the name of a queue or model", param="queue")
    return Asked(spec_from(options), queue, key_of(task_id, retries))


def _text_of(prompt: Any) -> Any:
    """In a chain the answer before comes first: its text is the prompt."""
    is_answer = isinstance(prompt, Mapping) and prompt.get("object") == ANSWER
    return prompt.get("text") if is_answer else prompt


def key_of(task_id: str, retries: int) -> str:
    """An idempotency key; of any task id, as long as it may be."""
    digest = hashlib.sha256(f"{task_id}\0{retries}".encode("utf-8", "surrogatepass")).hexdigest()
    return f"celery-{digest[:40]}"


async def answer(client: AsyncClient, asked: Asked, partial: Partial) -> dict[str, Any]:
    """Ask for the job, or find it, and wait for its end. An outage of Redis is waited out, and so is a full queue.

    Raises the job's own ending (JobFailed and kin), InvalidJob, IdempotencyConflict; StreamLost for a job that
    vanished again and again.
    """
    num_failures = num_losses = 0
    while True:
        try:
            job = await enqueue(client, asked)
            num_failures = 0
            return await follow(job, partial)
        except QueueUnavailable as error:
            # Nobody knows whether it came in: the key finds it.
            _log.warning("queue_unavailable", error=str(error))
            await asyncio.sleep(pause_s(num_failures))
            num_failures += 1
        except Overloaded as error:
            await asyncio.sleep(max(MIN_WAIT_S, error.retry_after_s * random.uniform(0.5, 1.0)))
        except StreamLost:
            num_losses += 1
            if num_losses >= MAX_LOSSES:
                raise


async def enqueue(client: AsyncClient, asked: Asked) -> AsyncJob:
    """The job: a new one, or the one that an earlier delivery asked for."""
    try:
        return await client.enqueue_spec(asked.spec, queue=asked.queue, idempotency_key=asked.key)
    except NotDurable as error:
        return client.job(error.job_id)


async def cancel(client: AsyncClient, asked: Asked) -> None:
    """End the attempt's job, which is found as it was made: one that never came in does so now, and ends at once.

    Tried for some seconds; a job that cannot be reached in that time goes on to its own end.
    """
    for num_failures in range(MAX_CANCELS):
        try:
            await (await enqueue(client, asked)).cancel()
            return
        except QueueUnavailable:
            await asyncio.sleep(pause_s(num_failures))
        except (JitneyError, RedisError) as error:
            _log.warning("not_cancelled", error=str(error))
            return
    _log.warning("not_cancelled", error="Redis does not answer")
