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

    at: monotonic seconds when the report was made; it may be read much later, when Redis is slow. boundary_at: when
    the commands before the step were taken; began_at: when it began. num_tokens: computed in it.
    is_due: with this step, all that waits to be written is to be written.
    """

    deltas: tuple[SequenceDelta, ...]
    capacity: Capacity
    snapshot: EngineSnapshot | None = None
    at: float = field(default_factory=time.monotonic)
    is_due: bool = True
    boundary_at: float = 0.0
    began_at: float = 0.0
    num_tokens: int = 0


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
        self._num_begun = 0
        self._num_published = 0
        self._stopped = False
        self._reports: deque[Report] = deque()
        self._wake: Callable[[], None] | None = None

    def connect(self, loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> None:
        """`wake` is called on `loop` when there are reports that should not wait."""

        def wake_loop() -> None:
            # A loop that has been closed means that nobody waits for a report any more.
            if not loop.is_closed():
                loop.call_soon_threadsafe(wake)

        self._wake = wake_loop

    # --- the loop's side ---

    def send(self, command: Command) -> None:
        with self._lock:
            self._commands.append(command)
            self._lock.notify()

    def collect(self) -> list[Report]:
        """All reports that have come, in order."""
        reports = list[Report]()
        while self._reports:  # it may grow meanwhile
            reports.append(self._reports.popleft())
        return reports

    def published(self, num_steps: int) -> None:
        """The loop has written that many reports out: the engine may go on by as many."""
        if num_steps:  # a semaphore refuses to be released by none
            self._num_published += num_steps
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
        self._num_begun += 1

    @property
    def num_unpublished(self) -> int:
        """Steps that room was taken for, and that the loop has not written out."""
        return self._num_begun - self._num_published

    def return_room(self) -> None:
        """The step that it was awaited for has nothing to report."""
        self._num_begun -= 1
        self._room.release()

    def give(self, report: Report, *, wakes: bool = True) -> None:
        """A report that does not wake the loop is collected with the next one that does, or when the loop looks."""
        assert self._wake is not None, "connect() first"
        self._reports.append(report)
        if wakes:
            self._wake()
