"""Streams that are open together: what each of them heard, and what that cost the process that served them."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ops.bench.kept_bytes import rss_mb
from ops.bench.streams_reader import Heard, come_back, listen
from ops.bench.streams_stage import Stage
from ops.bench.streams_worker import Script

from jitney.errors import ServerError
from jitney.keys import Keys

PATIENCE_S = 120.0
"""Beyond the time that the scripts themselves take; no machine is so slow."""


@dataclass
class Wave:
    """What was measured.

    memory_mb: of the server's process before the first stream, with all open, at the end of the last, and after;
    cpu_us: its CPU time of one event, between the moment when all were open and the end.
    """

    num_readers: int
    num_open_at_once: int
    num_events: int
    memory_mb: tuple[float, float, float, float]
    cpu_us: float
    num_slow: int = 0
    num_cut: int = 0


class Audience:
    """Readers of one stage, counted. all_open: set once each has heard something."""

    def __init__(self, place: Stage, scripts: Sequence[Script]) -> None:
        self.place = place
        self.readers = [Heard(script) for script in scripts]
        self.all_open = asyncio.Event()
        self.num_open = self.num_told = 0
        self._silent = len(scripts)

    async def hear(self, one: Heard, until: asyncio.Event | None = None) -> None:
        """One reader, to the end of its connection. until: as in `listen`."""

        def told() -> None:
            self.num_told += 1
            if one.num_told == 1:
                self._silent -= 1
                self.num_open += 1
            if not self._silent:
                self.all_open.set()

        try:
            await listen(self.place.port, one, self.place.queue, on_event=told, until=until)
        finally:
            self.num_open -= 1


async def wave(place: Stage, asked: argparse.Namespace, *, num_slow: int = 0) -> Wave:
    """All readers at once, the last `num_slow` of which take nothing after their first event until all else is over.

    Raises ServerError if a reader has not heard its own answer, whole, once and in order, or a slow one was not cut.
    """
    audience = Audience(place, scripts_of(asked, num_slow))
    quick, slow = audience.readers[: asked.readers - num_slow], audience.readers[asked.readers - num_slow :]
    before, over = rss_mb(place.pid), asyncio.Event()
    async with in_time(asked.events * asked.every_s + PATIENCE_S), asyncio.TaskGroup() as tasks:
        reading = [tasks.create_task(audience.hear(one)) for one in quick]
        for one in slow:
            tasks.create_task(audience.hear(one, over))
        await audience.all_open.wait()
        at_once, told, cpu, at_open = audience.num_open, audience.num_told, cpu_s(place.pid), rss_mb(place.pid)
        await asyncio.wait(reading)
        told, cpu, at_end = audience.num_told - told, cpu_s(place.pid) - cpu, rss_mb(place.pid)
        await nobody_listens(place, slow)
        over.set()
    cut = [one for one in slow if one.was_cut]
    async with in_time(PATIENCE_S), asyncio.TaskGroup() as tasks:
        for one in cut:
            tasks.create_task(come_back(place.port, one))
    check(audience.readers, num_slow - len(cut))
    memory = (before, at_open, at_end, rss_mb(place.pid))
    return Wave(asked.readers, at_once, told, memory, cpu / max(told, 1) * 1e6, num_slow, len(cut))


@contextlib.asynccontextmanager
async def in_time(limit_s: float) -> AsyncIterator[None]:
    """Around a group of tasks: the first thing that went wrong in it, by itself. Raises ServerError when it is late."""
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError:
        raise ServerError(f"the streams were not over after {limit_s:g} s") from None
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


def scripts_of(asked: argparse.Namespace, num_slow: int) -> list[Script]:
    """A text of its own for each, which no earlier wave had; long ones, last, for the slow."""
    name, first_slow = secrets.token_hex(3), asked.readers - num_slow
    return [
        Script(f"{name}-{number}", asked.events, asked.every_s, asked.padding if number >= first_slow else 0)
        for number in range(asked.readers)
    ]


def check(readers: Sequence[Heard], num_not_cut: int) -> None:
    """Raises ServerError for what no reader may meet."""
    wrong = [words for one in readers if (words := one.complaint()) is not None]
    if wrong:
        raise ServerError(f"{len(wrong)} of {len(readers)} readers did not hear their answer: {'; '.join(wrong[:3])}")
    if num_not_cut:
        raise ServerError(f"{num_not_cut} readers that took nothing were not cut off: their texts are too short for it")


async def nobody_listens(place: Stage, readers: Sequence[Heard]) -> None:
    """Until the API has given all of them up."""
    channels = [Keys(place.queue).tokens(one.job_id) for one in readers]
    if not channels:
        return
    assert place.redis is not None
    while any(number for _, number in await place.redis.pubsub_numsub(*channels)):
        pass  # asking is what takes the time


def cpu_s(pid: int) -> float:
    """Seconds of CPU that a process has used."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
