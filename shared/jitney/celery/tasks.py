"""The tasks. Held by the consumer or run by a pool, they are the same to whoever sends them."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from celery import Task, shared_task
from celery.exceptions import SoftTimeLimitExceeded

from jitney.async_client import AsyncClient
from jitney.bridging import Partial
from jitney.celery.asking import Asked, answer, asked_of, cancel
from jitney.celery.outcome import STREAMING, outcome_here
from jitney.celery.settings import celery_settings
from jitney.celery.station import station
from jitney.errors import InvalidJob, JobEnded
from jitney.tasks import end_tasks
from jitney.upkeeping import keep_up

GENERATE: Final = "jitney.generate"


class Generation(Task):  # type: ignore[misc]
    """`jitney.generate(prompt, messages, *, queue, **options)`: options as `AsyncClient.enqueue` takes them.

    Returns the answer (`jitney.bridging.answer_of`). A subclass may set `autoretry_for` and kin; the consumer holds it
    all the same. One with a `run` of its own is run by the pool: nobody else knows what it asks for.
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

    @property
    def is_only_a_job(self) -> bool:
        """Whether its message says all that it asks for, so that it can be held instead of run."""
        return type(self).run is Generation.run or self.name == GENERATE

    @property
    def _is_ignored(self) -> bool:
        asked = self.request.ignore_result
        return bool(self.ignore_result if asked is None else asked)

    def _wait(self, asked: Asked) -> dict[str, Any]:
        """In a pool's own process: one task for each of its slots."""
        here = station()
        try:
            return here.wait(self._answer(here.client, asked, self.request.id, self._is_ignored))
        except SoftTimeLimitExceeded:
            here.wait(cancel(here.client, asked))
            raise

    async def _answer(self, client: AsyncClient, asked: Asked, task_id: str | None, ignored: bool) -> dict[str, Any]:
        partial = Partial()
        telling = asyncio.create_task(self._tell_for_ever(partial, None if ignored else task_id))
        try:
            return await answer(client, asked, partial)
        finally:
            await end_tasks([telling])

    async def _tell_for_ever(self, partial: Partial, task_id: str | None) -> None:
        every_s, num_told = celery_settings().tell_every_s, 0
        while task_id is not None:
            await asyncio.sleep(every_s)
            if partial.num_tokens != num_told:
                num_told = partial.num_tokens
                # Not in another thread: it might still be writing when the task has ended.
                self.update_state(task_id, STREAMING, partial.shape())


@shared_task(name=GENERATE, base=Generation, bind=True)  # type: ignore[untyped-decorator]
def generate(self: Generation, *args: Any, **kwargs: Any) -> dict[str, Any]:
    return Generation.run(self, *args, **kwargs)


@shared_task(name="jitney.upkeep", ignore_result=True, expires=60)  # type: ignore[untyped-decorator]
def upkeep() -> dict[str, dict[str, int] | None]:
    """One round of upkeep, as `jitney janitor --once`."""
    here = station()
    return here.wait(keep_up(here.client))
