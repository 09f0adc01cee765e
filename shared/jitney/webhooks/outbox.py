"""Telling endpoints: what is due is taken from the outboxes, told, and settled as the answer was.

At least once: an announcement leaves its outbox when somebody has answered for it, and is told again otherwise,
under the same `webhook-id`. Any number of processes may deliver at once.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from jitney.calls import or_unavailable
from jitney.cards import list_cards
from jitney.connection import Redis
from jitney.errors import InvalidJob, QueueUnavailable, SettingsError, first_line
from jitney.keys import Keys
from jitney.logs import logger
from jitney.webhooks.announcements import BATCHES, Announcement, Announcements, Outcome
from jitney.webhooks.endpoints import Endpoint, RefusedEndpoint
from jitney.webhooks.events import EVENT_TYPES, event_body, event_id, event_type
from jitney.webhooks.settings import WebhookSettings
from jitney.webhooks.signing import headers
from jitney.webhooks.wish import Webhook

if TYPE_CHECKING:
    from jitney.webhooks.sending import Answer, Resolver

GROWTH: Final = 4.0
JITTER: Final = 0.25
"""Share of a wait that is drawn: what failed together does not come back together."""

GONE: Final = 410
BUSY: Final = (429, 503)
MAX_TROUBLE_CHARS: Final = 300

_log = logger()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of an announcement after an attempt. delay_s: until the next one."""

    outcome: Outcome
    delay_s: float = 0.0
    trouble: str = ""


async def announce(
    redis: Redis, settings: WebhookSettings, *, event: str, object_id: str, url: str | None = None
) -> None:
    """Have an endpoint told of the end of what is no job. Nothing happens where webhooks are off, or nobody is named.

    event: OpenAI's name, such as `batch.completed`. url: absent: the deployment's own endpoint. May be repeated: the
    event's id is made from the object's, and one that still waits is not put in twice. (A job is announced by the
    script that ends it.) Raises InvalidJob for an endpoint that is not allowed, QueueUnavailable.
    """
    if event not in EVENT_TYPES:
        raise InvalidJob(f"event {event[:64]!r} is none of {', '.join(sorted(EVENT_TYPES))}", param="event")
    if not settings.is_on or (url is None and settings.url is None):
        return
    permitted = settings.permitted(Webhook(url=url)).url
    assert permitted is not None
    object, _, ending = event.partition(".")
    await Announcements(redis, BATCHES).add(object_id, object, ending, permitted)


async def deliver_due(redis: Redis, settings: WebhookSettings, *, limit: int, resolver: Resolver | None = None) -> int:
    """Tell at most `limit` announcements whose time has come, all at once; returns how many were tried.

    Done within `timeout_s` of the settings and some calls to Redis. 0 where webhooks are off. resolver: who turns
    names into addresses; absent: this machine. Raises QueueUnavailable, SettingsError.
    """
    if not settings.is_on:
        return 0
    taken = await _claim(redis, limit, settings.lease_s)
    if not taken:
        return 0
    tell = await _teller(settings, resolver)
    settled = await asyncio.gather(
        *(_tell_and_settle(outbox, one, settings, tell) for outbox, one in taken), return_exceptions=True
    )
    for outcome in settled:
        if isinstance(outcome, BaseException):
            raise outcome
    return len(taken)


async def keep_delivering(redis: Redis, settings: WebhookSettings) -> None:
    """Deliver until cancelled. What is under way then is told again by others, once its lease has ended."""
    while True:
        num_tried = 0
        try:
            num_tried = await deliver_due(redis, settings, limit=settings.max_at_once)
        except QueueUnavailable as error:
            _log.warning("webhooks_wait", error=first_line(error))
        except Exception:  # whatever it is, the next round may do better, and nobody else would make one
            _log.exception("webhooks_failed")
        if num_tried < settings.max_at_once:
            await asyncio.sleep(settings.poll_s)


def check_installed() -> None:
    """Raises SettingsError where nothing can be sent, because the extra is not installed."""
    try:
        import jitney.webhooks.sending  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name not in ("httpcore2", "httpx2"):
            raise
        raise SettingsError("webhooks need httpx2, which is not installed: pip install 'jitney[http]'") from None


