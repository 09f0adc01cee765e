"""Run a workload through the whole path: client, Redis, worker, and back over the job's channel."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jitney import AsyncClient
from jitney.connection import connect
from jitney.errors import ServerError
from jitney.workers import WorkerView, list_workers
from jitney_worker.bench.workloads import BenchJob, Workload


@dataclass(frozen=True, slots=True)
class Ride:
    """One job as its client saw it. Times are seconds on one monotonic clock."""

    enqueued_at: float
    token_times: tuple[float, ...]
    ended_at: float
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """One timed run. load_cpu_s: CPU seconds that this process, the load generator, used meanwhile."""

    rides: tuple[Ride, ...]
    wall_s: float
    load_cpu_s: float
    num_preemptions: int
    peak_rss_mb: float
    features: dict[str, object]


async def measure(redis_url: str, queue: str, workload: Workload) -> Run:
    """Warm up, prime, run (the best of `repeats`)."""
    async with AsyncClient(redis_url, queue=queue) as client:
        await _ride_all(client, workload.warm)
        if workload.prime:
            await _ride_all(client, workload.prime)
        runs = [await _timed(client, redis_url, queue, workload) for _ in range(workload.repeats)]
    return min(runs, key=lambda run: run.wall_s)


async def _timed(client: AsyncClient, redis_url: str, queue: str, workload: Workload) -> Run:
    before = await _worker(redis_url, queue)
    cpu, start = time.process_time(), time.monotonic()
    rides = await _ride_all(client, workload.jobs)
    wall_s, load_cpu_s = time.monotonic() - start, time.process_time() - cpu
    after = await _worker(redis_url, queue)
    num_preemptions = after.num_preemptions - before.num_preemptions
    return Run(rides, wall_s, load_cpu_s, num_preemptions, peak_rss_mb(after.pid), after.features)


async def _ride_all(client: AsyncClient, jobs: Sequence[BenchJob]) -> tuple[Ride, ...]:
    start = time.monotonic()
    return tuple(await asyncio.gather(*(_ride(client, job, start) for job in jobs)))


async def _ride(client: AsyncClient, job: BenchJob, start: float) -> Ride:
    await asyncio.sleep(max(0.0, start + job.arrives_at_s - time.monotonic()))
    enqueued_at = time.monotonic()
    sent = await client.enqueue(
        prompt=list(job.prompt),
        max_tokens=job.max_tokens,
        temperature=job.temperature,
        top_p=job.top_p,
        seed=job.seed,
        ignore_eos=True,
    )
    token_times: list[float] = []
    token_ids: list[int] = []
    async for event in sent.stream():
        token_times += [time.monotonic()] * len(event.token_ids)
        token_ids += event.token_ids
        if event.is_terminal and event.type != "finished":
            raise ServerError(f"job {sent.id} ended with {event.type}: {event.error}")
    return Ride(enqueued_at, tuple(token_times), time.monotonic(), tuple(token_ids))


async def _worker(redis_url: str, queue: str) -> WorkerView:
    redis = connect(redis_url, name="jitney-bench")
    try:
        workers = await list_workers(redis, queue)
    finally:
        await redis.aclose()
    if not workers:
        raise ServerError(f"no worker serves queue {queue}: start one, or leave --redis-url out")
    return workers[0]


def peak_rss_mb(pid: int) -> float:
    """The highest resident memory of a program on this machine, in MB; 0 where /proc does not say."""
    status = Path(f"/proc/{pid}/status")
    if not status.exists():
        return 0.0
    for line in status.read_text().splitlines():
        if line.startswith("VmHWM:"):
            return round(int(line.split()[1]) / 1_000, 1)
    return 0.0
