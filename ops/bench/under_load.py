"""Jobs that come when they come: time to the first token, between tokens and to the end, continuous beside static.

    python -m ops.bench.under_load [--write FILE] [--json FILE] [--svg FILE]

About six minutes a round. First the capacity is measured: jobs per second of W5, all at once, through the whole path.
Then the same jobs arrive as a Poisson stream (W6) at 50, 80 and 95 % of it, on a stack of their own each time, under
the continuous and under the static policy. Percentiles over all jobs of a run; of several rounds, the median.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

from ops.bench import chart, flags, page

from jitney_worker.bench.options import BenchOptions
from jitney_worker.bench.report import figures
from jitney_worker.bench.run import run
from jitney_worker.bench.workloads import load_workload

PLACE = "under-load"
PERCENT = (50, 80, 95)
POLICIES = ("continuous", "static")
TIMES = {"ttft_s": "to the first token", "itl_s": "between tokens", "completion_s": "to the end"}
SHARES = ("p50", "p99")

Key = tuple[int, str]
"""(percent of the capacity, policy)"""


def measured(asked: argparse.Namespace, name: str, policy: str, rate_per_s: float = 1.0) -> dict[str, Any]:
    """The figures of one run on a stack of its own."""
    workload = load_workload(asked.workload, name, rate_per_s=rate_per_s, limit=asked.limit)
    options = BenchOptions(
        mode="path" if policy == "continuous" else "static",
        model=asked.model,
        dtype=asked.dtype,
        seats=asked.seats,
        num_threads=asked.num_threads,
        kernels=asked.kernels,
        quantization=asked.quantization,
    )
    return figures(workload, options.mode, run(workload, options))


def measure(asked: argparse.Namespace) -> tuple[float, dict[Key, list[dict[str, Any]]]]:
    """Capacity in jobs per second, and the figures of each load and policy, one entry a round."""
    full = measured(asked, "W5", "continuous")
    capacity: float = full["num_jobs"] / full["wall_s"]
    flags.say(f"capacity: {capacity:.2f} jobs per second, {full['tokens_per_s']:,.0f} tokens per second")
    found: dict[Key, list[dict[str, Any]]] = {(load, policy): [] for load in asked.percent for policy in POLICIES}
    for number in range(asked.rounds):
        for load, policy in list(found) if number % 2 == 0 else list(found)[::-1]:
            one = measured(asked, "W6", policy, capacity * load / 100)
            found[load, policy].append(one)
            completion = one["completion_s"]
            flags.say(f"{load} %, {policy}: to the end {completion['p50']:.2f} s (p99 {completion['p99']:.2f} s)")
    return capacity, found


def median(runs: Sequence[dict[str, Any]], time: str, share: str) -> float:
    """Seconds."""
    return float(statistics.median(one[time][share] for one in runs))


def _words(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1_000:.0f} ms"


def text(capacity: float, found: dict[Key, list[dict[str, Any]]], asked: argparse.Namespace, machine: str) -> str:
    rows = [
        [f"{load} %", policy]
        + [_words(median(runs, time, share)) for time in TIMES for share in SHARES]
        + [f"{statistics.median(one['tokens_per_s'] for one in runs):,.0f}"]
        for (load, policy), runs in found.items()
    ]
    rounds = "one round" if asked.rounds == 1 else f"medians of {asked.rounds} rounds"
    return "\n\n".join(
        (
            page.paragraph(
                f"`python -m ops.bench.under_load`, W6 through the whole path, {asked.model}; {rounds}. {machine}.",
                f"Capacity, measured before: {capacity:.2f} jobs per second. p50 and p99 over jobs, or over tokens:",
            ),
            page.table(
                [
                    "load",
                    "policy",
                    *(f"{words}, {share}" for words in TIMES.values() for share in SHARES),
                    "tokens/s",
                ],
                rows,
            ),
        )
    )


def picture(found: dict[Key, list[dict[str, Any]]], machine: str) -> chart.Chart:
    ticks = tuple((float(load), f"{load} %") for load in dict.fromkeys(load for load, _ in found))

    def panel(time: str, words: str) -> chart.Panel:
        lines = tuple(
            chart.Series(
                f"{policy}, {share}",
                tuple((float(load), median(runs, time, share)) for (load, its), runs in found.items() if its == policy),
            )
            for policy in POLICIES
            for share in SHARES
        )
        return chart.Panel(words, "load, of the capacity", "s", lines, ticks)

    return chart.Chart("Under load", machine, tuple(panel(time, words) for time, words in TIMES.items()))


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = flags.parser(__doc__)
    flags.add_picture(parser)
    flags.add_engine(parser)
    flags.add_workload(parser)
    parser.add_argument("--seats", type=flags.positive, help="default: as the workload says")
    parser.add_argument("--percent", type=flags.listed(flags.percent), default=PERCENT, metavar="50,80,95")
    parser.add_argument("--rounds", type=flags.positive, default=1)
    return parser.parse_args(words)


@flags.told()
def main(words: Sequence[str] | None = None) -> None:
    asked = arguments(words)
    page.check_place(asked.write, PLACE)
    machine = page.machine()
    capacity, found = measure(asked)
    report = {
        "machine": machine,
        "capacity_jobs_per_s": round(capacity, 4),
        "runs": [{"percent": load, "policy": policy, **one} for (load, policy), runs in found.items() for one in runs],
    }
    flags.leave_behind(asked, PLACE, text(capacity, found, asked, machine), report)
    chart.write(asked.svg, picture(found, machine))


if __name__ == "__main__":
    main()
