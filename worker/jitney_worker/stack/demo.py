"""The main job, on a real model, from enqueue to the last token, where you can watch it."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.rule import Rule

from jitney import AsyncClient
from jitney.async_client import AsyncJob
from jitney.connection import Redis, connect
from jitney.errors import JobEnded
from jitney.tasks import end_tasks
from jitney.workers import list_workers
from jitney_worker.model.resolve import resolve
from jitney_worker.settings import load_settings
from jitney_worker.stack.live import BatchPage, Rider
from jitney_worker.stack.local import LocalStack, StackSettings
from jitney_worker.stack.prompts import PASSENGERS, Passenger

REFRESH_S = 0.1


async def run_demo(model: str, *, seats: int, offline: bool) -> int:
    """Stack up, sixteen jobs through the client, the live batch, the answers, stack down. The exit code."""
    console = Console()
    directory = resolve(model, offline=offline)
    queue = load_settings(model=model).queue_name
    with tempfile.TemporaryDirectory(prefix="jitney-demo-") as folder:
        settings = StackSettings(
            data_dir=Path(folder),
            queue=queue,
            port=0,
            worker_flags=("--model", str(directory), "--queue", queue, "--max-num-seqs", str(seats)),
            environment={"JITNEY_WORKER__SNAPSHOT_EVERY_S": str(REFRESH_S / 2)},
            drain_timeout_s=10.0,
        )
        console.print(f"Starting Redis, the API and one worker with {seats} seats for {model} ...")
        try:
            async with LocalStack(settings) as stack:
                console.print(f"Up: {stack.api_url}   queue {queue}\n")
                failed = await _ride(console, stack.redis_url, queue, seats)
        finally:
            console.print("Everything is shut down.")
    return 1 if failed else 0


async def _ride(console: Console, redis_url: str, queue: str, seats: int) -> int:
    """Enqueue, watch, print. How many jobs failed."""
    redis = connect(redis_url, name="jitney-demo")
    try:
        async with AsyncClient(redis_url, queue=queue) as client:
            started = time.monotonic()
            jobs = [await _enqueue(client, passenger) for passenger in PASSENGERS]
            riders = {
                job.id: Rider(number, passenger.prompt)
                for number, (job, passenger) in enumerate(zip(jobs, PASSENGERS, strict=True), 1)
            }
            page = BatchPage(seats, riders)
            follows = [asyncio.create_task(_follow(job, riders[job.id])) for job in jobs]
            try:
                await _watch(console, redis, queue, page, follows)
                errors = [error for error in await asyncio.gather(*follows) if error is not None]
            finally:
                await end_tasks(follows)
            _print_answers(console, page, time.monotonic() - started)
            for error in errors:
                console.print(f"[red]{error}")
            return len(errors)
    finally:
        await redis.aclose()


async def _enqueue(client: AsyncClient, passenger: Passenger) -> AsyncJob:
    return await client.enqueue(
        messages=[{"role": "user", "content": passenger.prompt}],
        max_tokens=passenger.max_tokens,
        temperature=0.0,
    )


async def _follow(job: AsyncJob, rider: Rider) -> JobEnded | None:
    """Stream one job into its rider; the error it ended with, if it did."""
    async for event in job.stream():
        rider.text += event.text
        rider.num_tokens += len(event.token_ids)
    try:
        await job.result()
    except JobEnded as error:
        return error
    return None


async def _watch(
    console: Console, redis: Redis, queue: str, page: BatchPage, follows: list[asyncio.Task[JobEnded | None]]
) -> None:
    """Show the batch until every stream has ended: live on a terminal, as lines elsewhere."""
    with Live(page.render(), console=console, refresh_per_second=12) if console.is_terminal else _no_live() as live:
        over = False
        while not over:
            over = all(task.done() for task in follows) and all(r.left_step is not None for r in page.riders.values())
            for view in await list_workers(redis, queue):
                moves = page.see(view)
                if live is None:
                    for move in moves:
                        console.print(move)
            if live is not None:
                live.update(page.render())
            over = over or any(task.done() and task.exception() is not None for task in follows)
            await asyncio.sleep(REFRESH_S)


def _no_live() -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def _print_answers(console: Console, page: BatchPage, wall_s: float) -> None:
    for rider in page.riders.values():
        console.print(Rule(f"#{rider.number}  {rider.prompt}", align="left"))
        console.print(rider.text.strip(), markup=False, highlight=False)
    num_tokens = sum(rider.num_tokens for rider in page.riders.values())
    console.print(Rule())
    console.print(
        f"{len(page.riders)} answers, {num_tokens} tokens in {wall_s:.1f} s "
        f"({num_tokens / wall_s:.0f} tokens/s) and {page.step} steps of one shared batch"
    )
