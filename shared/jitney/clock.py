"""Is the server's clock the same as ours, does it run evenly, and how far away is it? Pure, but for taking samples."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Final

from jitney.checks import Finding
from jitney.connection import Redis

NUM_SAMPLES: Final = 6
PAUSE_S: Final = 0.2
MAX_OFFSET_S: Final = 1.0
MAX_JUMP_S: Final = 0.1
MAX_ROUND_TRIP_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class Sample:
    """One question for the time. server and local: Unix seconds; steady: a clock that nobody sets.

    All are of the middle of the question; round_trip_s is how long it took.
    """

    server: float
    local: float
    steady: float
    round_trip_s: float


async def take_samples(redis: Redis) -> list[Sample]:
    """NUM_SAMPLES, PAUSE_S apart. Raises what Redis raises."""
    samples: list[Sample] = []
    while True:
        local, began = time.time(), time.monotonic()
        seconds, microseconds = await redis.time()
        half_s = (time.monotonic() - began) / 2
        samples.append(Sample(seconds + microseconds / 1e6, local + half_s, began + half_s, 2 * half_s))
        if len(samples) == NUM_SAMPLES:
            return samples
        await asyncio.sleep(PAUSE_S)


def check_clock(samples: Sequence[Sample]) -> Finding:
    """Leases and expiries follow the server's clock alone; a client's deadline or not_before is by the client's."""
    for first, second in pairwise(samples):
        passed_s, doubt_s = second.steady - first.steady, (first.round_trip_s + second.round_trip_s) / 2
        for whose, moved_s in (
            ("the server's", second.server - first.server),
            ("this machine's", second.local - first.local),
        ):
            if abs(moved_s - passed_s) > MAX_JUMP_S + doubt_s:
                found = f"{whose} clock jumped by {moved_s - passed_s:+.1f} s while it was watched"
                return Finding("clock", "warn", found, "let it be slewed, not set: leases and results end by it")
    offset_s = median(sample.server - sample.local for sample in samples)
    if abs(offset_s) > MAX_OFFSET_S:
        found = f"the server's is {offset_s:+.1f} s against this machine's"
        return Finding("clock", "warn", found, "synchronise both, or deadlines and delays given as times will be off")
    watched_s = samples[-1].steady - samples[0].steady
    return Finding("clock", "ok", f"{offset_s * 1e3:+.0f} ms against this machine's, even for {watched_s:.1f} s")


def check_latency(samples: Sequence[Sample]) -> Finding:
    round_trip_s = median(sample.round_trip_s for sample in samples)
    found = f"{round_trip_s * 1e3:.1f} ms for a round trip"
    if round_trip_s > MAX_ROUND_TRIP_S:
        advice = "bring workers and server nearer to each other: a worker that is ahead of its server has to wait"
        return Finding("latency", "warn", found, advice)
    return Finding("latency", "ok", found)
