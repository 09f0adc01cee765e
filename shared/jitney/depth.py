"""How much waits in a queue, and for how long, as Redis has it at this moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from jitney.calls import slices
from jitney.connection import Redis
from jitney.keys import BANDS, Band, Keys
from jitney.metrics.readings import Readings
from jitney.queue import Queue
from jitney.workers import WorkerView

SLICE: Final = 512
"""Tenants that are asked about in one round trip: two commands each, all of them short."""

WORKER_STATES: Final = ("ready", "draining", "stuck")


async def read_queue(redis: Redis, name: str, workers: Sequence[WorkerView], now: float) -> Readings:
    """What the table says of a queue. workers: those that are alive. now: the server's time. Raises what Redis raises.

    Costs two short commands for each tenant that has anything waiting, and some for the queue; two round trips where
    nobody waits, because there may be a thousand queues.
    """
    readings = Readings()
    tenants = await _read_places(redis, name, now, readings)
    for band in BANDS:
        num_jobs, oldest = await _waiting(redis, Keys(name), band, tenants[band])
        readings.set("jitney_queue_lag", num_jobs, band)
        readings.set("jitney_queue_oldest_seconds", 0.0 if oldest is None else max(0.0, now - oldest), band)
    backlog = await Queue(redis, name).backlog()
    readings.set("jitney_queue_tokens", backlog.num_tokens)
    readings.set("jitney_queue_drain_seconds", backlog.drain_s)
    states = Counter(view.state for view in workers)
    for state in WORKER_STATES:
        readings.set("jitney_workers", states[state], state)
    return readings


async def _read_places(redis: Redis, name: str, now: float, readings: Readings) -> dict[Band, list[bytes]]:
    """How many jobs are in each place but the tenants' streams, and of each band the tenants that have one."""
    keys = Keys(name)
    pipe = redis.pipeline(transaction=False)
    pipe.zcard(keys.later)
    pipe.xlen(keys.dead)
    for band in BANDS:
        # In milliseconds. One that lies behind waits to be claimed, whether it was given back or ran out.
        pipe.zcount(keys.leases(band), now * 1_000, "+inf")
        pipe.zcount(keys.leases(band), "-inf", f"({now * 1_000}")
    for band in BANDS:
        pipe.zrange(keys.fair(band), 0, -1)
    num_later, num_dead, *answers = await pipe.execute()
    leases, tenants = answers[: 2 * len(BANDS)], answers[2 * len(BANDS) :]
    readings.set("jitney_queue_later", num_later)
    readings.set("jitney_dead_letters", num_dead)
    for number, band in enumerate(BANDS):
        readings.set("jitney_queue_running", leases[2 * number], band)
        readings.set("jitney_queue_returned", leases[2 * number + 1], band)
    return dict(zip(BANDS, tenants, strict=True))


async def _waiting(redis: Redis, keys: Keys, band: Band, tenants: Sequence[bytes]) -> tuple[int, float | None]:
    """Jobs in the tenants' streams of a band, and the Unix time of the oldest: an entry's id begins with it."""
    num_jobs, oldest = 0, list[float]()
    for part in slices(tenants, SLICE):
        pipe = redis.pipeline(transaction=False)
        for tenant in part:
            stream = keys.jobs(band, tenant.decode("utf-8", "replace"))
            pipe.xlen(stream)
            pipe.xrange(stream, count=1)
        answers = await pipe.execute(raise_on_error=False)
        for length, first in zip(answers[::2], answers[1::2], strict=True):
            if isinstance(length, Exception) or isinstance(first, Exception):
                continue  # somebody has put something else there; `claim` will see to it
            num_jobs += length
            oldest += [int(bytes(entry[0]).partition(b"-")[0]) / 1_000 for entry in first]
    return num_jobs, min(oldest, default=None)
