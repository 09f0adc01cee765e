"""One task that is held: its messages, its job, and what it has said so far."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from celery import states
from celery.backends.base import DisabledBackend
from celery.backends.rpc import RPCBackend
from celery.worker.state import task_ready

from jitney.bridging import Partial
from jitney.celery.outcome import STREAMING, Outcome, recording

if TYPE_CHECKING:
    from jitney.celery.pool import HeldPool

_UNASKED: Final = (DisabledBackend, RPCBackend)
"""These keep nothing, or send it once to whoever asked."""


@dataclass(frozen=True, slots=True)
class Passenger:
    """One message of the task, as Celery hands it to a pool: what to run at the end, and whom to tell.

    room: the count of outstanding messages that was raised for it, if one was. timeout, soft_timeout: seconds.
    """

    request: Any
    target: Callable[..., Any]
    args: tuple[Any, ...]
    room: Any
    callback: Callable[..., Any]
    error_callback: Callable[..., Any]
    accept_callback: Callable[..., Any]
    timeout_callback: Callable[..., Any]
    timeout: float | None = None
    soft_timeout: float | None = None

    @property
    def hard_limit_s(self) -> float | None:
        return self.timeout or None

    @property
    def soft_limit_s(self) -> float | None:
        return self.soft_timeout or None

    @property
    def is_redelivered(self) -> bool:
        return bool(self.request.delivery_info.get("redelivered"))

    @property
    def call(self) -> tuple[str, int, Any, Any]:
        """The task's id, how often it has been tried again, and its arguments."""
        request = self.request
        return request.id, request.request_dict.get("retries") or 0, request.args, request.kwargs

    def accept(self) -> None:
        self.accept_callback(os.getpid(), time.monotonic())

    def give_room_back(self) -> None:
        if self.room is not None:
            self.room.decrement_eventually()


class Ride:
    """passengers: the task's messages; more than one when the broker hands it out again while it is held.

    Belongs to the thread that consumes messages, but for `tell`, `record`, `stored_state` and `restore`.
    """

    def __init__(self, pool: HeldPool, key: str, first: Passenger) -> None:
        self.pool = pool
        self.key = key
        self.passengers = [first]
        self.partial = Partial()
        self.future: Future[None] | None = None
        self.recording: asyncio.Future[None] | None = None
        self.is_over = False
        self._began_at = time.monotonic()
        self._num_told = 0
        self._writing = threading.Lock()  # what it says must not be written over how it ended

    @property
    def newest(self) -> Passenger:
        """The one whose message the broker still knows: it has forgotten the delivery of the others."""
        return self.passengers[-1]

    # --- on a thread of the pool, or the event loop -------------------------------------------------------

    @property
    def has_news(self) -> bool:
        is_read = not self.is_over and not self.newest.request.ignore_result
        return is_read and self.partial.num_tokens != self._num_told

    def tell(self, said: dict[str, Any]) -> None:
        """Write what the job has said so far."""
        request = self.newest.request
        with self._writing:
            if self.is_over:
                return
            request.task.backend.store_result(request.id, said, STREAMING, request=request._context)
            self._num_told = said["num_tokens"]

    def stored_state(self) -> str | None:
        """What the result backend says of the task; None for one that nobody asks. Raises whatever that raises."""
        request = self.newest.request
        backend = request.task.backend
        if request.ignore_result or isinstance(backend, _UNASKED):
            return None
        return str(backend.get_state(request.id))

    def restore(self, outcome: Outcome) -> None:
        """Somebody else has recorded it. If a partial text was written over that: its end anew, and no callback."""
        with self._writing:
            self.is_over = True
        request = self.newest.request
        task = request.task
        if self.stored_state() != STREAMING:
            return
        value: Any
        try:
            value, state = outcome(), states.SUCCESS
        except Exception as error:
            if isinstance(error, tuple(getattr(task, "autoretry_for", ()))):
                return  # it is the next attempt that speaks
            value, state = error, states.FAILURE
        task.backend.store_result(request.id, value, state, request=request._context)

    def record(self, outcome: Outcome) -> Any:
        """Run the task's own end as Celery's pools do: results, callbacks, chains, retries, signals."""
        with self._writing:
            self.is_over = True
        passenger = self.newest
        with recording(outcome):
            has_failed, value, _ = passenger.target(*passenger.args)
        return has_failed, value, time.monotonic() - self._began_at

    # --- on the thread that consumes ----------------------------------------------------------------------

    def end(self, tell_celery: Callable[[], None]) -> None:
        """It is recorded: acknowledge it, and send its events."""
        self.pool.forget(self)
        for passenger in self.passengers[:-1]:
            task_ready(passenger.request)
        tell_celery()

    def end_silently(self) -> None:
        """Somebody else has recorded it."""
        request = self.newest.request
        self.end(lambda: task_ready(request))
        request.acknowledge()

    def leave(self) -> None:
        """Hold it no longer. Its job goes on, unless somebody cancels it."""
        with self._writing:
            self.is_over = True
        if self.future is not None:
            self.future.cancel()
        self.pool.forget(self)

    def give_back(self) -> None:
        """To the broker, for another worker, who finds the job as far as it is by then."""
        self.leave()
        for passenger in self.passengers:
            task_ready(passenger.request)
        self.newest.request.reject(requeue=True)

    def terminate(self, signal: Any = None) -> None:
        """As Celery ends what a pool runs."""
        self.leave()
