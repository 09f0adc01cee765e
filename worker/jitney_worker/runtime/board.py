"""Everyone on board: from the admission of a job to its last event. Lives on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import redis.exceptions

from jitney.errors import JitneyError, StreamLost
from jitney.keys import Fence, JobId
from jitney.logs import logger
from jitney.queue import Append, Delivery, Ending, Held, Queue
from jitney.retrying import backoff_s
from jitney_worker.engine.protocol import Capacity, EngineSnapshot, SequenceDelta
from jitney_worker.engine.sequence import SequenceId
from jitney_worker.runtime.boarding import Boarding
from jitney_worker.runtime.bridge import Abort, Add, Bridge, Fault, Halted, Refused, Report, StepReport
from jitney_worker.runtime.heartbeat import Leases
from jitney_worker.runtime.intake import Intake
from jitney_worker.runtime.publisher import Publisher
from jitney_worker.runtime.roster import Roster
from jitney_worker.runtime.running import RunningJob, fence_of
from jitney_worker.settings import WorkerSettings
from jitney_worker.text.rules import StopRules

LOOK_AGAIN_S = 0.05
TORN = "the end of the log was lost; the tokens that stood there are computed again"


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """A claimed job's time is over."""

    fence: Fence


@dataclass(frozen=True, slots=True)
class Neighbours:
    """What the board works with. is_stuck: the engine has had work and finished no step for too long."""

    queue: Queue
    intake: Intake
    publisher: Publisher
    bridge: Bridge
    leases: Leases
    roster: Roster
    stop_rules: StopRules
    is_stuck: Callable[[], bool]