async def _claim(redis: Redis, limit: int, lease_s: float) -> list[tuple[Announcements, Announcement]]:
    """Of all outboxes, in random order: a busy one does not hold up the others for ever."""
    with or_unavailable():
        queues = await list_cards(redis)
    outboxes = [Announcements(redis, prefix) for prefix in (BATCHES, *(Keys(queue).prefix for queue in queues))]
    random.shuffle(outboxes)
    taken: list[tuple[Announcements, Announcement]] = []
    for outbox in outboxes:
        if len(taken) >= limit:
            break
        taken += [(outbox, one) for one in await outbox.claim(limit - len(taken), lease_s)]
    return taken


Tell = Callable[[Announcement], "Awaitable[Answer]"]


async def _teller(settings: WebhookSettings, resolver: Resolver | None) -> Tell:
    check_installed()
    from jitney.webhooks.sending import post, system_resolver, trust

    context = await asyncio.to_thread(trust, settings.ca_file)

    async def tell(one: Announcement) -> Answer:
        # Parsed and judged anew: what was allowed when the job came in may not be any more.
        endpoint = Endpoint.parse(one.url, settings)
        body = event_body(one.object, one.ending, one.id, at=one.at_ms // 1_000)
        signed = headers(event_id(one.object, one.ending, one.id), int(time.time()), body, settings.keys)
        return await post(
            endpoint,
            body,
            signed,
            context=context,
            resolver=resolver or system_resolver,
            timeout_s=settings.timeout_s,
        )

    return tell


async def _tell_and_settle(outbox: Announcements, one: Announcement, settings: WebhookSettings, tell: Tell) -> None:
    try:
        verdict = judge(await tell(one), one.attempt, settings, random.random())
    except RefusedEndpoint as error:
        verdict = Verdict("dead", trouble=str(error))
    except Exception as error:  # of the network, of TLS, of whoever answers something that is no HTTP
        words = "took too long" if isinstance(error, TimeoutError) else f"{type(error).__name__}: {first_line(error)}"
        verdict = after_failure(words, one.attempt, settings, random.random())
    trouble = verdict.trouble[:MAX_TROUBLE_CHARS]
    await outbox.settle(one, verdict.outcome, delay_s=verdict.delay_s, trouble=trouble)
    if verdict.outcome != "told":
        _log.warning(
            "webhook_given_up" if verdict.outcome == "dead" else "webhook_failed",
            id=one.id,
            type=event_type(one.object, one.ending),
            attempt=one.attempt,
            trouble=trouble,
        )


def judge(answer: Answer, attempt: int, settings: WebhookSettings, drawn: float) -> Verdict:
    """What an answer means. A redirect is a failure like any other: nobody has allowed where it leads.

    attempt: counted from 1. drawn: from 0 to 1.
    """
    if 200 <= answer.status < 300:
        return Verdict("told")
    trouble = f"HTTP {answer.status}"
    if answer.status == GONE:
        return Verdict("dead", trouble=f"{trouble}: the endpoint wants no more of it")
    verdict = after_failure(trouble, attempt, settings, drawn)
    asked = answer.retry_after if answer.status in BUSY else None
    if verdict.outcome == "later" and asked is not None and asked.isascii() and asked.isdigit() and len(asked) < 10:
        return Verdict("later", max(verdict.delay_s, min(float(asked), settings.max_backoff_s)), trouble)
    return verdict


def after_failure(trouble: str, attempt: int, settings: WebhookSettings, drawn: float) -> Verdict:
    """Once more later, or given up. Arguments as for `judge`."""
    if attempt >= settings.max_attempts:
        return Verdict("dead", trouble=f"{trouble} (attempt {attempt} of {settings.max_attempts})")
    whole = min(settings.max_backoff_s, settings.backoff_s * GROWTH ** min(attempt - 1, 32))
    return Verdict("later", whole * (1.0 - JITTER * drawn), trouble)
