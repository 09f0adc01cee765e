"""The engine's thread: take what has arrived, step, report. Nothing else touches the engine."""

from __future__ import annotations

import threading
import time
from typing import Final

from jitney_worker.engine.protocol import Engine, EngineSnapshot
from jitney_worker.engine.sequence import SequenceId
from jitney_worker.runtime.bridge import Abort, Add, Bridge, Command, Fault, Halted, Refused, StepReport
from jitney_worker.runtime.pace import Pace
from jitney_worker.runtime.stall_clock import StallClock

THREAD_NAME: Final = "jitney-engine"

IDLE_STEP_S: Final = 0.01


def still_runs() -> bool:
    """True if an engine thread of this process has not ended: perhaps it hangs in a call that nothing can end."""
    return any(thread.name == THREAD_NAME and thread.is_alive() for thread in threading.enumerate())


class EngineThread(threading.Thread):
    """Runs the engine until the bridge is stopped.

    clock: tells a stuck engine from one that is idle, or waits for Redis. num_computed_tokens: as the engine's,
    after its last step.
    """

    def __init__(self, engine: Engine, bridge: Bridge, pace: Pace, *, snapshot_every_s: float) -> None:
        super().__init__(name=THREAD_NAME, daemon=True)
        self.clock = StallClock()
        self.num_computed_tokens = 0
        self._is_idle = True
        self._engine = engine
        self._bridge = bridge
        self._pace = pace
        self._snapshot_every_s = snapshot_every_s
        self._snapshot_at = 0.0
        self._boundary_at = 0.0
        self._inside: set[SequenceId] = set()
        self._silent: set[SequenceId] = set()
        self._room: tuple[int, int, int | None] = (0, 0, None)

    def run(self) -> None:
        self.clock.progressed()
        try:
            self._serve()
        except Exception as error:
            self._bridge.give(Halted(error))

    def _serve(self) -> None:
        while not self._bridge.stopped:
            self._boundary_at = time.monotonic()
            for command in self._bridge.take():
                self._obey(command)
            if self._engine.has_work():
                self._await_room()
                self._step()
            else:
                self._rest()

    def _obey(self, command: Command) -> None:
        match command:
            case Add(request):
                try:
                    self._engine.add(request)
                    self._inside.add(request.id)
                    self._silent.add(request.id)
                except Exception as error:
                    self._bridge.give(Refused(request.id, error))
            case Abort(sequence_id):
                self._engine.abort(sequence_id)
                self._inside.discard(sequence_id)
                self._silent.discard(sequence_id)

    def _await_room(self) -> None:
        with self.clock.paused():
            self._bridge.await_room()

    def _step(self) -> None:
        self._is_idle = False
        began_at = time.monotonic()
        try:
            deltas = tuple(self._engine.step())
        except Exception as error:
            self._clear()
            self._bridge.give(Fault(error))
            return
        # A chunk of a prompt gives nobody a token, and is progress all the same.
        num_computed_tokens = self._engine.num_computed_tokens
        if not deltas and num_computed_tokens == self.num_computed_tokens:
            self._idle_step()
            return
        num_tokens, self.num_computed_tokens = num_computed_tokens - self.num_computed_tokens, num_computed_tokens
        self.clock.progressed()
        is_due = self._pace.is_due(time.monotonic(), self._bridge.num_unpublished)
        report = StepReport(
            deltas,
            self._engine.capacity(),
            self._snapshot_if_due(),
            is_due=is_due,
            boundary_at=self._boundary_at,
            began_at=began_at,
            num_tokens=num_tokens,
        )
        is_news = self._note(report)
        self._bridge.give(report, wakes=is_news or is_due or report.snapshot is not None)

    def _note(self, report: StepReport) -> bool:
        """True if somebody's first or last token is in it, or another number of jobs may be claimed."""
        room = report.capacity.room
        is_news, self._room = room != self._room, room
        for delta in report.deltas:
            if delta.finish_reason is not None or delta.error is not None:
                self._inside.discard(delta.id)
                self._silent.discard(delta.id)
                is_news = True
            elif delta.id in self._silent:
                self._silent.discard(delta.id)
                is_news = True
        return is_news

    def _idle_step(self) -> None:
        """There was work, and nobody got on: nothing to report. Repeated at once it would only heat the machine."""
        self._bridge.return_room()
        self._bridge.wait(IDLE_STEP_S)

    def _rest(self) -> None:
        """Nothing to do: say so once, then sleep until something arrives."""
        if not self._is_idle:
            self._await_room()
            self._bridge.give(
                StepReport((), self._engine.capacity(), self._engine.snapshot(), boundary_at=self._boundary_at)
            )
        self._is_idle = True
        self.clock.progressed()
        with self.clock.paused():
            self._bridge.wait()

    def _snapshot_if_due(self) -> EngineSnapshot | None:
        now = time.monotonic()
        if now - self._snapshot_at < self._snapshot_every_s:
            return None
        self._snapshot_at = now
        return self._engine.snapshot()

    def _clear(self) -> None:
        """After a fault nothing inside can be trusted: all of it leaves, and the blocks are free again."""
        for sequence_id in self._inside:
            self._engine.abort(sequence_id)
        self._inside.clear()
        self._silent.clear()
        self.clock.progressed()
