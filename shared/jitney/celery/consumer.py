"""The native consumer: a step of Celery's worker that holds tasks instead of handing them to its pool."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import MethodType
from typing import Any, Final

from celery import bootsteps
from celery.bootsteps import CLOSE
from celery.exceptions import TaskRevokedError
from celery.utils.log import get_logger
from celery.worker import state
from kombu.common import ignore_errors

from jitney.celery.heartbeat import bring_again, keep_invisible, seconds_between
from jitney.celery.pool import HeldPool
from jitney.celery.settings import celery_settings
from jitney.celery.station import station
from jitney.celery.tasks import Generation

_log = get_logger(__name__)

WATCH_S: Final = 1.0
"""How soon a held task hears that it was revoked, or that its time to begin is over."""

RECORD_S: Final = 10.0
"""What a worker that stops leaves to those of its tasks that are just being recorded."""

_SCHEDULING: Final = (
    "apply_eta_task",
    "_limit_task",
    "_limit_post_eta",
    "_limit_move_to_pool",
    "_schedule_bucket_request",
)


class Turnout:
    """Celery's consumer as the strategy of a held task sees it: with another pool, which needs no free slot."""

    def __init__(self, consumer: Any, pool: HeldPool) -> None:
        self._consumer = consumer
        self.pool = pool
        for name in _SCHEDULING:  # each calls `on_task_request`, and must find the one below
            setattr(self, name, MethodType(getattr(type(consumer), name), self))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._consumer, name)

    def on_task_request(self, request: Any) -> None:
        try:
            request.execute_using_pool(self.pool)
        except TaskRevokedError:
            return


class HoldingStep(bootsteps.StartStopStep):  # type: ignore[misc]
    """Started with every connection to the broker, after the step that opens the queues."""

    requires = ("celery.worker.consumer.tasks:Tasks",)
    label = "jitney"

    def __init__(self, consumer: Any, **options: Any) -> None:
        super().__init__(consumer, **options)
        self._pool: HeldPool | None = None
        self._timers: list[Any] = []
        self._settings = celery_settings()

    def start(self, consumer: Any) -> None:
        """Put our strategy in the place of Celery's, for every task that does nothing but generate."""
        if self._pool is None:
            # Not earlier: a pool of processes has been forked by now, and takes no thread of ours along.
            self._pool = HeldPool(
                station(), self._settings, post=_post_to(consumer), qos=lambda: getattr(consumer, "qos", None)
            )
            _outlive_the_broker(consumer)
        turnout = Turnout(consumer, self._pool)
        for name, task in consumer.app.tasks.items():
            if isinstance(task, Generation) and task.is_only_a_job:
                consumer.strategies[name] = task.start_strategy(consumer.app, turnout)
        bring_again(consumer, self._pool)
        self._watch(consumer)

    def _watch(self, consumer: Any) -> None:
        pool, beat_s = self._held, seconds_between(consumer.task_consumer.channel)
        self._timers = [consumer.timer.call_repeatedly(WATCH_S, lambda: _end_revoked(pool))]
        if beat_s is not None:
            self._timers.append(consumer.timer.call_repeatedly(beat_s, lambda: keep_invisible(consumer, pool)))

    @property
    def _held(self) -> HeldPool:
        assert self._pool is not None, "the step has not been started"
        return self._pool

    def stop(self, consumer: Any) -> None:
        """After a lost connection everything goes on; at the worker's end what is held is waited for, or given back."""
        for timer in self._timers:
            consumer.timer.cancel(timer)
        self._timers = []
        if self._pool is not None and consumer.blueprint.state == CLOSE:
            self._drain(consumer, self._pool)

    def _drain(self, consumer: Any, pool: HeldPool) -> None:
        if consumer.task_consumer:
            ignore_errors(consumer, consumer.task_consumer.cancel)
        turn = _turns_of(consumer)
        _log.info("jitney: waiting up to %g s for %d held tasks", self._settings.drain_s, len(pool))
        until = time.monotonic() + self._settings.drain_s
        while len(pool) and time.monotonic() < until and not state.should_terminate:
            turn()
        given_back = [ride for ride in pool if ride.recording is None]
        for ride in given_back:
            ride.give_back()
        until = time.monotonic() + RECORD_S
        while len(pool) and time.monotonic() < until:  # what is just being recorded
            turn()
        turn()  # the acknowledgements
        pool.close()
        _log.info("jitney: %d held tasks go back to the broker; their jobs go on", len(given_back))

    def info(self, consumer: Any) -> dict[str, Any]:
        """For `celery inspect stats`."""
        return {"jitney": {"held": 0 if self._pool is None else len(self._pool), "max_held": self._settings.max_held}}


def _end_revoked(pool: HeldPool) -> None:
    """A task that is held has no process that a revocation would have to kill: it ends at once.

    `expires` counts until its job begins to speak.
    """
    for ride in pool:
        request = ride.newest.request
        if ride.partial.num_tokens:
            request.expires = None
        if ride.recording is None:
            request.revoked()


def _outlive_the_broker(consumer: Any) -> None:
    """Celery closes a lost connection by giving back what is unacknowledged, and ends when Redis is still away then.

    What is held is asked for again later (`bring_again`); what only waits comes after the visibility timeout.
    """
    close = consumer.on_connection_error_after_connected

    def close_what_is_lost(error: Exception) -> None:
        try:
            close(error)
        except Exception as trouble:
            _log.warning("jitney: the lost connection to the broker could not be closed in order: %r", trouble)

    consumer.on_connection_error_after_connected = close_what_is_lost


def _post_to(consumer: Any) -> Callable[[Callable[[], None]], object]:
    """How other threads have the consuming one call something. Without an event loop there is none to wait for."""
    hub = consumer.hub
    return (lambda call: call()) if hub is None else hub.call_soon


def _turns_of(consumer: Any) -> Callable[[], object]:
    """One turn of the consumer's event loop, which Celery has left by the time a worker stops."""
    if consumer.hub is None:
        return lambda: time.sleep(0.05)
    loop = consumer.hub.create_loop()
    consumer.hub.call_soon(lambda: None)

    def turn() -> None:
        consumer.hub.timer.call_after(0.2, lambda: None)  # a turn without news must not last
        next(loop)

    return turn
