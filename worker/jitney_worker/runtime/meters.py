"""What happens on a worker, counted. On the event loop; the numbers may be read from any thread.

Tokens are counted where Redis took them, so that the counters say what the jobs' usage says: what was computed for a
job that had another owner by then, or was cancelled, is in nobody's usage and in no counter but `computed_tokens`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final, Literal

from jitney.keys import Fence
from jitney.metrics.readings import Readings
from jitney.queue import Append, Delivery, Ending
from jitney_worker.engine.protocol import Capacity, EngineSnapshot, SequenceDelta
from jitney_worker.runtime.bridge import StepReport
from jitney_worker.runtime.choice import Choice
from jitney_worker.runtime.rides import Ride
from jitney_worker.runtime.running import RunningJob
from jitney_worker.runtime.server_time import ServerTime

STEPS_REMEMBERED: Final = 4_096
"""To tell when a sequence joined. A prompt that took more steps than that is said to have taken so many."""

RIDES_REMEMBERED: Final = 512
"""Of those that are over: more than can have a write on its way."""

Departure = Literal["lost", "cancelled", "retried", "released"]
"""How a job leaves other than by an end that this worker wrote."""


class Meters:
    """Counts since the start of the worker. clock: the server's, for times that began elsewhere.

    on_left: is told of every ride that is over, and how.
    """

    def __init__(
        self, clock: ServerTime, *, looks_up_prefixes: bool, on_left: Callable[[Ride, str], None] | None = None
    ) -> None:
        self.readings = Readings()
        self._on_left = on_left
        self._clock = clock
        self._looks_up_prefixes = looks_up_prefixes
        self._rides: dict[Fence, Ride] = {}
        self._gone: dict[Fence, Ride] = {}
        self._cancels: list[float] = []
        self._steps_began: deque[float] = deque(maxlen=STEPS_REMEMBERED)
        self._last_gain_at = 0.0
        self._num_steady = 0
        self._step_tokens = self.readings.histogram("jitney_iteration_tokens_total")
        self._step_seconds = self.readings.histogram("jitney_step_seconds")
        self._gaps = self.readings.histogram("jitney_inter_token_latency_seconds")

    # --- the engine's steps ---

    def stepped(self, report: StepReport) -> None:
        """Before its deltas."""
        if report.num_tokens:
            self._steps_began.append(report.began_at)
            self._step_tokens.observe(report.num_tokens)
            self._step_seconds.observe(report.at - report.began_at)
        if self._cancels:
            self._free_seats(report.boundary_at)

    def gained(self, job: RunningJob, choice: Choice, delta: SequenceDelta, at: float) -> None:
        """A sequence's tokens, computed at that moment. Most follow those of the step before: counted together."""
        if delta.token_ids:
            last, choice.gained_at = choice.gained_at, at
            if last == self._last_gain_at and last:
                self._num_steady += 1
                return
            if last:
                self._gaps.observe(at - last)
                return
        self._begin(job, choice, delta, at)

    def after_step(self, report: StepReport) -> None:
        """After its deltas."""
        if self._num_steady:
            self._gaps.observe(report.at - self._last_gain_at, self._num_steady)
            self._num_steady = 0
        if report.deltas:
            self._last_gain_at = report.at

    def _begin(self, job: RunningJob, choice: Choice, delta: SequenceDelta, at: float) -> None:
        """The first that is heard of a sequence."""
        ride = self._rides.get(job.fence)
        if ride is None or delta.error is not None or not delta.joined_step:
            return
        if self._looks_up_prefixes:
            self.readings.add("jitney_prefix_cache_queries_total", by=len(job.prompt_ids))
            self.readings.add("jitney_prefix_cache_hits_total", by=delta.num_cached_tokens)
        if ride.first_token_at is not None:
            return
        joined_at = self._step_began(delta.step - delta.joined_step, at)
        ride.joined_at, ride.first_token_at = joined_at, at
        self.readings.observe("jitney_request_prefill_time_seconds", at - joined_at)
        if ride.is_first_claim:
            waited_s = max(0.0, self._clock.at(joined_at) - ride.asked_at)
            self.readings.observe("jitney_request_queue_time_seconds", waited_s)

    def _step_began(self, num_steps_ago: int, otherwise: float) -> float:
        """When the step began that came so many before the last one."""
        steps = self._steps_began
        return steps[max(0, len(steps) - 1 - num_steps_ago)] if steps else otherwise

    def _free_seats(self, boundary_at: float) -> None:
        """Who was told to go before the engine last listened is gone since then."""
        for heard_at in [heard_at for heard_at in self._cancels if heard_at <= boundary_at]:
            self._cancels.remove(heard_at)
            self.readings.observe("jitney_cancel_latency_seconds", boundary_at - heard_at)

    def step_failed(self) -> None:
        self.readings.add("jitney_step_failures_total")

    # --- jobs coming and going ---

    def claimed(self, delivery: Delivery) -> None:
        self._rides[delivery.fence] = Ride(delivery, time.monotonic(), delivery.num_tokens)
        self.readings.add("jitney_jobs_claimed_total")
        if delivery.tries > 1:
            self.readings.add("jitney_redelivered_total")
        if delivery.is_reclaimed:
            self.readings.add("jitney_leases_reclaimed_total")

    def boarded(self, job: RunningJob) -> None:
        ride = self._rides.get(job.fence)
        if ride is not None:
            ride.job = job
            self.readings.add("jitney_resumed_tokens_total", by=job.num_tokens)

    def cancel_passed_on(self) -> None:
        """The engine was told just now that a seat is to be free; it listens at its next boundary."""
        self._cancels.append(time.monotonic())

    def left(self, fence: Fence, how: Departure) -> None:
        """Once for each claim: what comes later of it is no news."""
        self._end_ride(fence, how)

    def _end_ride(self, fence: Fence, how: str) -> None:
        ride = self._rides.pop(fence, None)
        if ride is not None:
            self.readings.add("jitney_jobs_left_total", how)
            self._remember(fence, ride)
            if self._on_left is not None:
                self._on_left(ride, how)

    def _remember(self, fence: Fence, ride: Ride) -> None:
        """A cancel may be heard before the reply to an append that came before it: its tokens are in the usage."""
        self._gone[fence] = ride
        if len(self._gone) > RIDES_REMEMBERED:
            del self._gone[next(iter(self._gone))]

    def buried(self) -> None:
        self.readings.add("jitney_dead_total")

    # --- Redis ---

    def called(self, call: Literal["append", "finish"], seconds: float) -> None:
        self.readings.observe("jitney_redis_step_seconds", seconds, call)

    def call_failed(self, call: Literal["append", "finish"]) -> None:
        self.readings.add("jitney_redis_failures_total", call)

    def refused(self) -> None:
        """A write, because another claim owns the job or it has ended."""
        self.readings.add("jitney_fenced_writes_total")

    def wrote(self, write: Append | Ending) -> None:
        """Redis has taken it. What gives a log its lost end back was counted when it was written first."""
        ride = self._rides.get(write.fence) or self._gone.get(write.fence)
        if ride is None:
            return
        self._count_tokens(ride, write)
        if isinstance(write, Ending) and write.fence in self._rides:
            self._end(ride, write)

    def _count_tokens(self, ride: Ride, write: Append | Ending) -> None:
        readings = self.readings
        if write.num_tokens > ride.num_tokens:
            readings.add("jitney_generation_tokens_total", by=write.num_tokens - ride.num_tokens)
            ride.num_tokens = write.num_tokens
        if write.num_prompt_tokens is not None and not ride.prompt_is_counted:
            ride.prompt_is_counted = True
            readings.add("jitney_prompt_tokens_total", by=write.num_prompt_tokens)
        if not ride.is_written and ride.first_token_at is not None:
            ride.is_written = True
            if ride.is_first_claim:
                waited_s = max(0.0, self._clock.now() - ride.asked_at)
                readings.observe("jitney_time_to_first_token_seconds", waited_s)

    def _end(self, ride: Ride, ending: Ending) -> None:
        self._end_ride(ending.fence, ending.reason)
        if ending.dead_reason is not None:
            self.buried()
        if ending.reason == "finished" and ride.job is not None:
            self._finish(ride, ride.job)

    def _finish(self, ride: Ride, job: RunningJob) -> None:
        readings = self.readings
        for choice in job.choices:
            readings.add("jitney_request_success_total", str(choice.finish_reason))
        readings.observe("jitney_request_prompt_tokens", len(job.prompt_ids))
        readings.observe("jitney_request_generation_tokens", job.num_tokens)
        now = time.monotonic()
        readings.observe("jitney_e2e_request_latency_seconds", max(0.0, self._clock.at(now) - ride.asked_at))
        if ride.delivery.time_left_ms is not None:
            left_s = ride.claimed_at + ride.delivery.time_left_ms / 1_000 - now
            readings.observe("jitney_deadline_margin_seconds", max(0.0, left_s))
        last_at = ride.last_token_at
        if ride.joined_at is not None and ride.first_token_at is not None and last_at is not None:
            readings.observe("jitney_request_inference_time_seconds", last_at - ride.joined_at)
            readings.observe("jitney_request_decode_time_seconds", last_at - ride.first_token_at)

    # --- to be shown ---

    def read(self, snapshot: EngineSnapshot | None, capacity: Capacity, max_num_seqs: int) -> Readings:
        """All of it, with the batch as the engine last showed it."""
        readings = self.readings
        readings.set("jitney_num_requests_running", capacity.num_running)
        readings.set("jitney_num_requests_waiting", capacity.num_waiting)
        readings.set("jitney_max_num_seqs", max_num_seqs)
        used = capacity.num_blocks - capacity.num_free_blocks
        readings.set("jitney_kv_cache_usage_perc", used / max(1, capacity.num_blocks))
        if snapshot is not None:
            readings.set("jitney_num_preemptions_total", snapshot.num_preemptions)
            readings.set("jitney_computed_tokens_total", snapshot.num_computed_tokens)
        return readings
