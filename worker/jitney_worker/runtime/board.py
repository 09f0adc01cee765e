"""Everyone on board: from the admission of a job to its last event. Lives on the event loop."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from jitney.errors import JitneyError
from jitney.keys import BANDS, Band, Fence
from jitney.logs import logger
from jitney.queue import Credit, Delivery, Held, Queue
from jitney.retrying import retryable
from jitney_worker.engine.protocol import Capacity
from jitney_worker.runtime.aboard import Aboard
from jitney_worker.runtime.boarding import Boarding
from jitney_worker.runtime.bridge import Bridge, Fault, Halted, StepReport
from jitney_worker.runtime.choice import named
from jitney_worker.runtime.heartbeat import Leases
from jitney_worker.runtime.intake import Intake
from jitney_worker.runtime.log_writer import LogWriter
from jitney_worker.runtime.meters import Meters
from jitney_worker.runtime.pace import Backlog
from jitney_worker.runtime.publisher import Publisher
from jitney_worker.runtime.reports import DeadlinePassed, Reports
from jitney_worker.runtime.returns import Returns
from jitney_worker.runtime.roster import Roster
from jitney_worker.runtime.running import RunningJob
from jitney_worker.settings import WorkerSettings
from jitney_worker.text.rules import StopRules

LOOK_AGAIN_S = 0.05
NO_CREDIT: Final = Credit.of(0)
OVERDUE_INTERVALS = 2


@dataclass(frozen=True, slots=True)
class Neighbours:
    """What the board works with. is_stuck: the engine has had work and made no progress for too long."""

    queue: Queue
    intake: Intake
    publisher: Publisher
    bridge: Bridge
    leases: Leases
    roster: Roster
    stop_rules: StopRules
    meters: Meters
    is_stuck: Callable[[], bool]


class Board:
    """Jobs that this worker holds, by the fence of their claim. Every method runs on the event loop; none blocks it.

    room: set whenever more jobs might be taken than before. reports: the batch as the engine last showed it.
    """

    def __init__(self, settings: WorkerSettings, with_: Neighbours, capacity: Capacity, room: asyncio.Event) -> None:
        self._settings = settings
        self._with = with_
        self._max_num_seqs = capacity.free_seats
        self._claim_ahead = settings.worker.claim_ahead
        self._aboard = Aboard(with_.leases, with_.bridge, with_.stop_rules, self._has_left)
        self._returns = Returns(settings, with_.queue, self._aboard, with_.meters)
        self._logs = LogWriter(with_.publisher, self._aboard, self._returns)
        self._boarding = Boarding(
            with_.intake,
            with_.publisher,
            is_held=self.holds,
            admit=self._admit,
            leave=self._aboard.forget,
            settled=self._changed,
        )
        self._backlog = Backlog()
        self._overdue_at = 0.0
        self._alarm: asyncio.TimerHandle | None = None
        self._inbox: deque[DeadlinePassed] = deque()
        self._timers: dict[Fence, asyncio.TimerHandle] = {}
        self._log = logger(part="board", queue=with_.queue.name)
        self._news = asyncio.Event()
        self._left = asyncio.Event()
        self.room = room
        self.reports = Reports(self._aboard, with_.roster, with_.meters, capacity, room.set)

    def __len__(self) -> int:
        return len(self._aboard) + len(self._boarding)

    def holds(self, fence: Fence) -> bool:
        return self._with.leases.has(fence)

    # --- coming on board ---

    def credit(self) -> Credit:
        """How many jobs could be taken now. Bulk leaves all seats to others: the engine lets those on in its place."""
        if self._with.is_stuck():
            return NO_CREDIT  # whatever came would only wait here until its lease is over, and lose an attempt by it
        if self._settings.engine.policy == "static":
            return Credit.of(self._max_num_seqs) if len(self) == 0 else NO_CREDIT
        if self._boarding.has_suspect or any(job.is_suspect for job in self._aboard):
            return NO_CREDIT  # it may end this worker: nobody should be on board then who has not said anything yet
        interactive, standard, bulk = map(self._room_for, BANDS)
        return Credit(interactive, standard, bulk)

    def call(self, band: Band) -> None:
        """A job of this band has come. For one without room here every enqueue would cost each full worker a claim."""
        if getattr(self.credit(), band) > 0:
            self.room.set()

    def _room_for(self, band: Band) -> int:
        """Seats that jobs of this band could have, those claimed ahead included: all that more urgent ones leave."""
        capacity, rank = self.reports.capacity, BANDS.index(band)
        waiting = capacity.waiting_band
        if waiting is not None and waiting <= rank and capacity.free_seats > 0:
            return 0  # seats are free but blocks are not: one more would only wait here instead of there
        at_least = BANDS[: rank + 1]
        num_seats = sum(job.num_seats for job in self._aboard if job.band in at_least)
        num_seats += self._boarding.num_of(at_least)
        return max(0, self._max_num_seqs + self._claim_ahead - num_seats)

    def take(self, delivery: Delivery) -> None:
        """A delivery that the claimer got."""
        # A second claim of a job is the proof that the first one is over, whether we have heard of that or not.
        self.lose(held.fence for held in self._with.leases.held() if held.id == delivery.id)
        self._with.leases.take(Held(delivery.id, delivery.fence, delivery.band))
        self._with.meters.claimed(delivery)
        said = {"job": delivery.id, "band": delivery.band, "attempt": delivery.tries, "num_tokens": delivery.num_tokens}
        if delivery.is_reclaimed:
            self._log.info("job_taken_over", **said, strikes=delivery.strikes)
        else:
            self._log.debug("job_claimed", **said)
        self._boarding.begin(delivery)
        if delivery.time_left_ms is not None:
            self._expire_in(delivery.time_left_ms / 1_000, delivery.fence)

    async def _admit(self, job: RunningJob) -> None:
        job.submitted_at = time.monotonic()
        self._aboard.add(job)
        self._with.meters.boarded(job)
        if job.is_over:  # all was said in an earlier attempt; only the terminal event is missing
            await self._logs.write([job])
            return
        job.is_held_back = job.is_suspect
        if job.is_held_back:
            self._aboard.seat_suspects()
        else:
            self._aboard.seat(job)

    def _expire_in(self, seconds: float, fence: Fence) -> None:
        later = asyncio.get_running_loop().call_later
        self._timers[fence] = later(max(0.0, seconds), self._pass_deadline, fence)

    def _pass_deadline(self, fence: Fence) -> None:
        if self._aboard.get(fence) is not None:
            self._inbox.append(DeadlinePassed(fence))
            self._news.set()
        elif self.holds(fence):  # still being read in
            self._expire_in(LOOK_AGAIN_S, fence)

    # --- on the way ---

    def wake(self) -> None:
        """There are reports from the engine thread; `publish` takes them in."""
        self._news.set()

    async def publish(self) -> None:
        """For ever: take in all reports there are, write what is due, let the engine go on."""
        clock = asyncio.get_running_loop().time
        while True:
            await self._news.wait()
            self._news.clear()
            is_due = clock() >= self._overdue_at
            inbox, self._inbox = self._inbox, deque()
            for report in (*self._with.bridge.collect(), *inbox):  # what was computed before a deadline counts
                self._backlog.add(self.reports.absorb(report), isinstance(report, StepReport | Fault | Halted))
                is_due = is_due or (isinstance(report, StepReport) and report.is_due)
                if isinstance(report, Fault):
                    await self._logs.write(self._backlog.everybody())  # whoever is over by now has no part in it
                    await self._after_fault(report.error)
            await self._logs.write(self._backlog.everybody() if is_due else self._backlog.urgent())
            self._aboard.seat_suspects()
            self._with.bridge.published(self._backlog.take_steps())
            if is_due:
                self._overdue_at = clock() + OVERDUE_INTERVALS * self._settings.worker.publish_interval_s
            self._set_alarm()

    def _set_alarm(self) -> None:
        """Soon, though no step ends: a long one must not hold back what the others before it gave."""
        if self._alarm is None and len(self._aboard) and self._settings.worker.publish_interval_s:
            self._alarm = asyncio.get_running_loop().call_at(self._overdue_at, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        self._news.set()

    # --- leaving ---

    def cancel(self, fence: Fence) -> None:
        """The claim is void, because the job was cancelled."""
        job = self._aboard.get(fence)
        self._with.meters.left(fence, "cancelled")
        job_id = self._aboard.forget(fence)
        if job_id is not None:
            self._log.info("job_cancelled", job=job_id)
        if job is not None and not job.is_held_back:
            self._with.meters.cancel_passed_on()

    def lose(self, fences: Iterable[Fence]) -> None:
        """Jobs that another claim owns, or that have been ended from outside: dropped without a word."""
        self._aboard.lose(fences)

    async def _after_fault(self, error: Exception) -> None:
        """A step raised. An error that lasts ends the job that met it alone; shared by several it accuses nobody."""
        jobs = self._in_engine()
        if retryable(error) or len(jobs) > 1:
            await self._returns.retry(jobs, as_ours(error))
        else:
            await self._logs.bury(jobs, as_ours(error))

    def _in_engine(self) -> list[RunningJob]:
        """Those that may have met what befell the engine."""
        return [job for job in self._aboard if not job.is_held_back]

    async def retry_all(self, error: JitneyError) -> None:
        """After a fault of ours that leaves nothing to go on with: a peer may have them now."""
        await self._boarding.stop()
        await self._returns.retry_now(self._in_engine(), error)
        await self.release_all()

    async def release_all(self) -> None:
        """Hand back all there are, those that are still being read in too."""
        await self._boarding.stop()
        await self._returns.release(self._with.leases.held())

    def unseated(self) -> list[RunningJob]:
        """Jobs claimed ahead that had no seat for a while when the engine last showed its seats.

        Judged by what the engine showed, not by the clock alone: a long first step shows nothing yet.
        """
        return [job for job in self._aboard if not job.is_seated and job.submitted_at < self._oldest]

    @property
    def _oldest(self) -> float:
        """Whoever came on board before has waited for long enough."""
        return self.reports.snapshot_at - self._settings.worker.claim_ahead_patience_s

    def in_the_way(self) -> list[RunningJob]:
        """Of those on board with a suspect, who has neither said anything nor has a seat, the suspect included.

        Until it has spoken nothing is claimed, and it is let in when all others have: behind seats full of bulk that
        may be minutes, in which nobody would be let on in bulk's place.
        """
        snapshot = self.reports.snapshot
        if snapshot is None or not any(job.is_suspect for job in self._aboard):
            return []
        seated = {named(seat.id).fence for seat in snapshot.seats}
        return [
            job
            for job in self._aboard
            if not (job.has_progressed or job.is_held_back or job.fence in seated) and job.submitted_at < self._oldest
        ]

    async def release_unseated(self, jobs: list[RunningJob]) -> None:
        """Hand them back, and claim none ahead until a seat frees: they would only come and go."""
        self._claim_ahead = 0
        await self._returns.release(Held(job.id, job.fence, job.delivery.band) for job in jobs)

    async def until_empty(self) -> None:
        while len(self):
            self._left.clear()
            await self._left.wait()

    def _has_left(self, fence: Fence, job: RunningJob | None) -> None:
        timer = self._timers.pop(fence, None)
        if timer is not None:
            timer.cancel()  # a deadline may be days away: one would be kept for every job of that time
        self._with.meters.left(fence, "lost")  # unless it has left in another way before
        if job is not None and job.is_seated:
            self._claim_ahead = self._settings.worker.claim_ahead
        self._news.set()  # a suspect may have waited for this one to leave
        self._changed()

    def _changed(self) -> None:
        self.room.set()
        self._left.set()


def as_ours(error: Exception) -> JitneyError:
    return error if isinstance(error, JitneyError) else JitneyError(f"a step failed: {type(error).__name__}: {error}")
