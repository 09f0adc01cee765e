"""`jitney bench`: a named workload through the whole path or a part of it, as a table and as JSON."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Annotated

import orjson
import typer
from rich.console import Console

from jitney.errors import SettingsError
from jitney.logs import configure
from jitney.progress import progress
from jitney_worker.bench.options import MODES, BenchOptions
from jitney_worker.bench.report import figures, table
from jitney_worker.bench.run import run
from jitney_worker.bench.workloads import NAMES, load_workload


def bench(
    workload: Annotated[Path, typer.Option("--workload", help="file of named workloads")] = Path(
        "ops/bench/workload.json"
    ),
    name: Annotated[str, typer.Option("--name", help=f"one of {', '.join(NAMES)}")] = "W5",
    mode: Annotated[str, typer.Option("--mode", help=f"one of {', '.join(MODES)}")] = "path",
    redis_url: Annotated[
        str | None, typer.Option("--redis-url", help="a running stack; default: one of its own")
    ] = None,
    queue: Annotated[str | None, typer.Option("--queue", help="queue of the running stack")] = None,
    model: Annotated[str | None, typer.Option("--model", help="default: the one the workload names")] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="auto, float32 or bfloat16")] = None,
    seats: Annotated[int | None, typer.Option("--seats", help="default: as the workload says", min=1)] = None,
    policy: Annotated[str | None, typer.Option("--policy", help="continuous or static")] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option("--max-num-batched-tokens", help="tokens one step may compute", min=1)
    ] = None,
    num_kv_blocks: Annotated[
        int | None, typer.Option("--num-kv-blocks", help="size of the KV cache in blocks", min=2)
    ] = None,
    kv_cache_bytes: Annotated[
        int | None, typer.Option("--kv-cache-bytes", help="size of the KV cache in bytes", min=1)
    ] = None,
    num_threads: Annotated[int | None, typer.Option("--num-threads", help="CPU threads for the model", min=1)] = None,
    kernels: Annotated[str | None, typer.Option("--kernels", help="auto, native or torch")] = None,
    quantization: Annotated[str | None, typer.Option("--quantization", help="of the weights: none or int8")] = None,
    rate: Annotated[float | None, typer.Option("--rate", help="arrivals per second of W6; default 1")] = None,
    limit: Annotated[int | None, typer.Option("--limit", help="run only the first N jobs", min=1)] = None,
    profile: Annotated[bool, typer.Option("--profile", help="what a step is made of (mode engine)")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures here")] = None,
) -> None:
    """Measure throughput, time to first token, time between tokens and completion.

    path: the whole path, continuous batching. engine: the engine in this process, without Redis. static: the path
    with seats held until the slowest ends. serial: the path with one seat. naive: transformers' `generate`, one job
    after the other.
    """
    configure("warning")
    options = BenchOptions(
        mode=mode,
        model=model,
        redis_url=redis_url,
        queue=queue,
        dtype=dtype,
        seats=seats,
        policy=policy,
        max_num_batched_tokens=max_num_batched_tokens,
        num_kv_blocks=num_kv_blocks,
        kv_cache_bytes=kv_cache_bytes,
        num_threads=num_threads,
        kernels=kernels,
        quantization=quantization,
        is_profiled=profile,
    )
    if rate is not None and name != "W6":
        raise SettingsError(f"--rate {rate:g} is of W6 alone: in {name} all jobs arrive at once")
    if rate is not None and rate <= 0:
        raise SettingsError(f"--rate {rate:g} must be more than 0")
    if json_file is not None and not json_file.parent.is_dir():
        raise SettingsError(f"--json {json_file}: there is no folder {json_file.parent}")
    chosen = load_workload(workload, name, rate_per_s=rate or 1.0, limit=limit)
    with progress(f"{name}, mode {mode}", len(chosen.jobs) * chosen.repeats, "jobs") as tell:
        ended = count(1)
        measured = run(chosen, options, lambda: tell(next(ended)))
    result = figures(chosen, mode, measured)
    Console().print(table(result))
    if json_file is not None:
        json_file.write_bytes(orjson.dumps(result, option=orjson.OPT_INDENT_2))
