"""What the engine thread reports, taken in: who gained what, how much room there is, how the batch looks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from jitney.errors import JitneyError
from jitney.keys import Fence
from jitney.logs import logger
from jitney_worker.engine.protocol import Capacity, EngineSnapshot, SequenceDelta
from jitney_worker.engine.sequence import SequenceId
from jitney_worker.runtime.aboard import Aboard
from jitney_worker.runtime.bridge import Fault, Halted, Refused, Report, StepReport
from jitney_worker.runtime.choice import named
from jitney_worker.runtime.meters import Meters
from jitney_worker.runtime.roster import Roster
from jitney_worker.runtime.running import RunningJob


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """A claimed job's time is over. It takes its turn among the engine's reports."""

    fence: Fence


class Reports:
    """Applies reports to the jobs on board. Pure but for the log: nothing awaits, nothing is written.

    room: set whenever more jobs might be taken than before. num_faults: steps in a row that raised; `fault`
    is set at each. snapshot: the batch as last reported, at `snapshot_at`; `snapshot_came` is set at each.
    """

    def __init__(
        self, aboard: Aboard, roster: Roster, meters: Meters, capacity: Capacity, room: Callable[[], None]
    ) -> None:
        self._aboard = aboard
        self._roster = roster
        self._meters = meters
        self._room = room
        self._log = logger(part="reports")
        self.capacity = capacity
        self.snapshot: EngineSnapshot | None = None
        self.snapshot_at = 0.0
        self.snapshot_came = asyncio.Event()
        self.num_faults = 0
        self.fault = asyncio.Event()

    def absorb(self, report: Report | DeadlinePassed) -> list[RunningJob]:
        """The jobs that have something to write now. Raises what halted the engine."""
        match report:
            case StepReport():
                self._note(report)
                self._meters.stepped(report)
                gaining = [job for delta in report.deltas if (job := self._gain(delta, report.at)) is not None]
                self._meters.after_step(report)
                return gaining
            case Refused(sequence_id, error):
                return self._refuse(sequence_id, error)
            case DeadlinePassed(fence):
                job = self._aboard.get(fence)
                if job is not None and not job.is_over:
                    job.expire()
                    return [job]
            case Fault(error):
                self.num_faults += 1
                self.fault.set()
                self._meters.step_failed()
                self._log.error("step_failed", error=repr(error), num_jobs=len(self._aboard))
            case Halted(error):
                raise error
        return []

    def _note(self, report: StepReport) -> None:
        if report.deltas:
            self.num_faults = 0
        before, self.capacity = self.capacity, report.capacity
        if report.snapshot is not None:
            self.snapshot, self.snapshot_at = report.snapshot, report.at
            self._roster.seen(report.snapshot)
            self.snapshot_came.set()
            for seat in report.snapshot.seats:
                job = self._aboard.get(named(seat.id).fence)
                if job is not None:
                    job.is_seated = True
        # When a step is due too: what a worker may take depends on more than its seats, so now and then it looks again.
        if report.is_due or before.room != self.capacity.room:
            self._room()

    def _gain(self, delta: SequenceDelta, at: float) -> RunningJob | None:
        name = named(delta.id)
        job = self._aboard.get(name.fence)
        if job is None or job.is_over:
            return None  # dropped while this step was running
        if job.is_suspect:
            self._room()  # with its first words it is one no more, and others may come
        next_seq, choice = job.next_seq, job.choices[name.choice]
        self._meters.gained(job, choice, delta, at)
        try:
            job.gain(choice, delta)
        except Exception as error:
            silence(job, next_seq, error)
        if delta.finish_reason is not None or delta.error is not None:
            self._roster.left(delta, choice.num_tokens)
        return job

    def _refuse(self, sequence_id: SequenceId, error: Exception) -> list[RunningJob]:
        job = self._aboard.get(named(sequence_id).fence)
        if job is None:
            return []
        job.fail((error if isinstance(error, JitneyError) else JitneyError(repr(error))).wire())
        return [job]


def silence(job: RunningJob, next_seq: int, error: Exception) -> None:
    """A job whose text cannot be spelled ends alone: the same task speaks for all others."""
    logger(part="reports").error("job_not_spelled", job=job.id, error=type(error).__name__)
    job.silence(JitneyError(f"the answer could not be spelled: {type(error).__name__}").wire(), next_seq)
