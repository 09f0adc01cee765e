"""Does a backlog of bulk work hurt whoever waits for words? Time to the first token on an idle worker, and behind it.

    python -m ops.bench.living [--write FILE] [--json FILE]

About three minutes. One worker, started as `jitney up` starts it. Interactive jobs come one after the other, at moments
that are drawn: to a worker that has nothing else to do, and to one whose seats all hold bulk, with 10,000 bulk jobs
waiting; idle, busy, busy, idle in every round. A full step is what the same worker takes for one between the two busy
turns, with bulk in every seat. The goal: at the median an idle worker's time and one and a half full steps.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ops.bench import flags, page

from jitney import AsyncClient, AsyncJob
from jitney.connection import connect
from jitney.errors import ServerError
from jitney.workers import WorkerView, list_workers
from jitney_worker.bench.percentiles import percentile
from jitney_worker.model.resolve import resolve
from jitney_worker.stack.local import LocalStack, StackSettings

PLACE = "living"
QUEUE = "living"
GOAL_STEPS = 1.5
TURNS = ("idle", "busy", "busy", "idle")
AT_ONCE = 256
"""Jobs on their way into Redis, or out of it, at one time."""

PATIENCE_S = 300.0
FIRST_TOKEN, MOST_PROMPT, MOST_OUTPUT = 3, 256, 128
WATCH_S = 8.0


@dataclass(slots=True)
class Measured:
    """Seconds. first: to the first token, of every job of a turn. steps: of a full step, once a round."""

    first: dict[str, list[float]] = field(default_factory=lambda: {"idle": [], "busy": []})
    steps: list[float] = field(default_factory=list)
    num_preemptions: int = 0

    def median(self, turn: str) -> float:
        return statistics.median(self.first[turn])

    @property
    def step_s(self) -> float:
        return statistics.median(self.steps)

    @property
    def num_steps(self) -> float:
        """Full steps that the backlog adds at the median."""
        return (self.median("busy") - self.median("idle")) / self.step_s


class Backlog:
    """Bulk jobs in the queue, of mixed length and all different."""

    def __init__(self, client: AsyncClient, size: int, chance: random.Random) -> None:
        self._client, self._size, self._chance = client, size, chance
        self._jobs: list[AsyncJob] = []

    async def fill(self) -> None:
        """Until as many wait as were asked for."""
        waiting = (await self._client.queue(QUEUE).backlog()).num_jobs
        bound = asyncio.Semaphore(AT_ONCE)

        async def enqueue(prompt: list[int], max_tokens: int) -> AsyncJob:
            async with bound:
                return await self._client.enqueue(prompt, max_tokens=max_tokens, ignore_eos=True, band="bulk")

        lengths = [
            (self._chance.randint(16, MOST_PROMPT), self._chance.randint(16, MOST_OUTPUT))
            for _ in range(self._size - waiting)
        ]
        self._jobs += await asyncio.gather(*(enqueue(words(self._chance, p), o) for p, o in lengths))

    async def drop(self) -> None:
        """Nothing of it is left, neither waiting nor running."""
        bound = asyncio.Semaphore(AT_ONCE)

        async def cancel(job: AsyncJob) -> None:
            async with bound:
                await job.cancel()

        await asyncio.gather(*map(cancel, self._jobs))
        self._jobs.clear()


def words(chance: random.Random, num: int) -> list[int]:
    return [chance.randrange(FIRST_TOKEN, 500) for _ in range(num)]


async def seconds_to_first(client: AsyncClient, prompt: list[int]) -> float:
    start, first_s = time.perf_counter(), 0.0
    job = await client.enqueue(prompt, max_tokens=2, temperature=0.0, ignore_eos=True)
    async for event in job.stream():
        if event.token_ids and not first_s:
            first_s = time.perf_counter() - start
        if event.is_terminal and event.type != "finished":
            raise ServerError(f"job {job.id} ended with {event.type}: {event.error}")
    return first_s


async def turn(client: AsyncClient, asked: argparse.Namespace, chance: random.Random) -> list[float]:
    found = []
    for _ in range(asked.jobs):
        await asyncio.sleep(chance.uniform(0.05, 0.35))  # so that they meet steps anywhere, and seats filled again
        found.append(await seconds_to_first(client, words(chance, asked.prompt_tokens)))
    return found


async def view(redis_url: str) -> WorkerView:
    redis = connect(redis_url, name="jitney-bench")
    try:
        (worker,) = await list_workers(redis, QUEUE)
    finally:
        await redis.aclose()
    return worker


async def until(redis_url: str, *, seats: int) -> WorkerView:
    """Until so many seats are taken."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            now = await view(redis_url)
            if now.num_running == seats:
                return now
            await asyncio.sleep(0.1)


