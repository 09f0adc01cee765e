"""What one API process holds: its settings, one client with one channel reader, and what runs beside requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import cast

from redis.exceptions import RedisError
from starlette.requests import Request

from jitney import AsyncClient, AsyncJob
from jitney.cards import QueueCard, list_aliases, list_cards
from jitney.errors import InvalidJob, JitneyError, JobNotFound, NotDurable, QueueUnavailable
from jitney.follower import parse as parse_event
from jitney.keys import JobId, Keys, queue_of
from jitney.logs import logger
from jitney.messages import JobSpec
from jitney.records import JobStatus
from jitney.result import terms_of
from jitney.settings import client_settings
from jitney.submission import check_against
from jitney.tasks import end_tasks
from jitney.tracing import current_traceparent
from jitney.webhooks.outbox import check_installed, keep_delivering
from jitney.webhooks.settings import WebhookSettings
from jitney.webhooks.wish import Webhook
from jitney_api.answers import Heading
from jitney_api.batches.desk import Desk
from jitney_api.callers import Caller
from jitney_api.keyring import Keyring
from jitney_api.prompts import count_prompt
from jitney_api.response_job import Terms
from jitney_api.response_schemas import ResponseRequest
from jitney_api.schemas import ChatRequest, CompletionRequest, JobRequest
from jitney_api.settings import ApiSettings
from jitney_api.together import together
from jitney_api.tokenizers import Tokenizers
from jitney_api.watchtower import Watchtower

_log = logger()


@contextlib.asynccontextmanager
async def answering() -> AsyncIterator[None]:
    """Redis' own errors as QueueUnavailable."""
    try:
        yield
    except (RedisError, OSError) as error:
        raise QueueUnavailable(f"Redis does not answer: {type(error).__name__}") from error


async def heading_of(client: AsyncClient, job_id: JobId) -> Heading:
    """What an answer to the job repeats. Raises JobNotFound, QueueUnavailable."""
    status = await client.job(job_id).status()
    queue, card = await client.card(queue_of(job_id))
    return Heading(job_id, queue, int(status.created_at), f"fp_{card.fingerprint}" if card.fingerprint else None)


