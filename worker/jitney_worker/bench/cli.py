"""`jitney bench`: a named workload through the whole path, as a table and as JSON."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Annotated

import orjson
import typer
from rich.console import Console

from jitney.errors import SettingsError
from jitney.logs import configure
from jitney_worker.bench.measure import Run, measure
from jitney_worker.bench.report import figures, table
from jitney_worker.bench.workloads import NAMES, Workload, load_workload
from jitney_worker.settings import load_settings

MODES = ("path", "static", "serial")


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
    dtype: Annotated[str, typer.Option("--dtype", help="auto, float32 or bfloat16")] = "auto",
    rate: Annotated[float, typer.Option("--rate", help="arrivals per second of W6")] = 1.0,
    limit: Annotated[int | None, typer.Option("--limit", help="run only the first N jobs", min=1)] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the figures here")] = None,
) -> None:
    """Measure throughput, time to first token, time between tokens and completion.

    path: the whole path, continuous batching. static: the same with seats held until the slowest ends.
    serial: the same with one seat.
    """
    configure("warning")
    if mode not in MODES:
        raise SettingsError(f"--mode {mode!r} is not one of {', '.join(MODES)}")
    if redis_url is not None and mode != "path":
        raise SettingsError(f"--mode {mode} starts a stack of its own: leave --redis-url out")
    if rate <= 0:
        raise SettingsError(f"--rate {rate:g} must be more than 0")
    chosen = load_workload(workload, name, rate_per_s=rate, limit=limit)
    model = model or chosen.model
    if redis_url is not None:
        run = asyncio.run(measure(redis_url, queue or load_settings(model=model).queue_name, chosen))
    else:
        run = asyncio.run(_on_own_stack(chosen, mode, model, dtype))
    result = figures(chosen, mode, run)
    Console().print(table(result))
    if json_file is not None:
        json_file.write_bytes(orjson.dumps(result, option=orjson.OPT_INDENT_2))


async def _on_own_stack(workload: Workload, mode: str, model: str, dtype: str) -> Run:
    """Server, API and one worker for the length of the run, with the seats that the workload names."""
    from jitney_worker.model.resolve import resolve
    from jitney_worker.stack.local import LocalStack, StackSettings

    directory = resolve(model)
    queue = load_settings(model=model).queue_name
    seats = 1 if mode == "serial" else workload.seats
    policy = "static" if mode == "static" else "continuous"
    flags = ("--model", str(directory), "--queue", queue, "--max-num-seqs", str(seats), "--policy", policy)
    with tempfile.TemporaryDirectory(prefix="jitney-bench-") as folder:
        settings = StackSettings(
            data_dir=Path(folder),
            queue=queue,
            port=0,
            worker_flags=(*flags, "--dtype", dtype),
            environment={"JITNEY_ENGINE__ENABLE_PREFIX_CACHING": str(workload.prefix_caching).lower()},
        )
        async with LocalStack(settings) as stack:
            return await measure(stack.redis_url, queue, workload)