async def full_step_s(redis_url: str, seconds: float) -> float:
    """Of the steps that the worker counts: their mean."""
    before = await view(redis_url)
    await asyncio.sleep(seconds)
    after = await view(redis_url)
    return (after.written_at - before.written_at) / (after.step - before.step)


async def measure(redis_url: str, asked: argparse.Namespace) -> Measured:
    chance, measured = random.Random(asked.seed), Measured()
    async with AsyncClient(redis_url, queue=QUEUE) as client:
        backlog = Backlog(client, asked.backlog, chance)
        for _ in range(3):
            await seconds_to_first(client, words(chance, asked.prompt_tokens))
        for _ in range(asked.rounds):
            for number, kind in enumerate(TURNS):
                if kind == "busy":
                    await backlog.fill()
                    await until(redis_url, seats=asked.seats)
                    if TURNS[number - 1] == "busy":
                        measured.steps.append(await full_step_s(redis_url, asked.watch_s))
                else:
                    await backlog.drop()
                    await until(redis_url, seats=0)
                measured.first[kind] += (found := await turn(client, asked, chance))
                flags.say(f"{kind}: {statistics.median(found) * 1_000:.0f} ms to the first token")
        measured.num_preemptions = (await view(redis_url)).num_preemptions
        await backlog.drop()
    return measured


async def on_own_stack(asked: argparse.Namespace) -> Measured:
    directory = str(resolve(asked.model))
    worker = ("--model", directory, "--queue", QUEUE, "--dtype", asked.dtype, "--quantization", asked.quantization)
    with tempfile.TemporaryDirectory(prefix="jitney-living-") as folder:
        settings = StackSettings(
            data_dir=Path(folder),
            queue=QUEUE,
            port=0,
            worker_flags=(*worker, "--max-num-seqs", str(asked.seats)),
            num_threads=asked.num_threads,
            environment={"JITNEY_KERNELS": asked.kernels},
        )
        async with LocalStack(settings) as stack:
            return await measure(stack.redis_url, asked)


def verdict(measured: Measured, asked: argparse.Namespace) -> str:
    met = "met" if measured.num_steps <= GOAL_STEPS else "not met"
    return (
        f"At the median, behind {asked.backlog:,} bulk jobs: idle + {measured.num_steps:.2f} full steps; "
        f"the goal is at most idle + {GOAL_STEPS:g}: {met}."
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1_000:.0f}"


def text(measured: Measured, asked: argparse.Namespace, machine: str) -> str:
    rows = [
        [name, *map(_ms, (statistics.median(of), percentile(of, 0.9), max(of))), f"{len(of)}"]
        for name, of in (
            ("to the first token, worker idle", measured.first["idle"]),
            (f"to the first token, {asked.backlog:,} bulk jobs waiting", measured.first["busy"]),
            (f"a full step: {asked.seats} seats of bulk", measured.steps),
        )
    ]
    return "\n\n".join(
        (
            page.paragraph(
                f"`python -m ops.bench.living`, {asked.model}, {asked.seats} seats; interactive jobs of",
                f"{asked.prompt_tokens} prompt tokens, bulk of up to {MOST_PROMPT} and {MOST_OUTPUT} of output.",
                f"{machine}. Milliseconds:",
            ),
            page.table(["time", "median", "p90", "most", "of"], rows),
            f"**{verdict(measured, asked)}**",
        )
    )


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = flags.parser(__doc__)
    flags.add_engine(parser)
    parser.add_argument("--seats", type=flags.positive, default=64)
    parser.add_argument("--backlog", type=flags.positive, default=10_000, help="bulk jobs that wait; %(default)s")
    parser.add_argument("--jobs", type=flags.positive, default=20, help="interactive jobs a turn; %(default)s")
    parser.add_argument("--prompt-tokens", type=flags.positive, default=64, help="of each of those; %(default)s")
    parser.add_argument("--rounds", type=flags.positive, default=2, help="of four turns; %(default)s")
    parser.add_argument("--watch-s", type=flags.above_zero, default=WATCH_S, help="for a full step; %(default)g")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(given)


@flags.told()
def main(given: Sequence[str] | None = None) -> None:
    asked = arguments(given)
    page.check_place(asked.write, PLACE)
    machine = page.machine()
    measured = asyncio.run(on_own_stack(asked))
    report: dict[str, Any] = {
        "machine": machine,
        "model": asked.model,
        "seats": asked.seats,
        "backlog": asked.backlog,
        "first_s": measured.first,
        "step_s": measured.steps,
        "num_steps": round(measured.num_steps, 3),
        "num_preemptions": measured.num_preemptions,
    }
    flags.leave_behind(asked, PLACE, text(measured, asked, machine), report)


if __name__ == "__main__":
    main()
