"""What nobody waits for and somebody has to do: order in the queues, samples, webhooks, and what other rooms bring.

Workers keep their own queues in order as well. This is for queues without a worker, and for duties that no worker has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final, Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from jitney.async_client import AsyncClient
from jitney.cards import list_cards
from jitney.history import take_sample
from jitney.logs import logger
from jitney.webhooks.outbox import deliver_due
from jitney.webhooks.settings import WebhookSettings

GROUP: Final = "jitney.upkeep"
"""Entry points: a duty's name, and `module:coroutine function (context: Upkeep) -> dict[str, int]`."""

DUTY_TIMEOUT_S: Final = 60.0
Duty = Callable[["Upkeep"], Awaitable[dict[str, int]]]
"""Does what is due now, and says how much of it there was."""


@dataclass(frozen=True, slots=True)
class Upkeep:
    """What a duty is given. client: with the Redis URL. log: carries the duty's name."""

    client: AsyncClient
    log: Any


class ResumeSettings(BaseSettings):
    """When the answer of a build that is gone is given up: the workers' own settings, so that both do the same."""

    model_config = SettingsConfigDict(
        env_prefix="JITNEY_WORKER__", env_file=".env", env_ignore_empty=True, extra="ignore", frozen=True
    )

    resume_wait_s: float = Field(60.0, ge=0.0)
    resume_mismatch: Literal["fail", "continue"] = "fail"


async def keep_up(client: AsyncClient, entries: Iterable[EntryPoint] | None = None) -> dict[str, dict[str, int]]:
    """One round of every duty, one after the other. One that fails is logged, and does not stop the others.

    entries: duties of other rooms; None: those that are installed. Returns what each that did not fail has done.
    """
    done: dict[str, dict[str, int]] = {}
    for name, find in _duties(entries):
        context = Upkeep(client, logger(part="upkeep", duty=name))
        try:
            async with asyncio.timeout(DUTY_TIMEOUT_S):
                done[name] = await find()(context)
        except Exception as error:
            context.log.warning("duty_failed", error=type(error).__name__, message=str(error)[:200])
    return done


def _duties(entries: Iterable[EntryPoint] | None) -> list[tuple[str, Callable[[], Duty]]]:
    """Each by name, and how it is found: its module may be broken, which is its own failure."""
    others = entry_points(group=GROUP) if entries is None else entries
    own: list[tuple[str, Callable[[], Duty]]] = [
        ("queues", lambda: keep_queues),
        ("history", lambda: sample_queues),
        ("webhooks", lambda: deliver_webhooks),
    ]
    return own + [(entry.name, entry.load) for entry in sorted(others, key=lambda entry: entry.name)]


async def keep_queues(context: Upkeep) -> dict[str, int]:
    """What every worker does for its queue: late and delayed jobs, orphans, damage, logs to be folded."""
    settings = ResumeSettings()
    counts = {"queues": 0, "due": 0, "expired": 0, "orphans": 0, "repaired": 0, "folded": 0}
    for name in await list_cards(context.client.redis):
        queue = context.client.queue(name)
        swept = await queue.janitor(resume_wait_s=settings.resume_wait_s, resume_mismatch=settings.resume_mismatch)
        counts["queues"] += 1
        counts["due"] += swept.num_due
        counts["expired"] += swept.num_expired
        counts["orphans"] += swept.num_orphans
        counts["repaired"] += swept.num_repaired
        counts["folded"] += await queue.fold_ended()
    return counts


async def sample_queues(context: Upkeep) -> dict[str, int]:
    """See `jitney.history`."""
    redis = context.client.redis
    taken = [await take_sample(redis, context.client.queue(name)) for name in await list_cards(redis)]
    return {"samples": sum(taken)}


async def deliver_webhooks(context: Upkeep) -> dict[str, int]:
    """What is due to be told, or told again, to somebody's server."""
    settings = WebhookSettings.load()
    return {"tried": await deliver_due(context.client.redis, settings, limit=settings.max_at_once)}
