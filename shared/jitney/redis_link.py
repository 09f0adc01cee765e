"""The link by Redis: scripts to write with, cards to look up, one channel to read from."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from redis.exceptions import RedisError

from jitney.cards import QueueCard
from jitney.channel import ChannelReader
from jitney.connection import connect
from jitney.durability import Durability, Proof, find_proof
from jitney.errors import JobNotFound, NotDurable, QueueUnavailable
from jitney.follower import Follower
from jitney.forced_calls import check_forced
from jitney.grammar import check_early, off_loop
from jitney.keys import JobId, new_job_id, queue_of
from jitney.messages import JobSpec
from jitney.queue import Enqueued, Entry, JobStatus, Limits, Queue
from jitney.single_flight import SingleFlight
from jitney.submission import check_against, check_idempotency_key, entry_for, find_card
from jitney.topology import redirection
from jitney.webhooks.settings import WebhookSettings

CARD_LIFE_S = 5.0


class RedisLink:
    """Jobs of one Redis server. See `jitney.link.Link`."""

    def __init__(self, url: str, *, destination: str | None, limits: Limits, durability: Durability, name: str) -> None:
        self.url = url
        self._destination = destination
        self._limits = limits
        self._durability = durability
        self.redis = connect(url, name=name)
        self.reader = ChannelReader(url)
        self._cards: dict[str, tuple[float, str, QueueCard]] = {}
        self._reading_cards = SingleFlight[tuple[str, QueueCard]]()
        self._proof: Proof | None = None
        self._finding_proof = SingleFlight[Proof]()
        self._webhooks: WebhookSettings | None = None

    async def enqueue(
        self, spec: JobSpec, *, queue: str | None, idempotency_key: str | None, num_prompt_tokens: int | None
    ) -> JobId:
        """Checked against the queue's card, then written by one script. num_prompt_tokens: absent = estimated."""
        check_idempotency_key(idempotency_key)
        if spec.webhook is not None:
            spec = spec.model_copy(update={"webhook": self.webhooks.permitted(spec.webhook)})
        name, card = await self.card(queue)
        check_against(card, spec)
        await check_early(spec.sampling.structured_outputs)
        if spec.tools is not None:
            await off_loop(check_forced, spec.tool_use)
        entry = entry_for(
            spec,
            job_id=new_job_id(name),
            card=card,
            idempotency_key=idempotency_key,
            num_prompt_tokens=num_prompt_tokens,
        )
        async with answering():
            enqueued = await self._enqueue(self.queue(name), entry)
        return enqueued.id

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

    def follow(self, job_id: str, cursor: int = 0) -> contextlib.AbstractAsyncContextManager[Follower]:
        """See `ChannelReader.follow`."""
        return self.reader.follow(job_id, cursor)

    async def cancel(self, job_id: JobId) -> bool:
        """False if it had already ended. Raises JobNotFound."""
        async with answering():
            cancelled = await self.queue(queue_of(job_id)).cancel(job_id)
        if cancelled.outcome == "notfound":
            raise _no_such_job(job_id)
        return cancelled.outcome == "cancelled"

    async def status(self, job_id: JobId) -> JobStatus:
        """Raises JobNotFound."""
        async with answering():
            status = await self.queue(queue_of(job_id)).status(job_id)
        if status is None:
            raise _no_such_job(job_id)
        return status

    @property
    def webhooks(self) -> WebhookSettings:
        """Who may be told of a job's end: read when the first job asks for it. Raises SettingsError."""
        if self._webhooks is None:
            self._webhooks = WebhookSettings.load()
        return self._webhooks

    def queue(self, name: str) -> Queue:
        """The queue of that name, for what no client has a method for."""
        return Queue(self.redis, name)  # not kept: whoever asks for ids may name any number of queues

    async def card(self, name: str | None = None) -> tuple[str, QueueCard]:
        """The queue that a queue, alias or model names (absent: the link's own), and its card.

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
        await self.reader.aclose()
        await self._reading_cards.aclose()
        await self._finding_proof.aclose()
        await self.redis.aclose()


def _no_such_job(job_id: JobId) -> JobNotFound:
    return JobNotFound(f"no job {job_id}: it never existed, or its record has expired")


@contextlib.asynccontextmanager
async def answering() -> AsyncIterator[None]:
    """Redis' own errors as ours."""
    try:
        yield
    except (RedisError, OSError) as error:
        raise QueueUnavailable(f"Redis does not answer: {redirection(error) or error}") from error
