"""`jitney worker`: one worker in this process, until SIGTERM or Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from jitney.errors import QueueUnavailable
from jitney.logs import configure
from jitney_worker.settings import WorkerSettings, load_settings

Model = Annotated[str | None, typer.Option(help="registered name, directory or hub id", show_default=False)]
QueueName = Annotated[str | None, typer.Option("--queue", help="queue to serve; default: from the model's name")]
RedisUrl = Annotated[
    str | None, typer.Option("--redis-url", help="default: JITNEY_REDIS_URL, or a running `jitney up`")
]
DtypeName = Annotated[str | None, typer.Option("--dtype", help="auto, float32 or bfloat16")]
MaxNumSeqs = Annotated[int | None, typer.Option("--max-num-seqs", help="seats in the batch")]
MaxTokens = Annotated[int | None, typer.Option("--max-num-batched-tokens", help="tokens one step may compute")]
NumKvBlocks = Annotated[int | None, typer.Option("--num-kv-blocks", help="size of the KV cache in blocks")]
KvCacheBytes = Annotated[int | None, typer.Option("--kv-cache-bytes", help="size of the KV cache in bytes")]
BlockSize = Annotated[int | None, typer.Option("--block-size", help="tokens in a KV block")]
PolicyName = Annotated[str | None, typer.Option("--policy", help="continuous or static")]
LeaseS = Annotated[float | None, typer.Option("--lease-s", help="seconds until a dead worker's jobs are taken over")]
NumThreads = Annotated[int | None, typer.Option("--num-threads", help="CPU threads for the model")]
Quantization = Annotated[str | None, typer.Option("--quantization", help="of the weights: none or int8")]
MetricsPort = Annotated[
    int | None, typer.Option("--metrics-port", help="serve Prometheus metrics on this port of 127.0.0.1")
]
Record = Annotated[
    Path | None, typer.Option("--record", dir_okay=False, help="write down every step, for `jitney trace`")
]
Offline = Annotated[bool, typer.Option("--offline", help="never fetch a model")]


def settings_from_flags(
    *,
    model: str | None = None,
    queue: str | None = None,
    redis_url: str | None = None,
    dtype: str | None = None,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    num_kv_blocks: int | None = None,
    kv_cache_bytes: int | None = None,
    block_size: int | None = None,
    policy: str | None = None,
    lease_s: float | None = None,
    num_threads: int | None = None,
    quantization: str | None = None,
    record: Path | None = None,
    metrics_port: int | None = None,
    offline: bool = False,
) -> WorkerSettings:
    """Environment below, flags on top. Raises SettingsError by name and value."""
    return load_settings(
        model=model,
        queue=queue,
        redis_url=redis_url,
        dtype=dtype,
        num_threads=num_threads,
        quantization=quantization,
        offline=offline or None,
        engine={
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "num_kv_blocks": num_kv_blocks,
            "kv_cache_bytes": kv_cache_bytes,
            "block_size": block_size,
            "policy": policy,
        },
        lease={"duration_s": lease_s},
        worker={"record": record, "metrics_port": metrics_port},
    )


def worker(
    model: Model = None,
    queue: QueueName = None,
    redis_url: RedisUrl = None,
    dtype: DtypeName = None,
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: MaxTokens = None,
    num_kv_blocks: NumKvBlocks = None,
    kv_cache_bytes: KvCacheBytes = None,
    block_size: BlockSize = None,
    policy: PolicyName = None,
    lease_s: LeaseS = None,
    num_threads: NumThreads = None,
    quantization: Quantization = None,
    record: Record = None,
    metrics_port: MetricsPort = None,
    offline: Offline = False,
) -> None:
    """Serve a model: claim jobs, run them in one continuous batch, stream their tokens."""
    configure()
    settings = settings_from_flags(
        model=model,
        queue=queue,
        redis_url=redis_url,
        dtype=dtype,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        num_kv_blocks=num_kv_blocks,
        kv_cache_bytes=kv_cache_bytes,
        block_size=block_size,
        policy=policy,
        lease_s=lease_s,
        num_threads=num_threads,
        quantization=quantization,
        record=record,
        metrics_port=metrics_port,
        offline=offline,
    )
    leave(asyncio.run(serve(settings)))


def leave(exit_code: int) -> NoReturn:
    """End the process, also with an engine that hangs: whatever waits for its threads at exit would wait for ever."""
    from jitney_worker.runtime.engine_thread import still_runs

    if still_runs():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    raise typer.Exit(exit_code)


async def serve(settings: WorkerSettings) -> int:
    """Build a worker and run it until it is told to stop; its exit code."""
    from jitney.connection import connect
    from jitney.joblog import PASSING_ERRORS
    from jitney.tracing import traces_if_wanted
    from jitney_worker.build import build_crew, register
    from jitney_worker.runtime.worker import Worker

    traces = traces_if_wanted("jitney-worker")
    crew = build_crew(settings)  # nothing else runs yet: a signal here may simply end the process
    redis = connect(settings.redis_url, name="jitney-register")
    try:
        crew = await register(redis, crew)
    except PASSING_ERRORS as error:
        raise QueueUnavailable(
            f"Redis does not answer: {error} Start one (`jitney up` brings its own), or say where it is (--redis-url)"
        ) from None
    finally:
        await redis.aclose()
    worker = Worker(settings, crew, traces)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, worker.drain)

    def announce() -> None:
        where = f" metrics={worker.metrics_url}" if worker.metrics_url is not None else ""
        print(f"ready worker={crew.worker_id} queue={crew.queue}{where}", file=sys.stderr, flush=True)

    try:
        return await worker.run(announce)
    finally:
        if traces is not None:
            await asyncio.to_thread(traces.close)
