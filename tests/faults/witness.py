"""Counts steps: whether anything is computed for a sequence after its worker has let go of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.faults.points import say
from tests.faults.unprotected import replace_in

from jitney_worker.engine.protocol import SchedulerOutput
from jitney_worker.engine.sequence import SequenceId
from jitney_worker.runtime.bridge import Abort, Bridge, Command

MOST_STEPS = 1
"""The step whose batch had been read in when the word came; the next one takes it out."""


@dataclass(slots=True)
class Witness:
    """A worker says `let go NUMBER` as it lets go of sequences, and `late ID` if one is computed all the same."""

    _steps_since: dict[SequenceId, int] = field(default_factory=dict)

    def watch(self) -> None:
        """From now on, in this process."""
        send = Bridge.send

        def watched(bridge: Bridge, command: Command) -> None:
            send(bridge, command)
            if isinstance(command, Abort):  # noted afterwards: a step that begins in between could not know
                self._steps_since.setdefault(command.id, 0)
                say(f"let go {len(self._steps_since)}")

        replace_in(Bridge, "send", watched)

    def of_step(self, scheduled: SchedulerOutput) -> None:
        for item in scheduled.scheduled:
            sequence_id = item.sequence.id
            if sequence_id in self._steps_since:
                self._steps_since[sequence_id] += 1
                if self._steps_since[sequence_id] > MOST_STEPS:
                    say(f"late {sequence_id}")
