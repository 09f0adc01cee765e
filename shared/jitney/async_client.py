"""The client for asyncio: enqueue jobs, follow them, cancel them. Needs neither torch nor a web framework."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Any, Unpack

from jitney.cards import QueueCard
from jitney.channel import ChannelReader
from jitney.connection import Redis
from jitney.errors import SettingsError
from jitney.gathering import gather
from jitney.keys import JobId, queue_of
from jitney.link import ClientOptions, Link, link_to
from jitney.messages import Event, JobSpec
from jitney.position import Message
from jitney.queue import JobStatus, Queue
from jitney.redis_link import RedisLink, answering
from jitney.result import Result
from jitney.submission import spec_from

__all__ = ["AsyncClient", "AsyncJob", "Messages", "Prompt", "answering"]

Prompt = str | Sequence[int]
Messages = Sequence[dict[str, Any]]


class AsyncJob:
    """A job by its id. Anybody who knows the id may follow it, from any cursor, as often as they like."""

    def __init__(self, link: Link, job_id: JobId) -> None:
        self._link = link
        self.id = job_id

    def __repr__(self) -> str:
        return f"AsyncJob({self.id!r})"

    async def stream(self, cursor: int = 0) -> AsyncGenerator[Event, None]:
        """Every event after `cursor`, `started` and the terminal one included.

        Raises JobNotFound for an unknown job, QueueUnavailable, and StreamLost if the log vanishes, is another one
        than was read, or does not reach the cursor.
        """
        async with contextlib.aclosing(self.batches(cursor)) as batches:
            async for batch in batches:
                for message in batch:
                    yield message.event

    async def batches(self, cursor: int = 0) -> AsyncGenerator[list[Message], None]:
        """As `stream`, but whatever has arrived at once, with each event's own bytes."""
        async with self._link.follow(self.id, cursor) as following:
            async for batch in following:
                yield batch

    async def result(self, timeout_s: float | None = None) -> Result:
        """Wait for the job's end. After `timeout_s` TimeoutError; the job goes on all the same.

        Raises JobFailed, JobCancelled or JobExpired (each with the text so far) when it did not finish; StreamLost
        when the job is gone. A log that Redis lost a part of is read again once it has been written again.
        """
        async with asyncio.timeout(timeout_s):
            return await gather(self._link, self.id)

    async def cancel(self) -> bool:
        """End the job now. False if it had already ended. Raises JobNotFound."""
        return await self._link.cancel(self.id)

    async def status(self) -> JobStatus:
        """Where the job stands. Over HTTP without `owner`, a worker's name. Raises JobNotFound."""
        return await self._link.status(self.id)


class AsyncClient:
    """Jobs of one server. Belongs to one event loop; methods may be awaited concurrently.

    url: `redis://…`, `rediss://…` or `unix://…`; or the API's, `http://…` or `https://…`; absent: as `ClientSettings`
    finds it. options: see `ClientOptions`.
    """

    def __init__(self, url: str | None = None, **options: Unpack[ClientOptions]) -> None:
        self._link = link_to(url, **options)

    async def enqueue(
        self,
        prompt: Prompt | None = None,
        messages: Messages | None = None,
        *,
        idempotency_key: str | None = None,
        **options: Any,
    ) -> AsyncJob:
        """Enqueue a prompt (text or token ids) or a chat; `options` are fields of SamplingParams and JobSpec.

        Raises InvalidJob (which names the field), PromptTooLong, UnknownQueue, IdempotencyConflict, Overloaded,
        QueueUnavailable; with strict durability also SettingsError and NotDurable; over HTTP also KeyRefused and
        ScopeMissing.
        """
        return await self.enqueue_spec(
            spec_from({"prompt": prompt, "messages": messages, **options}), idempotency_key=idempotency_key
        )

    async def enqueue_spec(
        self,
        spec: JobSpec,
        *,
        queue: str | None = None,
        idempotency_key: str | None = None,
        num_prompt_tokens: int | None = None,
    ) -> AsyncJob:
        """Enqueue a job that is already validated. `queue`: a queue, alias or model other than the client's own.

        num_prompt_tokens: for the queue's bounds, if somebody has counted them; otherwise they are estimated. (The API
        counts for itself.)
        """
        job_id = await self._link.enqueue(
            spec, queue=queue, idempotency_key=idempotency_key, num_prompt_tokens=num_prompt_tokens
        )
        return AsyncJob(self._link, job_id)

    async def generate(
        self,
        prompt: Prompt | None = None,
        messages: Messages | None = None,
        *,
        idempotency_key: str | None = None,
        **options: Any,
    ) -> Result:
        """`enqueue`, then `result`."""
        job = await self.enqueue(prompt, messages, idempotency_key=idempotency_key, **options)
        return await job.result()

    def job(self, job_id: str) -> AsyncJob:
        """The job of that id, of whatever queue. Raises InvalidJob for what is no job id."""
        queue_of(job_id)
        return AsyncJob(self._link, JobId(job_id))

    # --- what only a client that holds the Redis URL has ---------------------------------------

    @property
    def redis(self) -> Redis:
        """The connections for short calls."""
        return self._redis_link.redis

    @property
    def redis_url(self) -> str:
        """Where they lead; it may hold a password."""
        return self._redis_link.url

    @property
    def reader(self) -> ChannelReader:
        """The one pub/sub connection, and what is read through it."""
        return self._redis_link.reader

    def queue(self, name: str) -> Queue:
        """The queue of that name, for what this class has no method for."""
        return self._redis_link.queue(name)

    async def card(self, name: str | None = None) -> tuple[str, QueueCard]:
        """The queue that a queue, alias or model names (absent: the client's own), and its card.

        A few seconds old at the most. Raises UnknownQueue, QueueUnavailable.
        """
        return await self._redis_link.card(name)

    @property
    def _redis_link(self) -> RedisLink:
        if not isinstance(self._link, RedisLink):
            raise SettingsError("this client speaks to an API: for this it needs the Redis URL (JITNEY_REDIS_URL)")
        return self._link

    async def aclose(self) -> None:
        """Close the connections. Jobs go on; streams that are still open raise QueueUnavailable."""
        await self._link.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()
