"""Tokens per second of one worker: its engine alone, the whole path, and the path with nothing that makes it safe.

    alone   the engine in this process: no Redis, no text, no clients
    bare    jobs in a list, events by PUBLISH alone: no lease, no fence, no log (bare.py)
    path    what jitney does

The same engine settings and the same jobs; the three take turns, so that all of them meet the same machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import signal
import statistics
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ops.bench import page
from ops.bench.bare import submit
from ops.bench.path_worker import IDLE, crew, settings

from jitney import AsyncClient
from jitney.connection import connect
from jitney.embedded import EmbeddedServer
from jitney.keys import JobId, new_job_id
from jitney.messages import Event, JobSpec
from jitney.queue import Queue
from jitney.tether import tether
from jitney_worker.engine.protocol import Engine
from jitney_worker.engine.sequence import SequenceId, SequenceParams, SequenceRequest

PROMPT_TOKENS = 32
WAYS = ("alone", "bare", "path")

PATIENCE_S = 600.0
"""A round that takes so long hangs: what the bare way has missed never comes."""


@dataclass(frozen=True, slots=True)
class Job:
    """Greedy; end tokens are ignored, so that the length is exact."""

    prompt: tuple[int, ...]
    max_tokens: int

    @property
    def fields(self) -> dict[str, Any]:
        return {"prompt": list(self.prompt), "max_tokens": self.max_tokens, "temperature": 0.0, "ignore_eos": True}


@dataclass(slots=True)
class Rates:
    """Tokens per second of each round, by way."""

    name: str
    by_way: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})

    def median(self, way: str) -> float:
        return statistics.median(self.by_way[way])


def workload(num_jobs: int, mean_tokens: int, seed: int = 1) -> list[Job]:
    """Prompts that are all different; answers between half and one and a half of the mean."""
    chance = random.Random(seed)
    return [
        Job(
            tuple(chance.randrange(3, 500) for _ in range(PROMPT_TOKENS)),
            chance.randint(max(1, mean_tokens // 2), mean_tokens * 3 // 2),
        )
        for _ in range(num_jobs)
    ]


def drive(engine: Engine, jobs: Sequence[Job]) -> float:
    """The engine alone, all jobs at once; tokens per second."""
    began, num_tokens = time.perf_counter(), 0
    for number, job in enumerate(jobs):
        sequence_id = SequenceId(f"j{number}/0/f")
        params = SequenceParams(job.max_tokens)
        engine.add(SequenceRequest(sequence_id, job.prompt, params, (0, 0.0, 0, number)))
    while engine.has_work():
        num_tokens += sum(len(delta.token_ids) for delta in engine.step())
    return _rate(num_tokens, jobs, time.perf_counter() - began)


async def through(client: AsyncClient, jobs: Sequence[Job]) -> float:
    """The whole path: submitted at once, each answer streamed to its end."""

    async def ride(job: Job) -> int:
        sent = await client.enqueue(**job.fields)
        return sum([len(event.token_ids) async for event in sent.stream()])

    began = time.perf_counter()
    num_tokens = sum(await asyncio.gather(*(ride(job) for job in jobs)))
    return _rate(num_tokens, jobs, time.perf_counter() - began)


async def through_bare(queue: Queue, jobs: Sequence[Job]) -> float:
    """The same without anything that is kept. Readers must be there before the jobs are: no log forgives them."""
    ids = [new_job_id(queue.name) for _ in jobs]
    bodies = [JobSpec.build({"prompt": job.prompt, "sampling": _sampling(job)}).encode() for job in jobs]
    async with queue.redis.pubsub() as listener:
        await listener.subscribe(*(queue.keys.tokens(id) for id in ids))
        for _ in ids:
            await listener.get_message(timeout=None)
        began = time.perf_counter()
        submitting = asyncio.gather(*(submit(queue, id, body) for id, body in zip(ids, bodies, strict=True)))
        num_tokens = await _hear(listener, ids)
        await submitting
    return _rate(num_tokens, jobs, time.perf_counter() - began)


def _sampling(job: Job) -> dict[str, Any]:
    return {"max_tokens": job.max_tokens, "temperature": 0.0, "ignore_eos": True, "seed": 0}


async def _hear(listener: Any, ids: Sequence[JobId]) -> int:
    """Until all jobs have ended; their tokens."""
    num_tokens, num_open = 0, len(ids)
    while num_open:
        message = await listener.get_message(ignore_subscribe_messages=True, timeout=None)
        if message is not None:
            event = Event.decode(message["data"])
            num_tokens += len(event.token_ids)
            num_open -= event.is_terminal
    return num_tokens


def _rate(num_tokens: int, jobs: Sequence[Job], seconds: float) -> float:
    wanted = sum(job.max_tokens for job in jobs)
    assert num_tokens == wanted, f"{num_tokens} tokens came, {wanted} were asked for"
    return num_tokens / seconds


@contextlib.asynccontextmanager
async def worker(
    server: EmbeddedServer, queue: str, kind: str, directory: Path, seats: int, *options: str
) -> AsyncIterator[int]:
    """A worker in a process of its own, for as long as the block lasts; its pid."""
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ops.bench.path_worker", "--redis-url", server.url, "--queue", queue),
        *("--kind", kind, "--directory", str(directory), "--seats", str(seats), *options),
        cwd=page.ROOT,
        stdin=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        preexec_fn=tether(signal.SIGKILL),
    )
    assert program.stderr is not None
    words: list[str] = []
    async for line in program.stderr:
        words.append(line.decode(errors="replace").rstrip())
        if words[-1] == "ready":
            break
    else:
        raise RuntimeError(f"the worker did not start: {words[-12:]}")
    draining = asyncio.create_task(_drop(program.stderr))
    try:
        yield program.pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            program.terminate()
        await program.wait()
        await draining


async def _drop(stream: asyncio.StreamReader) -> None:
    """Read and forget: a full pipe would stop the worker."""
    while await stream.read(65_536):
        pass


async def measure(
    server: EmbeddedServer, name: str, directory: Path, jobs: Sequence[Job], *, seats: int, num_rounds: int
) -> Rates:
    """So many rounds of each way, in turns, after one that is not counted. name: `idle`, or the model's."""
    kind, rates = (IDLE if name == IDLE else "model"), Rates(name)
    queues = {way: f"q{secrets.token_hex(6)}" for way in WAYS}
    made = crew(settings(str(directory), queues["alone"], seats), directory, kind=kind)
    async with (
        worker(server, queues["path"], kind, directory, seats),
        worker(server, queues["bare"], kind, directory, seats, "--bare"),
        AsyncClient(server.url, queue=queues["path"]) as client,
    ):
        redis = connect(server.url, name="path-cost")
        bare = Queue(redis, queues["bare"])
        try:
            for number in range(num_rounds + 1):
                counted = jobs if number else jobs[: len(jobs) // 4 or 1]
                async with asyncio.timeout(PATIENCE_S):
                    round_rates = {
                        "alone": drive(made.engine, counted),
                        "bare": await through_bare(bare, counted),
                        "path": await through(client, counted),
                    }
                for way, rate in round_rates.items() if number else ():
                    rates.by_way[way].append(rate)
        finally:
            await redis.aclose()
    return rates


HEAD = ("model", "engine alone", "path, bare", "path", "path of bare", "path of engine alone")


def cells(rates: Rates) -> list[str]:
    alone, bare, path = (rates.median(way) for way in WAYS)
    return [
        rates.name,
        *(f"{rate:,.0f}" for rate in (alone, bare, path)),
        page.times(path, bare),
        page.times(path, alone),
    ]


def table(all_rates: Sequence[Rates]) -> str:
    return page.table(HEAD, [cells(rates) for rates in all_rates])


def row_of(rates: Rates) -> Mapping[str, Any]:
    """For programs."""
    return {"model": rates.name} | {
        f"{way}_tokens_per_s": [round(rate, 1) for rate in rates.by_way[way]] for way in WAYS
    }
