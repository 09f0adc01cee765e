"""What makes a Celery application serve `jitney.generate`, hold its tasks, and keep jitney up."""

from __future__ import annotations

import warnings
from typing import Any, Final

from celery import Celery

from jitney.celery.settings import celery_settings
from jitney.celery.station import use_url

UPKEEP: Final = "jitney.upkeep"
PICKLES: Final = frozenset({"pickle", "application/x-python-serialize"})


def install(app: Celery, *, url: str | None = None, hold: bool = True, upkeep: bool = True) -> None:
    """Add the tasks to `app`; with `hold` the native consumer to its workers, with `upkeep` the rounds to its beat.

    url: the server where the jobs are; None: as every client finds it. Warns where the application accepts pickles:
    whoever can write to the broker then runs code in its workers. (Messages for jitney are JSON or refused.)
    """
    use_url(url)
    import jitney.celery.tasks  # noqa: F401 (defines them, for every application of this process)

    if PICKLES & set(_accepted(app)):
        warnings.warn(
            "accept_content of this Celery application holds pickle: whoever can write to its broker can run code in "
            'its workers. jitney needs JSON alone: accept_content=["json"]',
            stacklevel=2,
        )
    if hold:
        _hold(app)
    if upkeep:
        schedule = {"task": UPKEEP, "schedule": celery_settings().upkeep_every_s, "options": {"ignore_result": True}}
        app.conf.beat_schedule = {**app.conf.beat_schedule, UPKEEP: schedule}


def _hold(app: Celery) -> None:
    app.steps["consumer"].add("jitney.celery.consumer:HoldingStep")
    # It takes what is active off what may be outstanding, and what is held counts as active: after a lost connection
    # a worker that holds hundreds would take one message at a time.
    app.conf.worker_enable_prefetch_count_reduction = False
    # A held task outlives the connection that brought it; its message comes again, and finds it.
    app.conf.worker_cancel_long_running_tasks_on_connection_loss = False


def _accepted(app: Celery) -> list[Any]:
    return list(app.conf.accept_content or ())