class Service:
    """Behind every route. Belongs to one event loop; `open` and `aclose` bracket its life."""

    def __init__(self, settings: ApiSettings) -> None:
        self.settings = settings
        # Never None: an API's own client goes to Redis, whatever API the environment names.
        url = client_settings().url if settings.redis_url is None else settings.redis_url.get_secret_value()
        self.client = AsyncClient(url, limits=settings.limits, name="jitney-api")
        self.tokenizers = Tokenizers(
            self.client.redis, max_loaded=settings.max_tokenizers, num_threads=settings.num_tokenizer_threads
        )
        self.desk = Desk(self.client.redis, url, settings.batch)
        # None: nobody is asked for a key.
        self.keyring = (
            Keyring(settings.keys, self.client.redis, keep_s=settings.key_cache_s) if settings.asks_for_keys else None
        )
        self.watchtower = Watchtower(self.client.redis)
        self._graces: set[asyncio.Task[None]] = set()
        self.webhooks = WebhookSettings.load()
        self._delivering = self._start_delivering()

    async def aclose(self) -> None:
        """Close the connections. Jobs go on: the end of this process is nobody's disconnect."""
        await end_tasks(self._delivering)
        await self.watchtower.aclose()
        for grace in self._graces:
            grace.cancel()
        await asyncio.gather(*self._graces, return_exceptions=True)
        if self.keyring is not None:
            await self.keyring.aclose()
        await self.tokenizers.aclose()
        await self.desk.aclose()
        await self.client.aclose()

    def _start_delivering(self) -> list[asyncio.Task[None]]:
        """Where webhooks are on, every API process tells endpoints what is due. Raises SettingsError."""
        if not (self.webhooks.is_on and self.webhooks.deliver):
            return []
        check_installed()
        return [asyncio.create_task(keep_delivering(self.client.redis, self.webhooks), name="webhooks")]

    async def enqueue(
        self, caller: Caller, asked: ChatRequest | CompletionRequest | JobRequest | ResponseRequest, spec: JobSpec
    ) -> AsyncJob:
        """Enqueue a request's job as the caller's tenant, after everything that can be checked here was checked.

        Raises InvalidJob and its kin, IdempotencyConflict, Overloaded, QueueUnavailable.
        """
        own, num_prompt_tokens = await self._checked(caller, asked.model, spec, limit=asked.limit_name)
        return await self.client.enqueue_spec(
            own, queue=asked.model, idempotency_key=asked.idempotency_key, num_prompt_tokens=num_prompt_tokens
        )

    async def enqueue_all(self, caller: Caller, model: str, specs: Sequence[JobSpec]) -> list[AsyncJob]:
        """Enqueue several jobs of one request, or none: all are checked before the first of them is written.

        One that is refused all the same, because the queue is full by then, cancels those before it. Raises as
        `enqueue`.
        """
        checked = await together(lambda spec: self._checked(caller, model, spec, limit=None), specs)
        refusals: list[JitneyError] = []

        async def write(one: tuple[JobSpec, int | None]) -> AsyncJob | None:
            try:
                # After a refusal nothing more is written; what is being written cannot be told from what is not.
                return (
                    None if refusals else await self.client.enqueue_spec(one[0], queue=model, num_prompt_tokens=one[1])
                )
            except JitneyError as error:
                refusals.append(error)
                # That one is written, and would run for nobody.
                return self.client.job(error.job_id) if isinstance(error, NotDurable) else None

        jobs = [job for job in await together(write, checked) if job is not None]
        if refusals:
            await self.cancel_all(jobs)
            raise refusals[0]
        return jobs

    async def _checked(
        self, caller: Caller, model: str | None, spec: JobSpec, *, limit: str | None
    ) -> tuple[JobSpec, int | None]:
        """The job as its tenant's, and the tokens of its prompt if they could be counted."""
        traceparent = spec.traceparent or current_traceparent.get()
        own = self._announced(spec.model_copy(update={"tenant": caller.tenant, "traceparent": traceparent}))
        _, card = await self.client.card(model)
        check_against(card, own)
        return own, await count_prompt(self.tokenizers, card, own, limit=limit)

    def _announced(self, spec: JobSpec) -> JobSpec:
        """As at OpenAI: the deployment's own endpoint hears of responses in the background that name no other."""
        if self.webhooks.url is None or spec.webhook is not None or not Terms.of(spec).background:
            return spec
        return spec.model_copy(update={"webhook": Webhook()})

    async def status(self, caller: Caller, job_id: str) -> JobStatus:
        """Where a job of the caller's tenant stands. Every route that is given an id asks here first.

        Raises JobNotFound, in the same words for what is no id, for no job, and for another tenant's; QueueUnavailable.
        """
        unknown = JobNotFound(f"no job {job_id[:96]}: it never existed, or its record has expired")
        try:
            status = await self.client.job(job_id).status()
        except (InvalidJob, JobNotFound):
            raise unknown from None
        if not caller.may_see(status):
            raise unknown
        return status

    async def cards(self) -> dict[str, QueueCard]:
        """Every queue's card by the queue's name, then by each alias. Raises QueueUnavailable."""
        async with answering():
            cards, aliases = await list_cards(self.client.redis), await list_aliases(self.client.redis)
        return cards | {alias: cards[queue] for alias, queue in sorted(aliases.items()) if queue in cards}

    async def heading(self, job_id: JobId) -> Heading:
        """What every frame of the job's answer repeats. Raises JobNotFound, QueueUnavailable."""
        return await heading_of(self.client, job_id)

    async def has_calls(self, job_id: JobId) -> bool:
        """True if the job's answers may write calls, as its first event says. Raises QueueUnavailable."""
        async with answering():
            payloads = await self.client.queue(queue_of(job_id)).read_log(job_id, count=1)
        first = parse_event(payloads[0]) if payloads else None
        return first is not None and terms_of(first.event) is not None

    async def leave(self, job_id: JobId) -> None:
        """The one who waited for the job is gone: cancel it, after the grace unless somebody came back."""
        grace_s = self.settings.disconnect_grace_s
        if grace_s == 0:
            await self._cancel(job_id)
            return
        grace = asyncio.create_task(self._cancel_later(job_id, grace_s))
        self._graces.add(grace)
        grace.add_done_callback(self._graces.discard)

    async def cancel_all(self, jobs: Sequence[AsyncJob]) -> None:
        """Of a request that cannot be answered any more. Those that have ended stay as they are."""
        await together(self._cancel, [job.id for job in jobs])

    async def _cancel_later(self, job_id: JobId, grace_s: float) -> None:
        await asyncio.sleep(grace_s)
        channel = Keys(queue_of(job_id)).tokens(job_id)
        try:
            (_, num_readers), *_ = await self.client.redis.pubsub_numsub(channel)
        except (RedisError, OSError) as error:
            _log.warning("cancel_failed", job=job_id, error=str(error))
            return
        if num_readers == 0:
            await self._cancel(job_id)

    async def _cancel(self, job_id: JobId) -> None:
        try:
            await self.client.job(job_id).cancel()
        except JitneyError as error:  # nobody is left to tell
            _log.warning("cancel_failed", job=job_id, error=str(error))


def service_of(request: Request) -> Service:
    """The service of this request's application."""
    return cast(Service, request.app.state.service)
