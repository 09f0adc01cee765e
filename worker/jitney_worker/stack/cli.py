"""`jitney up` and `jitney demo`."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from jitney.logs import configure
from jitney.settings import client_settings, default_data_dir
from jitney_worker import cli as flags
from jitney_worker.settings import WorkerSettings
from jitney_worker.stack.bridges import check_bridges
from jitney_worker.stack.local import LocalStack, StackSettings, unless_stopped

Host = Annotated[str, typer.Option("--host", help="address of the API")]
Port = Annotated[int, typer.Option("--port", help="port of the API; 0 takes a free one")]
Workers = Annotated[int, typer.Option("--workers", help="number of workers; 0 = Redis and API only", min=0, max=64)]
DataDir = Annotated[Path | None, typer.Option("--data-dir", help="where the embedded server keeps its files")]
Bulk = Annotated[bool, typer.Option("--bulk", help="also take RQ jobs and Celery tasks, and keep up what they leave")]
Drain = Annotated[float, typer.Option("--drain-timeout-s", help="seconds for running jobs to finish at the end", min=0)]


def up(
    model: flags.Model = None,
    queue: flags.QueueName = None,
    redis_url: flags.RedisUrl = None,
    dtype: flags.DtypeName = None,
    max_num_seqs: flags.MaxNumSeqs = None,
    max_num_batched_tokens: flags.MaxTokens = None,
    num_kv_blocks: flags.NumKvBlocks = None,
    kv_cache_bytes: flags.KvCacheBytes = None,
    block_size: flags.BlockSize = None,
    policy: flags.PolicyName = None,
    lease_s: flags.LeaseS = None,
    num_threads: flags.NumThreads = None,
    quantization: flags.Quantization = None,
    metrics_port: flags.MetricsPort = None,
    offline: flags.Offline = False,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    workers: Workers = 1,
    data_dir: DataDir = None,
    drain_timeout_s: Drain = 20.0,
    bulk: Bulk = False,
) -> None:
    """Run the whole stack here: Redis (embedded unless --redis-url is given), API and workers."""
    configure("warning")
    if bulk:
        check_bridges()
    given = {
        "model": model,
        "queue": queue,
        "dtype": dtype,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "num_kv_blocks": num_kv_blocks,
        "kv_cache_bytes": kv_cache_bytes,
        "block_size": block_size,
        "policy": policy,
        "lease_s": lease_s,
        "quantization": quantization,
    }
    raise typer.Exit(
        asyncio.run(
            _up(
                given,
                offline=offline,
                redis_url=redis_url,
                host=host,
                port=port,
                num_workers=workers,
                data_dir=data_dir or default_data_dir(),
                num_threads=num_threads,
                metrics_port=metrics_port,
                drain_timeout_s=drain_timeout_s,
                bulk=bulk,
            )
        )
    )


async def _up(given: dict[str, Any], *, offline: bool, num_workers: int, **where: Any) -> int:
    from jitney_worker.model.resolve import resolve

    settings = flags.settings_from_flags(**given, offline=offline)  # every contradiction is refused here, once
    resolve(settings.model, offline=settings.offline)  # fetched before anything starts, with its progress shown
    queue = settings.queue_name
    stack_settings = StackSettings(
        queue=queue,
        num_workers=num_workers,
        worker_flags=worker_flags({**given, "queue": queue}),
        durability=client_settings().durability,
        **where,
    )
    stack, stopping = LocalStack(stack_settings), asyncio.Event()

    def stop() -> None:
        if stopping.is_set():  # asked a second time: somebody will not wait for the drain
            stack.ask_to_stop()
        stopping.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        if await unless_stopped(stack.start(), stopping):
            if num_workers == 0:
                await _register(settings, stack.redis_url)
            print(f"ready redis={stack.redis_url} api={stack.api_url} queue={queue}", file=sys.stderr, flush=True)
            if stack.bridges:
                print(f"ready {stack.bridges}", file=sys.stderr, flush=True)
            is_found = stack_settings.redis_url is None and stack_settings.data_dir == default_data_dir()
            print(greeting(stack.api_url, queue, None if is_found else stack.redis_url), flush=True)
            await unless_stopped(stack.keep_up(), stopping)
            print(f"Stopping: running jobs have up to {stack_settings.drain_timeout_s:.0f} s.", flush=True)
    finally:
        await stack.stop()
    return 0


async def _register(settings: WorkerSettings, redis_url: str) -> None:
    """Without a worker nobody else says which model this queue serves."""
    from jitney.connection import connect
    from jitney_worker.build import register_without_weights

    redis = connect(redis_url, name="jitney-up")
    try:
        await register_without_weights(redis, settings)
    finally:
        await redis.aclose()


def worker_flags(given: dict[str, Any]) -> tuple[str, ...]:
    """The flags of `jitney worker` that say the same as `given`."""
    words: list[str] = []
    for name, value in given.items():
        if value is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return tuple(words)


def greeting(api_url: str, queue: str, url: str | None) -> str:
    """What a newcomer types next. url: None = clients find the server by themselves."""
    where = f'queue="{queue}"' if url is None else f'"{url}", queue="{queue}"'
    return f"""
jitney is up. Ctrl-C stops it.

  curl -N {api_url}/v1/chat/completions -H 'content-type: application/json' \\
    -d '{{"model": "{queue}", "stream": true, "max_tokens": 64,
         "messages": [{{"role": "user", "content": "Why is the sky blue?"}}]}}'

  from jitney import Client

  client = Client({where})
  job = client.enqueue("Once upon a time", max_tokens=64, temperature=0.7)
  for event in job.stream():
      print(event.text, end="", flush=True)
"""


def demo(
    model: flags.Model = None,
    seats: Annotated[int, typer.Option("--seats", help="seats in the batch", min=1)] = 4,
    offline: flags.Offline = False,
) -> None:
    """Sixteen chat prompts of very different lengths share four seats of one continuous batch."""
    configure("warning")
    from jitney_worker.stack.demo import run_demo

    raise typer.Exit(asyncio.run(run_demo(model or "smollm2-135m-instruct", seats=seats, offline=offline)))