class Board:
    """Jobs that this worker holds, by the fence of their claim. Every method runs on the event loop; none blocks it.

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
        self._jobs: dict[Fence, RunningJob] = {}
        self._boarding = Boarding(
            with_.intake,
            with_.publisher,
            is_held=self.holds,
            admit=self._admit,
            leave=self.forget,
            settled=self._changed,
        )
        self._reports: deque[Report | DeadlinePassed] = deque()
        self._rng = random.Random()
        self._news = asyncio.Event()
        self._left = asyncio.Event()
        self._log = logger(part="board", queue=with_.queue.name)
        self.room = room
        self.num_faults = 0
        self.snapshot: EngineSnapshot | None = None
        self.snapshot_came = asyncio.Event()
        self.fault = asyncio.Event()

    def __len__(self) -> int:
        return len(self._jobs) + len(self._boarding)

    def holds(self, fence: Fence) -> bool:
        return self._with.leases.has(fence)

    # --- coming on board ---

    def credit(self) -> int:
        """How many jobs could be taken now."""
        if self._with.is_stuck():
            return 0  # whatever came would only wait here until its lease is over, and lose an attempt by it
        if self._settings.engine.policy == "static":
            return self._max_num_seqs if len(self) == 0 else 0
        if any(job.is_suspect for job in self._jobs.values()):
            return 0  # it may end this worker: nobody should be on board then who has not said anything yet
        if self._capacity.num_waiting and self._capacity.free_seats > 0:
            return 0  # seats are free but blocks are not: one more would only wait here instead of there
        return self._max_num_seqs + self._claim_ahead - len(self)

    def take(self, delivery: Delivery) -> None:
        """A delivery that the claimer got."""
        # A second claim of a job is the proof that the first one is over, whether we have heard of that or not.
        self.lose(held.fence for held in self._with.leases.held() if held.id == delivery.id)
        self._with.leases.take(Held(delivery.id, delivery.fence, delivery.band))
        self._boarding.begin(delivery)
        if delivery.time_left_ms is not None:
            self._expire_in(delivery.time_left_ms / 1_000, delivery.fence)

    async def _admit(self, job: RunningJob) -> None:
        job.submitted_at = time.monotonic()
        self._jobs[job.fence] = job
        if job.is_over:  # all was said in an earlier attempt; only the terminal event is missing
            await self._write([job])
            return
        job.is_held_back = job.is_suspect
        if job.is_held_back:
            self._seat_suspects()
        else:
            self._seat(job)

    def _seat(self, job: RunningJob) -> None:
        for choice in job.choices:
            request = choice.request
            self._with.stop_rules.register(request.id, job.spec.sampling.stop, request.params.stop_token_ids)
            self._with.bridge.send(Add(request))

    def _seat_suspects(self) -> None:
        """Let the first suspect in as soon as all others have progressed: its end could not cost them an attempt."""
        if any(not job.has_progressed and not job.is_held_back for job in self._jobs.values()):
            return
        for job in self._jobs.values():
            if job.is_held_back:
                job.is_held_back = False
                self._seat(job)
                return

    def _expire_in(self, seconds: float, fence: Fence) -> None:
        asyncio.get_running_loop().call_later(max(0.0, seconds), self._pass_deadline, fence)

    def _pass_deadline(self, fence: Fence) -> None:
        if fence in self._jobs:
            self._reports.append(DeadlinePassed(fence))
            self._news.set()
        elif self.holds(fence):  # still being read in
            self._expire_in(LOOK_AGAIN_S, fence)

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
            gained: dict[Fence, RunningJob] = {}
            for report in reports:
                await self._absorb(report, gained)
            await self._write(gained.values())
            self._seat_suspects()
            self._with.bridge.published(sum(isinstance(report, StepReport | Fault | Halted) for report in reports))

    async def _absorb(self, report: Report | DeadlinePassed, gained: dict[Fence, RunningJob]) -> None:
        match report:
            case StepReport(deltas, capacity, snapshot, at):
                if deltas:
                    self.num_faults = 0
                self._note(capacity, snapshot, at)
                for delta in deltas:
                    self._gain(delta, gained)
            case Refused(sequence_id, error):
                self._refused_by_engine(sequence_id, error, gained)
            case Fault(error):
                self.num_faults += 1
                self.fault.set()
                self._log.error("step_failed", error=repr(error), num_jobs=len(self._jobs))
                await self.retry_all(error)
                gained.clear()
            case DeadlinePassed(fence):
                if (job := self._jobs.get(fence)) is not None and not job.is_over:
                    job.expire()
                    gained[fence] = job
            case Halted(error):
                raise error

    def _note(self, capacity: Capacity, snapshot: EngineSnapshot | None, at: float) -> None:
        self._capacity = capacity
        if snapshot is not None:
            self.snapshot, self._snapshot_at = snapshot, at
            self.snapshot_came.set()
            for seat in snapshot.seats:
                job = self._jobs.get(fence_of(seat.id))
                if job is not None:
                    job.is_seated = True
        self.room.set()

    def _gain(self, delta: SequenceDelta, gained: dict[Fence, RunningJob]) -> None:
        job = self._jobs.get(fence_of(delta.id))
        if job is None or job.is_over:
            return  # dropped while this step was running
        next_seq = job.next_seq
        try:
            job.gain(delta)
        except Exception as error:
            self._silence(job, next_seq, error)
        gained[job.fence] = job
        if delta.finish_reason is not None or delta.error is not None:
            self._with.roster.left(delta, job.num_tokens)

    def _silence(self, job: RunningJob, next_seq: int, error: Exception) -> None:
        """A job whose text cannot be spelled ends alone: the same task speaks for all others."""
        self._log.error("job_not_spelled", job=job.id, error=repr(error))
        job.silence(JitneyError(f"the answer could not be spelled: {type(error).__name__}").wire(), next_seq)

    def _refused_by_engine(self, sequence_id: SequenceId, error: Exception, gained: dict[Fence, RunningJob]) -> None:
        job = self._jobs.get(fence_of(sequence_id))
        if job is None:
            return
        job.fail((error if isinstance(error, JitneyError) else JitneyError(repr(error))).wire())
        gained[job.fence] = job

    async def _write(self, jobs: Iterable[RunningJob]) -> None:
        """Write what these jobs gained; who has ended, or is not ours any more, leaves."""
        appends: list[Append] = []
        endings: list[Ending] = []
        for job in jobs:
            written = self._next_write(job)
            if isinstance(written, Ending):
                endings.append(written)
            elif written is not None:
                appends.append(written)
        unwritten = await self._with.publisher.write(appends, endings)
        self.lose(unwritten.lost)
        await self._retry([self._jobs[fence] for fence in unwritten.torn if fence in self._jobs], StreamLost(TORN))
        for ending in endings:
            self.forget(ending.fence)

    def _next_write(self, job: RunningJob) -> Append | Ending | None:
        next_seq = job.next_seq
        try:
            return job.write()
        except Exception as error:
            self._silence(job, next_seq, error)
            return job.write()

    # --- leaving ---

    def lose(self, fences: Iterable[Fence]) -> None:
        """Jobs that another claim owns, or that have been ended from outside: dropped without a word."""
        for fence in fences:
            job_id = self.forget(fence)
            if job_id is not None:
                self._log.info("job_lost", job=job_id)

    def forget(self, fence: Fence) -> JobId | None:
        """The job is not ours: its sequences leave the engine at the next boundary. None if it was not here."""
        job_id = self._with.leases.drop(fence)
        job = self._jobs.pop(fence, None)
        for choice in job.choices if job is not None else ():
            self._with.stop_rules.forget(choice.request.id)
            if choice.finish_reason is None:
                self._with.bridge.send(Abort(choice.request.id))
        if job is not None and job.is_seated:
            self._claim_ahead = self._settings.worker.claim_ahead
        self._changed()
        return job_id

    async def retry_all(self, error: Exception) -> None:
        """After a fault of ours."""
        await self._retry(self._jobs.values(), error)

    async def _retry(self, jobs: Iterable[RunningJob], error: Exception) -> None:
        """Back into the queue, with a pause, for us or for a peer. The attempt counts."""
        jobs = list(jobs)
        last = (
            error if isinstance(error, JitneyError) else JitneyError(f"a step failed: {type(error).__name__}: {error}")
        )
        for job in jobs:
            self.forget(job.fence)
        with contextlib.suppress(redis.exceptions.RedisError, OSError):  # the leases of the others run out instead
            for job in jobs:
                await self._with.queue.retry(
                    job.id,
                    job.fence,
                    delay_s=backoff_s(job.spec.retry, job.delivery.tries, self._rng),
                    keep_s=job.keep_s,
                    max_strikes=self._settings.worker.max_attempts,
                    max_tries=self._settings.worker.max_tries,
                    error=last.wire(),
                )

    async def _release(self, helds: Iterable[Held]) -> None:
        """Hand jobs back so that a peer takes them now; what they said so far is in their logs."""
        for held in helds:
            self.forget(held.fence)
            await self._with.queue.release(held.id, held.fence)

    async def release_all(self) -> None:
        """Hand back all there are, those that are still being read in too."""
        await self._boarding.stop()
        await self._release(self._with.leases.held())

    def unseated(self) -> list[RunningJob]:
        """Jobs claimed ahead that had no seat for a while when the engine last showed its seats.

        Judged by what the engine showed, not by the clock alone: a long first step shows nothing yet.
        """
        oldest = self._snapshot_at - self._settings.worker.claim_ahead_patience_s
        return [job for job in self._jobs.values() if not job.is_seated and job.submitted_at < oldest]

    async def release_unseated(self) -> None:
        """Hand them back, and claim none ahead until a seat frees: they would only come and go."""
        self._claim_ahead = 0
        await self._release(Held(job.id, job.fence, job.delivery.band) for job in self.unseated())

    async def until_empty(self) -> None:
        while len(self):
            self._left.clear()
            await self._left.wait()

    def _changed(self) -> None:
        self.room.set()
        self._left.set()
