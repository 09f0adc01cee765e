"""What open pages cost: a worker's tokens per second with none, and with ten that follow the batch.

    python -m ops.bench.pages [--model MODEL] [--pages 10] [--rounds 3] [--watch-s 10] [--json FILE]

One stack, started as `jitney up` starts it, with every seat taken for the whole run. A page is a reader of
`/v1/overview/events`, which takes what a browser would and draws nothing: that costs somebody else's machine. None,
ten, ten, none in every round; the ratio is of each round's two, so that both met the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ops.bench import flags, page

from jitney import AsyncClient, AsyncJob
from jitney.connection import Redis, connect
from jitney.errors import ServerError
from jitney.tasks import end_tasks
from jitney.workers import list_workers
from jitney_worker.model.resolve import resolve
from jitney_worker.stack.local import LocalStack, StackSettings

PLACE = "pages"
QUEUE = "pages"
TURNS = (False, True, True, False)
TOKENS_OF_A_JOB = 400
SETTLE_S = 2.0
PATIENCE_S = 120.0


@dataclass(slots=True)
class Measured:
    """Tokens per second of each turn, and commands that Redis was sent per second."""

    rates: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    commands: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})

    @property
    def ratio(self) -> float:
        """With pages to without, the median over rounds."""
        pairs = [
            (sum(self.rates[True][i : i + 2]), sum(self.rates[False][i : i + 2]))
            for i in range(0, len(self.rates[True]), 2)
        ]
        return statistics.median(with_pages / without for with_pages, without in pairs)


@contextlib.asynccontextmanager
async def open_pages(api_url: str, number: int) -> AsyncIterator[None]:
    """So many readers, each of which has had an overview when this begins. Raises ServerError for one that is lost."""
    address = urlsplit(api_url)
    ready = [asyncio.Event() for _ in range(number)]

    async def read(mine: asyncio.Event) -> None:
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(f"GET /v1/overview/events HTTP/1.1\r\nhost: {address.netloc}\r\n\r\n".encode())
        try:
            while block := await reader.read(65_536):
                if b"event: overview" in block:
                    mine.set()
        finally:
            writer.close()
        raise ServerError("a page's stream has ended")

    tasks = [asyncio.create_task(read(one)) for one in ready]
    try:
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*(one.wait() for one in ready))
        yield
        for task in tasks:
            if task.done():
                task.result()
    finally:
        await end_tasks(tasks)


async def keep_full(client: AsyncClient, seats: int) -> None:
    """Twice as many jobs as there are seats, for ever."""
    running: set[asyncio.Task[None]] = set()

    async def ride(number: int) -> None:
        job: AsyncJob = await client.enqueue([3 + number % 50, 5, 8], max_tokens=TOKENS_OF_A_JOB, ignore_eos=True)
        await job.result()

    number = 0
    try:
        while True:
            while len(running) < 2 * seats:
                number += 1
                running.add(asyncio.create_task(ride(number)))
            _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end_tasks(running)


async def until_full(redis: Redis, seats: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if any(view.num_running == seats for view in await list_workers(redis, QUEUE)):
                break
            await asyncio.sleep(0.1)
    await asyncio.sleep(2 * SETTLE_S)  # the model's first steps are its slowest


async def watch(redis: Redis, seconds: float) -> tuple[float, float]:
    """Tokens, and commands, per second, by the worker's and the server's own counts."""

    async def counts() -> tuple[float, int, int]:
        (view,) = await list_workers(redis, QUEUE)
        stats: Any = await redis.info("stats")
        return view.written_at, view.num_generated_tokens, int(stats["total_commands_processed"])

    await asyncio.sleep(SETTLE_S)
    began, tokens, commands = await counts()
    await asyncio.sleep(seconds)
    ended, more_tokens, more_commands = await counts()
    return (more_tokens - tokens) / (ended - began), (more_commands - commands) / (ended - began)


async def measure(stack: LocalStack, asked: argparse.Namespace) -> Measured:
    measured, redis = Measured(), connect(stack.redis_url, name="jitney-bench")
    async with AsyncClient(stack.redis_url, queue=QUEUE) as client:
        load = asyncio.create_task(keep_full(client, asked.seats))
        try:
            await until_full(redis, asked.seats)
            for _ in range(asked.rounds):
                for with_pages in TURNS:
                    async with open_pages(stack.api_url, asked.pages if with_pages else 0):
                        rate, commands = await watch(redis, asked.watch_s)
                    measured.rates[with_pages].append(rate)
                    measured.commands[with_pages].append(commands)
                    flags.say(f"{asked.pages if with_pages else 0} pages: {rate:,.0f} tokens/s")
        finally:
            await end_tasks([load])
            await redis.aclose()
    return measured


async def on_own_stack(asked: argparse.Namespace) -> Measured:
    worker = ("--model", str(resolve(asked.model)), "--queue", QUEUE, "--max-num-seqs", str(asked.seats))
    with tempfile.TemporaryDirectory(prefix="jitney-pages-") as folder:
        settings = StackSettings(data_dir=Path(folder), queue=QUEUE, port=0, worker_flags=worker)
        async with LocalStack(settings) as stack:
            return await measure(stack, asked)


def text(measured: Measured, asked: argparse.Namespace, machine: str) -> str:
    rows = [
        [f"{asked.pages if with_pages else 0}", *(f"{statistics.median(of[with_pages]):,.0f}" for of in figures)]
        for figures in [(measured.rates, measured.commands)]
        for with_pages in (False, True)
    ]
    return "\n\n".join(
        (
            page.paragraph(f"`python -m ops.bench.pages`, {asked.model}, {asked.seats} seats, all taken. {machine}."),
            page.table(["pages open", "tokens/s", "Redis commands/s"], rows),
            f"**With {asked.pages} pages open: {measured.ratio:.3f} of the tokens per second without.**",
        )
    )


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = flags.parser(__doc__)
    parser.add_argument("--model", default=flags.MODEL, help="%(default)s")
    parser.add_argument("--seats", type=flags.positive, default=16)
    parser.add_argument("--pages", type=flags.positive, default=10)
    parser.add_argument("--rounds", type=flags.positive, default=3)
    parser.add_argument("--watch-s", type=flags.above_zero, default=10.0)
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
        "pages": asked.pages,
        "ratio": round(measured.ratio, 4),
        "tokens_per_s": {str(asked.pages): measured.rates[True], "0": measured.rates[False]},
        "redis_commands_per_s": {str(asked.pages): measured.commands[True], "0": measured.commands[False]},
    }
    flags.leave_behind(asked, PLACE, text(measured, asked, machine), report)


if __name__ == "__main__":
    main()
