"""Run a workload through the whole path: client, Redis, worker, and back over the job's channel."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path

from jitney import AsyncClient
from jitney.connection import connect
from jitney.errors import ServerError
from jitney.workers import WorkerView, list_workers, unix_now
from jitney_worker.bench.quiet import other_cores, reading
from jitney_worker.bench.rides import AfterEach, Ride, Run, await_memory, peak_rss_mb, unwatched
from jitney_worker.bench.workloads import BenchJob, Workload

SETTLING_S = 3.0
"""How long to wait for the worker's last word; without it the counters may be half a second old."""


async def measure(redis_url: str, queue: str, workload: Workload, after_each: AfterEach = unwatched) -> Run:
    """Warm up, prime, run (the best of `repeats`)."""
    async with AsyncClient(redis_url, queue=queue) as client:
        await _ride_all(client, workload.warm)
        worker = await _worker(redis_url, queue)
        if _is_ours(worker.pid):
            await asyncio.to_thread(await_memory, worker.pid)
        if workload.prime:
            await _ride_all(client, workload.prime)
        runs = [await _timed(client, redis_url, queue, workload, after_each) for _ in range(workload.repeats)]
    return min(runs, key=lambda run: run.wall_s)


async def _timed(client: AsyncClient, redis_url: str, queue: str, workload: Workload, after_each: AfterEach) -> Run:
    before = await _worker(redis_url, queue)
    cpu, quiet_before, start = time.process_time(), reading(), time.monotonic()
    rides = await _ride_all(client, workload.jobs, after_each)
    wall_s, load_cpu_s, quiet_after = time.monotonic() - start, time.process_time() - cpu, reading()
    after = await _settled(redis_url, queue)
    return Run(
        rides,
        wall_s,
        load_cpu_s,
        num_preemptions=after.num_preemptions - before.num_preemptions,
        peak_rss_mb=peak_rss_mb(after.pid),
        features=after.features,
        other_cores=other_cores(quiet_before, quiet_after) if _is_ours(after.pid) else None,
    )


async def _settled(redis_url: str, queue: str) -> WorkerView:
    """The worker's word after its last job: it speaks twice a second, so the newest one may be from before."""
    ended_at, deadline = unix_now(), time.monotonic() + SETTLING_S
    while True:
        view = await _worker(redis_url, queue)
        if (view.written_at > ended_at and not view.num_running) or time.monotonic() > deadline:
            return view
        await asyncio.sleep(SETTLING_S / 100)


def _is_ours(pid: int) -> bool:
    """True for a worker that descends from this process: of another one we cannot tell whether it disturbs."""
    while pid > 1:
        if pid == os.getpid():
            return True
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return False
    return False


async def _ride_all(
    client: AsyncClient, jobs: Sequence[BenchJob], after_each: AfterEach = unwatched
) -> tuple[Ride, ...]:
    start = time.monotonic()
    return tuple(await asyncio.gather(*(_ride(client, job, start, after_each) for job in jobs)))


async def _ride(client: AsyncClient, job: BenchJob, start: float, after_each: AfterEach) -> Ride:
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
    ended_at = time.monotonic()
    after_each()
    return Ride(enqueued_at, tuple(token_times), ended_at, tuple(token_ids))


async def _worker(redis_url: str, queue: str) -> WorkerView:
    redis = connect(redis_url, name="jitney-bench")
    try:
        workers = await list_workers(redis, queue)
    finally:
        await redis.aclose()
    if not workers:
        raise ServerError(f"no worker serves queue {queue}: start one, or leave --redis-url out")
    return workers[0]
