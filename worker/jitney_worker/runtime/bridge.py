"""The one bridge between the event loop and the engine thread. Plain values cross it, nothing is shared.

    event loop  --- Add, Abort --->  engine thread
    event loop  <-- StepReport, Refused, Fault, Halted ---  engine thread

The engine takes all that has arrived at every iteration boundary. It may run `max_unpublished_steps` ahead
of what the loop has published; then it waits, so that a slow Redis never costs more recomputed tokens.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from jitney_worker.engine.protocol import Capacity, EngineSnapshot, SequenceDelta
from jitney_worker.engine.sequence import SequenceId, SequenceRequest


@dataclass(frozen=True, slots=True)
class Add:
    """A sequence joins at the next boundary that has room for it."""

    request: SequenceRequest


@dataclass(frozen=True, slots=True)
class Abort:
    """A sequence leaves at the next boundary; its blocks are free from then on."""

    id: SequenceId


Command = Add | Abort


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step gave. `snapshot` is there only now and then: building it costs a little each time.

    at: monotonic seconds when the report was made; it may be read much later, when Redis is slow.
    """

    deltas: tuple[SequenceDelta, ...]
    capacity: Capacity
    snapshot: EngineSnapshot | None = None
    at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class Refused:
    """The engine would not take a sequence in; `error` says why."""

    id: SequenceId
    error: Exception


@dataclass(frozen=True, slots=True)
class Fault:
    """A step raised. Every sequence that was inside has been dropped."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Halted:
    """The engine thread is no more: nothing will be computed again."""

    error: Exception


Report = StepReport | Refused | Fault | Halted


class Bridge:
    """Two one-way streets and a bound on how far the engine may run ahead."""

    def __init__(self, max_unpublished_steps: int) -> None:
        self._commands: deque[Command] = deque()
        self._lock = threading.Condition()
        self._room = threading.Semaphore(max_unpublished_steps)
        self._stopped = False
        self._deliver: Callable[[Report], None] | None = None

    def connect(self, loop: asyncio.AbstractEventLoop, receive: Callable[[Report], None]) -> None:
        """Reports arrive as calls of `receive` on `loop`."""

        def deliver(report: Report) -> None:
            # A loop that has been closed means that nobody waits for this report any more.
            if not loop.is_closed():
                loop.call_soon_threadsafe(receive, report)

        self._deliver = deliver

    # --- the loop's side ---

    def send(self, command: Command) -> None:
        with self._lock:
            self._commands.append(command)
            self._lock.notify()

    def published(self, num_steps: int) -> None:
        """The loop has written that many reports out: the engine may go on by as many."""
        if num_steps:  # a semaphore refuses to be released by none
            self._room.release(num_steps)

    def stop(self) -> None:
        """The engine thread ends at the next boundary."""
        with self._lock:
            self._stopped = True
            self._lock.notify()
        self._room.release()

    # --- the engine's side ---

    def take(self) -> list[Command]:
        """All that has arrived; empty if nothing has."""
        with self._lock:
            arrived = list(self._commands)
            self._commands.clear()
            return arrived

    def wait(self, timeout_s: float | None = None) -> None:
        """Until something arrives or the end is asked for, or the time is over: for an engine with nothing to do."""
        with self._lock:
            self._lock.wait_for(lambda: self._commands or self._stopped, timeout_s)

    @property
    def stopped(self) -> bool:
        return self._stopped

    def await_room(self) -> None:
        """Until the loop is less than `max_unpublished_steps` behind."""
        self._room.acquire()

    def return_room(self) -> None:
        """The step that it was awaited for has nothing to report."""
        self._room.release()

    def give(self, report: Report) -> None:
        assert self._deliver is not None, "connect() first"
        self._deliver(report)
