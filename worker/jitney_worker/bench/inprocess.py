"""Run a workload on an engine in this process: no Redis, no text, no client. Jobs join when they arrive."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from jitney.errors import ModelError
from jitney_worker.bench.profile import StepProfile
from jitney_worker.bench.quiet import other_cores, reading
from jitney_worker.bench.rides import AfterEach, Ride, Run, await_memory, peak_rss_mb, unwatched
from jitney_worker.bench.workloads import BenchJob, Workload
from jitney_worker.engine.engine import LocalEngine
from jitney_worker.engine.protocol import Engine
from jitney_worker.engine.sequence import SequenceId, SequenceParams, SequenceRequest

_arrivals = count()
"""Numbers of sequences: unique for as long as the process lives, so that no state of one is taken for another's."""


@dataclass(slots=True)
class _Rider:
    """A job on its way."""

    enqueued_at: float
    token_times: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    ended_at: float = 0.0

    def ride(self) -> Ride:
        return Ride(self.enqueued_at, tuple(self.token_times), self.ended_at, tuple(self.token_ids))


def measure_engine(
    engine: LocalEngine,
    workload: Workload,
    features: Mapping[str, Any],
    *,
    profiled: bool = False,
    after_each: AfterEach = unwatched,
) -> Run:
    """Warm up, prime, run (the best of `repeats`). Raises what the engine raises for a job that cannot run here."""
    await_memory()
    ride_engine(engine, workload.warm)
    ride_engine(engine, workload.prime)
    profile = StepProfile(engine) if profiled else None
    runs = [_timed(engine, workload.jobs, features, profile, after_each) for _ in range(workload.repeats)]
    return min(runs, key=lambda run: run.wall_s)


def _timed(
    engine: LocalEngine,
    jobs: Sequence[BenchJob],
    features: Mapping[str, Any],
    profile: StepProfile | None,
    after_each: AfterEach,
) -> Run:
    if profile is not None:
        profile.reset()
    num_preemptions, before, start = engine.snapshot().num_preemptions, reading(), time.monotonic()
    rides = ride_engine(engine, jobs, after_each=after_each)
    wall_s, after = time.monotonic() - start, reading()
    return Run(
        rides,
        wall_s,
        load_cpu_s=0.0,
        num_preemptions=engine.snapshot().num_preemptions - num_preemptions,
        peak_rss_mb=peak_rss_mb(),
        features=features,
        other_cores=other_cores(before, after),
        profile=None if profile is None else profile.report(wall_s),
    )


def ride_engine(
    engine: Engine,
    jobs: Sequence[BenchJob],
    *,
    after_step: Callable[[], None] | None = None,
    after_each: AfterEach = unwatched,
) -> tuple[Ride, ...]:
    """Step until all jobs have ended; their rides, in the order of `jobs`. after_step: called after each step.

    A job joins at the first step after its time has come; with nobody aboard the engine waits for the next one.
    Raises ModelError if a sequence fails.
    """
    start = time.monotonic()
    riders = [_Rider(start + job.arrives_at_s) for job in jobs]
    aboard: dict[SequenceId, _Rider] = {}
    coming = iter(sorted(zip(jobs, riders, strict=True), key=lambda pair: pair[0].arrives_at_s))
    following = next(coming, None)
    while following is not None or engine.has_work():
        while following is not None and following[1].enqueued_at <= time.monotonic():
            aboard[_add(engine, following[0])] = following[1]
            following = next(coming, None)
        if following is not None and not engine.has_work():
            time.sleep(max(0.0, following[1].enqueued_at - time.monotonic()))
            continue
        _step(engine, aboard, after_each)
        if after_step is not None:
            after_step()
    return tuple(rider.ride() for rider in riders)


def _step(engine: Engine, aboard: dict[SequenceId, _Rider], after_each: AfterEach) -> None:
    deltas = engine.step()
    now = time.monotonic()
    for delta in deltas:
        rider = aboard[delta.id]
        rider.token_times += [now] * len(delta.token_ids)
        rider.token_ids += delta.token_ids
        if delta.error is not None:
            raise ModelError(f"sequence {delta.id} failed: {delta.error.message}")
        if delta.finish_reason is not None:
            rider.ended_at = now
            del aboard[delta.id]
            after_each()


def _add(engine: Engine, job: BenchJob) -> SequenceId:
    number = next(_arrivals)
    params = SequenceParams(
        job.max_tokens,
        temperature=job.temperature,
        top_p=job.top_p,
        seed=number if job.seed is None else job.seed,
    )
    sequence_id = SequenceId(f"bench{number}/0")
    engine.add(SequenceRequest(sequence_id, job.prompt, params, (0, 0.0, 0, number)))
    return sequence_id


def num_tokens_needed(jobs: Sequence[BenchJob]) -> int:
    """Tokens that a run computes at the least. The last one of each job is sampled and never computed."""
    return sum(len(job.prompt) + job.max_tokens - 1 for job in jobs)


def lengths(jobs: Sequence[BenchJob]) -> Iterator[int]:
    """Slots of the cache that each job fills at its end."""
    return (len(job.prompt) + job.max_tokens - 1 for job in jobs)
