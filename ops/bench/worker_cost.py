"""What a worker costs before and beside its tokens: seconds from its start to `ready`, and its memory under work.

    python -m ops.bench.worker_cost [--write FILE] [--json FILE]

About two minutes. Starts are those of a converted model whose files are in the page cache, with compiled kernels that
are there already: the first start is not counted. Memory is the highest resident one of a worker that has run a whole
workload through the path, with one GiB of KV cache.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ops.bench import flags, page

from jitney.embedded import EmbeddedServer
from jitney.errors import ServerError
from jitney_worker.bench.options import BenchOptions
from jitney_worker.bench.report import figures
from jitney_worker.bench.run import run
from jitney_worker.bench.workloads import load_workload

PLACE = "worker-cost"
NAMES = ("W1", "W2", "W5", "W9")
READY_S, READY_AIM_S = 5.0, 2.0
RSS_GIB, RSS_AIM_GIB = 1.8, 1.5
PATIENCE_S = 300.0


def seconds_to_ready(redis_url: str, asked: argparse.Namespace) -> float:
    """One worker, from its start until it says that it is ready. Raises ServerError with its last words."""
    words = [sys.executable, "-m", "jitney", "worker", "--model", asked.model, "--dtype", asked.dtype]
    words += ["--queue", "worker-cost", "--kv-cache-bytes", str(asked.kv_cache_bytes)]
    words += ["--quantization", asked.quantization]
    if asked.num_threads is not None:
        words += ["--num-threads", str(asked.num_threads)]
    environment = {**os.environ, "JITNEY_REDIS_URL": redis_url, "JITNEY_KERNELS": asked.kernels}
    start, said = time.perf_counter(), ""
    with subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True) as worker:
        assert worker.stderr is not None
        try:
            for line in worker.stderr:
                if line.startswith("ready "):
                    return time.perf_counter() - start
                said = line
        finally:
            with contextlib.suppress(ProcessLookupError):
                worker.send_signal(signal.SIGTERM)
            worker.communicate(timeout=PATIENCE_S)
    raise ServerError(f"the worker ended before it was ready: {said.strip()}")


def starts(asked: argparse.Namespace) -> list[float]:
    """Seconds of each start that counts."""
    found = []
    with tempfile.TemporaryDirectory() as folder, EmbeddedServer(Path(folder), tethered=True) as server:
        for number in range(asked.rounds + 1):
            seconds = seconds_to_ready(server.url, asked)
            if number:
                found.append(round(seconds, 3))
            flags.say(f"start {number}: {seconds:.2f} s" + ("" if number else ", not counted"))
    return found


def memory(asked: argparse.Namespace) -> dict[str, Any]:
    """Figures of the workload through the path."""
    workload = load_workload(asked.workload, asked.name, limit=asked.limit)
    options = BenchOptions(
        model=asked.model,
        dtype=asked.dtype,
        num_threads=asked.num_threads,
        kernels=asked.kernels,
        quantization=asked.quantization,
        kv_cache_bytes=asked.kv_cache_bytes,
    )
    return figures(workload, "path", run(workload, options))


def row(name: str, values: Sequence[float], must: float, aim: float) -> list[str]:
    """A cost, and whether it is as low as it must be, and as it is to be."""
    median = statistics.median(values)
    met = ["met" if median <= most else "not met" for most in (must, aim)]
    return [name, f"{median:.2f}", f"{min(values):.2f}–{max(values):.2f}", f"≤ {must:g}", met[0], f"≤ {aim:g}", met[1]]


def text(seconds: Sequence[float], rss_gib: float, asked: argparse.Namespace, machine: str) -> str:
    cache = f"{asked.kv_cache_bytes / 2**30:.2f} GiB of KV cache"
    rows = [
        row("start to ready, s", seconds, READY_S, READY_AIM_S),
        row("peak RSS, GiB", [rss_gib], RSS_GIB, RSS_AIM_GIB),
    ]
    return "\n\n".join(
        (
            page.paragraph(
                f"`python -m ops.bench.worker_cost`, {asked.model}, {cache}, {asked.rounds} starts;",
                f"memory after {asked.name}. {machine}.",
            ),
            page.table(["cost", "measured", "spread", "must be", "", "aim", ""], rows),
        )
    )


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = flags.parser(__doc__)
    flags.add_engine(parser)
    flags.add_workload(parser)
    parser.add_argument("--name", choices=NAMES, default="W5")
    parser.add_argument("--kv-cache-bytes", type=flags.positive, default=1 << 30)
    parser.add_argument("--rounds", type=flags.positive, default=5)
    return parser.parse_args(words)


@flags.told()
def main(words: Sequence[str] | None = None) -> None:
    asked = arguments(words)
    page.check_place(asked.write, PLACE)
    machine = page.machine()
    seconds, measured = starts(asked), memory(asked)
    rss_gib = measured["peak_rss_mb"] * 1_000 / 2**20  # its MB are a thousand of the kernel's KiB
    report = {"machine": machine, "ready_s": seconds, "peak_rss_gib": round(rss_gib, 3), "run": measured}
    flags.leave_behind(asked, PLACE, text(seconds, rss_gib, asked, machine), report)


if __name__ == "__main__":
    main()
