"""The client for asyncio: enqueue jobs, follow them, cancel them. Needs neither torch nor a web framework."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from types import TracebackType
from typing import Any, get_args

from redis.exceptions import RedisError

from jitney.cards import QueueCard
from jitney.channel import ChannelReader, Message
from jitney.connection import connect
from jitney.durability import Durability, Proof, find_proof
from jitney.errors import InvalidJob, JobNotFound, NotDurable, QueueUnavailable, SettingsError
from jitney.forced_calls import check_forced
from jitney.gathering import gather
from jitney.grammar import check_early
from jitney.keys import JobId, new_job_id, queue_of
from jitney.messages import Event, JobSpec
from jitney.queue import Enqueued, Entry, JobStatus, Limits, Queue
from jitney.result import Result
from jitney.settings import client_settings, usable_url
from jitney.single_flight import SingleFlight
from jitney.submission import check_against, check_idempotency_key, entry_for, find_card, spec_from
from jitney.topology import redirection

CARD_LIFE_S = 5.0
Prompt = str | Sequence[int]
Messages = Sequence[dict[str, Any]]


class AsyncJob:
    """A job by its id. Anybody who knows the id may follow it, from any cursor, as often as they like."""

    def __init__(self, client: AsyncClient, job_id: JobId) -> None:
        self._client = client
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
        async with self._client.reader.follow(self.id, cursor) as follower:
            async for batch in follower:
                yield batch

    async def result(self, timeout_s: float | None = None) -> Result:
        """Wait for the job's end. After `timeout_s` TimeoutError; the job goes on all the same.

        Raises JobFailed, JobCancelled or JobExpired (each with the text so far) when it did not finish; StreamLost
        when the job is gone. A log that Redis lost a part of is read again once it has been written again.
        """
        async with asyncio.timeout(timeout_s):
            return await gather(self._client.reader, self.id)

    async def cancel(self) -> bool:
        """End the job now. False if it had already ended. Raises JobNotFound."""
        async with answering():
            cancelled = await self._client.queue(queue_of(self.id)).cancel(self.id)
        if cancelled.outcome == "notfound":
            raise _no_such_job(self.id)
        return cancelled.outcome == "cancelled"

    async def status(self) -> JobStatus:
        """Where the job stands. Raises JobNotFound."""
        async with answering():
            status = await self._client.queue(queue_of(self.id)).status(self.id)
        if status is None:
            raise _no_such_job(self.id)
        return status


class AsyncClient:
    """Jobs of one server. Belongs to one event loop; methods may be awaited concurrently.

    url: `redis://…`, `rediss://…` or `unix://…`; absent: as `ClientSettings` finds it.
    queue, model: where jobs go; absent: the only queue there is. limits: bounds on what may wait.
    durability: `default` = as safe as the server is set up to be; `strict` = an accepted job is on disk, or
    `enqueue` raises (SettingsError where the server cannot confirm that, NotDurable where it does not in time).
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        queue: str | None = None,
        model: str | None = None,
        limits: Limits | None = None,
        durability: Durability | None = None,
        name: str = "jitney-client",
    ) -> None:
        settings = client_settings()
        if queue is not None and model is not None:
            raise InvalidJob("give queue or model, not both", param="queue")
        self._destination = queue or model or settings.queue or settings.model
        self._limits = limits or Limits()
        self._durability = durability or settings.durability
        if self._durability not in get_args(Durability):
            raise SettingsError(f"durability={self._durability!r} must be one of {', '.join(get_args(Durability))}")
        address = usable_url(url or settings.url)
        self.redis = connect(address, name=name)
        self.reader = ChannelReader(address)
        self._cards: dict[str, tuple[float, str, QueueCard]] = {}
        self._reading_cards = SingleFlight[tuple[str, QueueCard]]()
        self._proof: Proof | None = None
        self._finding_proof = SingleFlight[Proof]()

    async def enqueue(
        self,
        prompt: Prompt | None = None,
        messages: Messages | None = None,
        *,
        idempotency_key: str | None = None,
        **options: Any,
    ) -> AsyncJob:
        """Enqueue a prompt (text or token ids) or a chat; `options` are fields of SamplingParams and JobSpec.

        Raises InvalidJob (which names the field), PromptTooLong, UnknownQueue, IdempotencyConflict,
        Overloaded, QueueUnavailable; with strict durability also SettingsError and NotDurable.
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

        num_prompt_tokens: for the queue's bounds, if somebody has counted them; otherwise they are estimated.
        """
        check_idempotency_key(idempotency_key)
        name, card = await self.card(queue)
        check_against(card, spec)
        await check_early(spec.sampling.structured_outputs)
        if spec.tools is not None:
            await asyncio.to_thread(check_forced, spec.tool_use)
        entry = entry_for(
            spec,
            job_id=new_job_id(name),
            card=card,
            idempotency_key=idempotency_key,
            num_prompt_tokens=num_prompt_tokens,
        )
        async with answering():
            enqueued = await self._enqueue(self.queue(name), entry)
        return AsyncJob(self, enqueued.id)

    async def _enqueue(self, queue: Queue, entry: Entry) -> Enqueued:
        if self._durability == "default":
            return await queue.enqueue(entry, self._limits)
        proof = self._proof
        if proof is None:
            proof = self._proof = await self._finding_proof.ask("", lambda: find_proof(self.redis, queue.keys))
        try:
            return await queue.enqueue_synced(entry, self._limits, proof)
        except NotDurable:
            self._proof = None  # perhaps another server by now, or other settings: look again before the next job
            raise

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
        return AsyncJob(self, JobId(job_id))

    def queue(self, name: str) -> Queue:
        """The queue of that name, for what this class has no method for."""
        return Queue(self.redis, name)  # not kept: whoever asks for ids may name any number of queues

    async def card(self, name: str | None = None) -> tuple[str, QueueCard]:
        """The queue that a queue, alias or model names (absent: the client's own), and its card.

        Read once and kept for CARD_LIFE_S. Raises UnknownQueue, QueueUnavailable.
        """
        name = name or self._destination or ""
        clock = asyncio.get_running_loop().time
        known = self._cards.get(name)
        if known is not None and known[0] >= clock():
            return known[1], known[2]
        async with answering():
            queue, card = await self._reading_cards.ask(name, lambda: find_card(self.redis, name))
        self._cards[name] = (clock() + CARD_LIFE_S, queue, card)
        return queue, card

    async def aclose(self) -> None:
        """Close the connections. Jobs go on; streams that are still open raise QueueUnavailable."""
        await self.reader.aclose()
        await self._reading_cards.aclose()
        await self._finding_proof.aclose()
        await self.redis.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()


def _no_such_job(job_id: JobId) -> JobNotFound:
    return JobNotFound(f"no job {job_id}: it never existed, or its record has expired")


@contextlib.asynccontextmanager
async def answering() -> AsyncIterator[None]:
    """Redis' own errors as ours."""
    try:
        yield
    except (RedisError, OSError) as error:
        raise QueueUnavailable(f"Redis does not answer: {redirection(error) or error}") from error
