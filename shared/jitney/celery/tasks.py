"""The tasks. Held by the consumer or run by a pool, they are the same to whoever sends them."""

from __future__ import annotations

import time
from typing import Any

from celery import Task, shared_task
from celery.exceptions import SoftTimeLimitExceeded

from jitney.async_client import AsyncClient
from jitney.bridging import Partial
from jitney.celery.asking import Asked, answer, asked_of, cancel
from jitney.celery.outcome import STREAMING, outcome_here
from jitney.celery.settings import celery_settings
from jitney.celery.station import station
from jitney.errors import InvalidJob, JobEnded
from jitney.upkeeping import keep_up


class Generation(Task):  # type: ignore[misc]
    """`jitney.generate(prompt, messages, *, queue, **options)`: options as `AsyncClient.enqueue` takes them.

    Returns the answer (`jitney.bridging.answer_of`). A subclass may set `autoretry_for` and kin; the consumer holds it
    all the same.
    """

    abstract = True
    acks_late = True
    Request = "jitney.celery.request:HeldRequest"
    Strategy = "jitney.celery.strategy:json_only"
    resultrepr_maxsize = 64  # logs and events show the id of the job, not what it says
    throws = (JobEnded, InvalidJob)
    """What a job may well end with: no traceback in the log."""

    def run(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        outcome = outcome_here()
        if outcome is not None:
            return outcome()
        return self._wait(asked_of(self.request.id or "", self.request.retries, args, kwargs))

    def _wait(self, asked: Asked) -> dict[str, Any]:
        """In a pool's own process: one task for each of its slots."""
        here = station()
        try:
            return here.wait(self._answer(here.client, asked, self.request.id))
        except SoftTimeLimitExceeded:
            here.wait(cancel(here.client, asked))
            raise

    async def _answer(self, client: AsyncClient, asked: Asked, task_id: str | None) -> dict[str, Any]:
        return await answer(client, asked, _Told(self, task_id))


class _Told(Partial):
    """Text that is told as it comes, but no more often than the settings want."""

    def __init__(self, task: Generation, task_id: str | None) -> None:
        super().__init__()
        self._task = task
        self._task_id = task_id if not task.request.ignore_result else None
        self._every_s = celery_settings().tell_every_s
        self._last = 0.0

    def add(self, event: Any) -> None:
        super().add(event)
        if self._task_id is not None and time.monotonic() - self._last >= self._every_s:
            self._task.update_state(self._task_id, STREAMING, self.shape())
            self._last = time.monotonic()


@shared_task(name="jitney.generate", base=Generation, bind=True)  # type: ignore[untyped-decorator]
def generate(self: Generation, *args: Any, **kwargs: Any) -> dict[str, Any]:
    return Generation.run(self, *args, **kwargs)


@shared_task(name="jitney.upkeep", ignore_result=True, expires=60)  # type: ignore[untyped-decorator]
def upkeep() -> dict[str, dict[str, int]]:
    """One round of upkeep, as `jitney janitor --once`."""
    here = station()
    return here.wait(keep_up(here.client))
