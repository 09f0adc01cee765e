"""What it costs that nothing is lost: `append` a step, and tokens per second with and without lease, fence and log.

    python -m ops.bench.durability_cost [append] [path] [--models idle tiny] [--write FILE] [--json FILE]

Without a word both parts run, about two minutes. Compare within one run; figures of two runs are of two machines.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ops.bench import append_cost, page, path_cost
from ops.bench.path_worker import IDLE

from jitney.embedded import EmbeddedServer
from jitney_worker.model.resolve import resolve
from jitney_worker.model.tiny import make_tiny

PARTS = ("append", "path")
SIZES = (16, 64, 256)
REAL = "smollm2-135m-instruct"
JOBS = {IDLE: (512, 128), "tiny": (128, 128), REAL: (64, 32)}
"""Of each model: how many jobs a round has, and how many tokens an answer on average."""


def append_text(tables: Sequence[tuple[str, str]], machine: str) -> str:
    """tables: (server, table)."""
    return "\n\n".join(
        (
            page.paragraph(
                f"`python -m ops.bench.durability_cost append`. {machine}.",
                "In every step each job gains one event of some 80 bytes. Beside `append` (fence and seq checked, log",
                "written, event published) stand, taking turns with it, one pipeline of plain `XADD`s of the same",
                "events and one of `PUBLISH`es. Every job's channel has a subscriber.",
            ),
            *(f"{server}:\n\n{table}" for server, table in tables),
            page.paragraph(
                "*Server*: its microseconds for one job in one step, append / XADD / PUBLISH, in the command as",
                "`INFO commandstats` counts it, and of the whole process with parsing, replies and the file.",
                "*A step takes*: milliseconds until the worker has its answer, p50 (p99).",
                "*append of XADD*: the one as a multiple of the other, of what stands to the left.",
            ),
        )
    )


def path_text(table: str, server: str, seats: int, machine: str) -> str:
    return "\n\n".join(
        (
            page.paragraph(
                f"`python -m ops.bench.durability_cost path`, {server}, one worker with {seats} seats and one thread",
                f"for its model; clients and server use the same cores. {machine}.",
            ),
            table,
            page.paragraph(
                "Tokens per second, medians of rounds that took turns. *Engine alone*: no Redis, no text, no client.",
                "*Path, bare*: jobs in a list, events by `PUBLISH` alone: no lease, no fence, no log; what nobody",
                "hears is lost. *Path*: what jitney does. *idle* is a model that costs nothing: the ceiling of the",
                "path itself.",
            ),
        )
    )


def run_append(rounds: int, steps: int, sizes: Sequence[int]) -> tuple[str, list[dict[str, Any]]]:
    """The block, and its figures."""
    tables, rows, machine = [], [], page.machine()
    for kind in ("valkey", "redis"):
        binary = page.server_binary(kind)
        if binary is None:
            print(f"no {kind} server here: left out")
            continue
        name = page.server_version(binary)
        with (
            tempfile.TemporaryDirectory() as folder,
            EmbeddedServer(Path(folder), binary=binary, tethered=True) as server,
        ):
            costs = asyncio.run(append_cost.measure(server, sizes, rounds, steps))
        tables.append((name, append_cost.table(costs)))
        rows += [
            append_cost.row_of(name, fsync, size, way, cost)
            for (fsync, size), ways in costs.items()
            for way, cost in ways.items()
        ]
    return append_text(tables, machine), rows


def run_path(rounds: int, models: Sequence[str], seats: int, scale: float) -> tuple[str, list[dict[str, Any]]]:
    """The block, and its figures. scale: of the number of jobs."""
    machine, all_rates = page.machine(), []
    with tempfile.TemporaryDirectory() as folder:
        tiny = make_tiny(Path(folder) / "tiny")
        with EmbeddedServer(Path(folder) / "data", tethered=True) as server:
            name = page.server_version(server.binary)
            for model in models:
                num_jobs, mean_tokens = JOBS[model]
                jobs = path_cost.workload(max(2, round(num_jobs * scale)), mean_tokens)
                directory = resolve(model) if model == REAL else tiny
                measuring = path_cost.measure(server, model, directory, jobs, seats=seats, num_rounds=rounds)
                all_rates.append(asyncio.run(measuring))
    text = path_text(path_cost.table(all_rates), name, seats, machine)
    return text, [dict(path_cost.row_of(rates)) for rates in all_rates]


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="default: both")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40, help="of append, in each round and way")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="jobs a step")
    parser.add_argument("--models", nargs="+", choices=JOBS, default=[IDLE, "tiny"])
    parser.add_argument("--seats", type=int, default=64)
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of jobs of the path's rounds")
    parser.add_argument("--write", type=Path, help="a document with places for these tables")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(words)


def main() -> None:
    asked = arguments()
    parts = asked.parts or PARTS
    for part in parts:
        page.check_place(asked.write, f"{part}-cost")
    figures = {}
    for part in parts:
        if part == "append":
            block, figures[part] = run_append(asked.rounds, asked.steps, asked.sizes)
        else:
            block, figures[part] = run_path(asked.rounds, asked.models, asked.seats, asked.scale)
        print(f"{block}\n")
        page.write(asked.write, f"{part}-cost", block)
    if asked.json:
        asked.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
