"""The engine's thread: take what has arrived, step, report. Nothing else touches the engine."""

from __future__ import annotations

import threading
import time

from jitney_worker.engine.protocol import Engine, EngineSnapshot
from jitney_worker.engine.sequence import SequenceId
from jitney_worker.runtime.bridge import Abort, Add, Bridge, Command, Fault, Halted, Refused, StepReport


class EngineThread(threading.Thread):
    """Runs the engine until the bridge is stopped.

    last_step_at: monotonic seconds of the last finished step, or of the last moment without work; the
    heartbeat reads it to tell a stuck engine from an idle one.
    """

    def __init__(self, engine: Engine, bridge: Bridge, *, snapshot_every_s: float) -> None:
        super().__init__(name="jitney-engine", daemon=True)
        self.last_step_at = time.monotonic()
        self.is_idle = True
        self._engine = engine
        self._bridge = bridge
        self._snapshot_every_s = snapshot_every_s
        self._snapshot_at = 0.0
        self._inside: set[SequenceId] = set()

    def run(self) -> None:
        try:
            self._serve()
        except Exception as error:
            self._bridge.give(Halted(error))

    def _serve(self) -> None:
        while not self._bridge.stopped:
            for command in self._bridge.take():
                self._obey(command)
            if self._engine.has_work():
                self._bridge.await_room()
                self._step()
            else:
                self._rest()

    def _obey(self, command: Command) -> None:
        match command:
            case Add(request):
                try:
                    self._engine.add(request)
                    self._inside.add(request.id)
                except Exception as error:
                    self._bridge.give(Refused(request.id, error))
            case Abort(sequence_id):
                self._engine.abort(sequence_id)
                self._inside.discard(sequence_id)

    def _step(self) -> None:
        self.is_idle = False
        try:
            deltas = tuple(self._engine.step())
        except Exception as error:
            self._clear()
            self._bridge.give(Fault(error))
            return
        self.last_step_at = time.monotonic()
        self._inside.difference_update(
            delta.id for delta in deltas if delta.finish_reason is not None or delta.error is not None
        )
        self._bridge.give(StepReport(deltas, self._engine.capacity(), self._snapshot_if_due()))

    def _rest(self) -> None:
        """Nothing to do: say so once, then sleep until something arrives."""
        if not self.is_idle:
            self._bridge.await_room()
            self._bridge.give(StepReport((), self._engine.capacity(), self._engine.snapshot()))
        self.is_idle = True
        self._bridge.wait()
        self.last_step_at = time.monotonic()

    def _snapshot_if_due(self) -> EngineSnapshot | None:
        if self.last_step_at - self._snapshot_at < self._snapshot_every_s:
            return None
        self._snapshot_at = self.last_step_at
        return self._engine.snapshot()

    def _clear(self) -> None:
        """After a fault nothing inside can be trusted: all of it leaves, and the blocks are free again."""
        for sequence_id in self._inside:
            self._engine.abort(sequence_id)
        self._inside.clear()
        self.last_step_at = time.monotonic()
