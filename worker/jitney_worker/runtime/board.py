"""Everyone on board: from the intake of a delivery to the last event of its job. Lives on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import redis.exceptions

from jitney.errors import InvalidJob, JitneyError
from jitney.keys import JobId
from jitney.logs import logger
from jitney.messages import JobSpec
from jitney.queue import Append, Delivery, Ending, Held, Queue
from jitney_worker.engine.protocol import Capacity, EngineSnapshot, SequenceDelta
from jitney_worker.engine.sequence import SequenceId
from jitney_worker.runtime.bridge import Abort, Add, Bridge, Fault, Refused, Report, StepReport
from jitney_worker.runtime.heartbeat import Leases
from jitney_worker.runtime.intake import Intake
from jitney_worker.runtime.publisher import Publisher
from jitney_worker.runtime.roster import Roster
from jitney_worker.runtime.running import RunningJob, job_id_of, refusal
from jitney_worker.settings import WorkerSettings
from jitney_worker.text.rules import StopRules

FAULT_RETRY_DELAY_S = 0.5


@dataclass(frozen=True, slots=True)
class Neighbours:
    """What the board works with."""

    queue: Queue
    intake: Intake
    publisher: Publisher
    bridge: Bridge
    leases: Leases
    roster: Roster
    stop_rules: StopRules


class Board:
    """Jobs that this worker holds. Every method runs on the event loop; none blocks it.

    room: set whenever more jobs might be taken than before. num_faults: steps in a row that raised; `fault`
    is set at each. snapshot: the batch as last reported; `snapshot_came` is set at each.
    """

    def __init__(self, settings: WorkerSettings, with_: Neighbours, capacity: Capacity, room: asyncio.Event) -> None:
        self._settings = settings
        self._with = with_
        self._capacity = capacity
        self._max_num_seqs = capacity.free_seats
        self._claim_ahead = settings.worker.claim_ahead
        self._snapshot_at = 0.0
        self._jobs: dict[JobId, RunningJob] = {}
        self._intakes: set[asyncio.Task[None]] = set()
        self._reports: deque[Report] = deque()
        self._news = asyncio.Event()
        self._left = asyncio.Event()
        self._log = logger(part="board", queue=with_.queue.name)
        self.room = room
        self.num_faults = 0
        self.snapshot: EngineSnapshot | None = None
        self.snapshot_came = asyncio.Event()
        self.fault = asyncio.Event()

    def __len__(self) -> int:
        return len(self._jobs) + len(self._intakes)

    def holds(self, job_id: JobId) -> bool:
        return self._with.leases.has(job_id)

    # --- coming on board ---

    def credit(self) -> int:
        """How many jobs could be taken now."""
        if self._settings.engine.policy == "static":
            return self._max_num_seqs if len(self) == 0 else 0
        if self._capacity.num_waiting and self._capacity.free_seats > 0:
            return 0  # seats are free but blocks are not: one more would only wait here instead of there
        return self._max_num_seqs + self._claim_ahead - len(self)

    def take(self, delivery: Delivery) -> None:
        """Begin the intake of a delivery. The claimer does not wait for tokenising."""
        self._with.leases.take(Held(delivery.id, delivery.fence, delivery.band))
        task = asyncio.create_task(self._board(delivery), name=f"intake {delivery.id}")
        self._intakes.add(task)
        task.add_done_callback(self._intake_done)

    def _intake_done(self, task: asyncio.Task[None]) -> None:
        self._intakes.discard(task)
        self._changed()

    async def _board(self, delivery: Delivery) -> None:
        spec: JobSpec | None = None
        try:
            spec = JobSpec.decode(delivery.body)
            job = await self._with.intake.prepare(delivery, spec)
        except JitneyError as error:
            await self._refuse(delivery, spec, error)
        except Exception as error:
            self._log.exception("intake_failed", job=delivery.id)
            await self._refuse(delivery, spec, JitneyError(f"the job could not be read in: {type(error).__name__}"))
        else:
            if self.holds(delivery.id):  # the lease may be gone by now
                await self._admit(job)

    async def _admit(self, job: RunningJob) -> None:
        job.submitted_at = time.monotonic()
        self._jobs[job.id] = job
        if job.is_over:  # all was said in an earlier attempt; only the terminal event is missing
            await self._write([job])
            return
        for choice in job.choices:
            request = choice.request
            self._with.stop_rules.register(request.id, job.spec.sampling.stop, request.params.stop_token_ids)
            self._with.bridge.send(Add(request))

    async def _refuse(self, delivery: Delivery, spec: JobSpec | None, error: JitneyError) -> None:
        self._log.info("job_refused", job=delivery.id, code=error.code)
        undecodable = isinstance(error, InvalidJob) and error.code == "undecodable"
        await self._with.publisher.write([], [refusal(delivery, spec, error.wire(), is_dead=undecodable)])
        self.forget(delivery.id)

    # --- on the way ---

    def receive(self, report: Report) -> None:
        """A report from the engine thread; written out by `publish`."""
        self._reports.append(report)
        self._news.set()

    async def publish(self) -> None:
        """For ever: take in all reports there are, write what the jobs gained, let the engine go on."""
        while True:
            await self._news.wait()
            self._news.clear()
            reports, self._reports = self._reports, deque()
            gained: dict[JobId, RunningJob] = {}
            for report in reports:
                await self._absorb(report, gained)
            await self._write(gained.values())
            self._with.bridge.published(sum(not isinstance(report, Refused) for report in reports))

    async def _absorb(self, report: Report, gained: dict[JobId, RunningJob]) -> None:
        match report:
            case StepReport(deltas, capacity, snapshot):
                if deltas:
                    self.num_faults = 0
                self._note(capacity, snapshot)
                for delta in deltas:
                    self._gain(delta, gained)
            case Refused(sequence_id, error):
                self._refused_by_engine(sequence_id, error, gained)
            case Fault(error):
                self.num_faults += 1
                self.fault.set()
                self._log.error("step_failed", error=repr(error), num_jobs=len(self._jobs))
                await self._retry_all()
                gained.clear()

    def _note(self, capacity: Capacity, snapshot: EngineSnapshot | None) -> None:
        self._capacity = capacity
        if snapshot is not None:
            self.snapshot, self._snapshot_at = snapshot, time.monotonic()
            self.snapshot_came.set()
            for seat in snapshot.seats:
                job = self._jobs.get(job_id_of(seat.id))
                if job is not None:
                    job.is_seated = True
        self.room.set()

    def _gain(self, delta: SequenceDelta, gained: dict[JobId, RunningJob]) -> None:
        job = self._jobs.get(job_id_of(delta.id))
        if job is None:
            return  # dropped while this step was running
        job.gain(delta)
        gained[job.id] = job
        if delta.finish_reason is not None or delta.error is not None:
            self._with.roster.left(delta, job.num_tokens)

    def _refused_by_engine(self, sequence_id: SequenceId, error: Exception, gained: dict[JobId, RunningJob]) -> None:
        job = self._jobs.get(job_id_of(sequence_id))
        if job is None:
            return
        wire = error.wire() if isinstance(error, JitneyError) else JitneyError(repr(error)).wire()
        job.fail(wire["type"], wire["code"], wire["message"], wire["param"])
        gained[job.id] = job

    async def _write(self, jobs: Iterable[RunningJob]) -> None:
        """Write what these jobs gained; who has ended, or is not ours any more, leaves."""
        appends: list[Append] = []
        endings: list[Ending] = []
        for job in jobs:
            written = job.write()
            if isinstance(written, Ending):
                endings.append(written)
            elif written is not None:
                appends.append(written)
        refused = await self._with.publisher.write(appends, endings)
        for ending in endings:
            self.forget(ending.id)
        self.lose(refused)

    # --- leaving ---

    def lose(self, job_ids: Iterable[JobId]) -> None:
        """Jobs that another claim owns, or that have been ended from outside: dropped without a word."""
        for job_id in job_ids:
            self._log.info("job_lost", job=job_id)
            self.forget(job_id)

    def forget(self, job_id: JobId) -> None:
        """The job is not ours: its sequences leave the engine at the next boundary."""
        self._with.leases.drop(job_id)
        job = self._jobs.pop(job_id, None)
        for choice in job.choices if job is not None else ():
            self._with.stop_rules.forget(choice.request.id)
            if choice.finish_reason is None:
                self._with.bridge.send(Abort(choice.request.id))
        if job is not None and job.is_seated:
            self._claim_ahead = self._settings.worker.claim_ahead
        self._changed()

    async def _retry_all(self) -> None:
        """After a fault: back into the queue, with a pause, for us or for a peer."""
        for job in list(self._jobs.values()):
            self.forget(job.id)
            with contextlib.suppress(redis.exceptions.RedisError, OSError):  # its lease runs out instead
                await self._with.queue.retry(
                    job.id,
                    job.delivery.fence,
                    delay_s=FAULT_RETRY_DELAY_S,
                    keep_s=job.keep_s,
                    max_strikes=self._settings.worker.max_attempts,
                    max_tries=self._settings.worker.max_tries,
                )

    async def release(self, jobs: Iterable[RunningJob]) -> None:
        """Hand jobs back so that a peer takes them now; what they said so far is in their logs."""
        for job in list(jobs):
            self.forget(job.id)
            await self._with.queue.release(job.id, job.delivery.fence)

    async def release_all(self) -> None:
        await asyncio.gather(*self._intakes, return_exceptions=True)
        await self.release(self._jobs.values())

    def unseated(self) -> list[RunningJob]:
        """Jobs claimed ahead that had no seat for a while when the engine last showed its seats.

        Judged by what the engine showed, not by the clock alone: a long first step shows nothing yet.
        """
        oldest = self._snapshot_at - self._settings.worker.claim_ahead_patience_s
        return [job for job in self._jobs.values() if not job.is_seated and job.submitted_at < oldest]

    async def release_unseated(self) -> None:
        """Hand them back, and claim none ahead until a seat frees: they would only come and go."""
        self._claim_ahead = 0
        await self.release(self.unseated())

    async def until_empty(self) -> None:
        while len(self):
            self._left.clear()
            await self._left.wait()

    def _changed(self) -> None:
        self.room.set()
        self._left.set()
