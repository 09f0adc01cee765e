"""The picture that everyone quotes, made honest: tokens per second as the lengths of answers differ more and more.

    python -m ops.bench.variance [--write FILE] [--json FILE] [--svg FILE]

About ten minutes. The law is that of Anyscale's benchmark of June 2023 (opt-13b, prompts of 512 tokens, answers
exponential with mean 128, drawn again until they are at most 32, 128, 512 or 1,536), divided by --scale, with a KV
cache of as many tokens by the same measure. A static batch is as large as fits if all its answers reach the cap. The
control has no variance at all: there static and continuous must come out level.

    naive          transformers' generate, one job after the other
    one seat       our engine, one job after the other
    static         as many seats as fit, and all wait for the slowest
    continuous     the same seats, each filled again at once
    paged          continuous, and as many seats as the same memory holds at what answers really need

What the last gains over the first is then the product of four things: kernels (one seat / naive), batching (static /
one seat), seats saved (continuous / static) and batch size (paged / continuous).
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ops.bench import chart, flags, page
from ops.bench.go import Quiet
from ops.bench.lab import Lab, open_lab

from jitney_worker.bench.inprocess import ride_engine
from jitney_worker.bench.naive import generate, load_naive
from jitney_worker.bench.quiet import is_disturbed, other_cores, reading
from jitney_worker.bench.workloads import BenchJob

PLACE = "variance"
MEAN, PROMPT, KV_TOKENS = 128, 512, 8_704
CAPS = (32, 128, 512, 1_536)
WAYS = ("naive", "one seat", "static", "continuous", "paged")
PARTS = {"kernels": (1, 0), "batching": (2, 1), "seats saved": (3, 2), "batch size": (4, 3)}
"""part of the gain -> (way, the way before it), as places in `WAYS`"""
MAX_SEATS = 64
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Law:
    """How answers are drawn. cap: the longest one; None = no variance, every answer has the mean's length."""

    mean: float
    prompt_tokens: int
    cap: int | None

    @property
    def name(self) -> str:
        return "no variance" if self.cap is None else f"at most {self.cap:,}"

    @property
    def longest(self) -> int:
        return round(self.mean) if self.cap is None else self.cap

    @property
    def kept_mean(self) -> float:
        """Mean of an exponential variable, drawn again until it is at most `cap`."""
        return self.mean if self.cap is None else self.mean - self.cap / math.expm1(self.cap / self.mean)

    def lengths(self, count: int, seed: int) -> list[int]:
        """Whole numbers, at least 1."""
        chance = random.Random(seed)
        return [self._draw(chance) for _ in range(count)]

    def _draw(self, chance: random.Random) -> int:
        if self.cap is None:
            return self.longest
        while (length := chance.expovariate(1 / self.mean)) > self.cap:
            pass
        return max(1, round(length))


def laws(scale: float) -> list[Law]:
    """The control, and the benchmark's four caps; the caps of tiny scales may fall together."""
    base = Law(MEAN / scale, max(1, round(PROMPT / scale)), None)
    caps = dict.fromkeys(max(2, round(cap / scale)) for cap in CAPS)
    return [base, *(replace(base, cap=cap) for cap in caps)]


def num_blocks(scale: float) -> int:
    """The KV memory of all ways."""
    return max(2, round(KV_TOKENS / scale / BLOCK_SIZE))


def static_seats(law: Law, blocks: int) -> int:
    """As many as fit if every answer is the longest one. The last token needs no slot."""
    return max(1, min(MAX_SEATS, blocks // -(-(law.prompt_tokens + law.longest - 1) // BLOCK_SIZE)))


def busy_share(lengths: Sequence[int], seats: int) -> float:
    """Of the seats of static batches in order of arrival: how many of their steps compute something."""
    batches = [lengths[start : start + seats] for start in range(0, len(lengths), seats)]
    return sum(lengths) / sum(max(batch) * len(batch) for batch in batches)


def jobs_of(law: Law, count: int, vocab_size: int, seed: int = 1) -> list[BenchJob]:
    """Prompts of random tokens, all different, as the benchmark has them."""
    chance = random.Random(seed)
    prompts = [tuple(chance.randrange(3, vocab_size) for _ in range(law.prompt_tokens)) for _ in range(count)]
    return [BenchJob(*job) for job in zip(prompts, law.lengths(count, seed + 1), strict=True)]


def sample_of(jobs: Sequence[BenchJob], count: int) -> list[BenchJob]:
    """So few of the jobs, evenly from the shortest to the longest: their mean is close to that of all."""
    ordered = sorted(jobs, key=lambda job: job.max_tokens)
    count = min(count, len(ordered))
    return [ordered[(2 * number + 1) * len(ordered) // (2 * count)] for number in range(count)]


def ways(lab: Lab, naive: Any, law: Law, blocks: int) -> dict[str, Callable[[Sequence[BenchJob]], object]]:
    """Each way as something that runs jobs to their end."""
    seats = static_seats(law, blocks)
    return {
        "naive": lambda jobs: [generate(naive, job) for job in jobs],
        "one seat": lambda jobs: ride_engine(lab.engine(1, num_blocks=blocks), jobs),
        "static": lambda jobs: ride_engine(
            lab.engine(seats, num_blocks=blocks, policy="static", admission_reserve=0.0), jobs
        ),
        "continuous": lambda jobs: ride_engine(lab.engine(seats, num_blocks=blocks, admission_reserve=0.0), jobs),
        "paged": lambda jobs: ride_engine(lab.engine(MAX_SEATS, num_blocks=blocks), jobs),
    }


def rate(run: Callable[[Sequence[BenchJob]], object], jobs: Sequence[BenchJob], quiet: Quiet) -> tuple[float, bool]:
    """Tokens per second, and whether even the last of the tries was disturbed by somebody else's work."""
    for _ in range(quiet.tries):
        before, start = reading(), time.perf_counter()
        run(jobs)
        seconds = time.perf_counter() - start
        disturbed = is_disturbed(other_cores(before, reading()), quiet.most_cores)
        if not disturbed:
            break
    return sum(job.max_tokens for job in jobs) / seconds, disturbed


@dataclass(slots=True)
class Row:
    """One law: its rates by way, one a round, and how many of them were disturbed to the last."""

    law: Law
    seats: int
    mean_length: float
    busy_share: float
    rates: dict[str, list[float]]
    num_disturbed: int = 0

    def median(self, way: str) -> float:
        return statistics.median(self.rates[way])

    def gain(self, part: str) -> float:
        """Median of the rounds' ratios."""
        after, before = (self.rates[WAYS[place]] for place in PARTS[part])
        return statistics.median(a / b for a, b in zip(after, before, strict=True))

    def ratio(self, way: str, base: str) -> float:
        return statistics.median(a / b for a, b in zip(self.rates[way], self.rates[base], strict=True))

    def wire(self) -> dict[str, Any]:
        return {
            "law": self.law.name,
            "cap": self.law.cap,
            "mean_length": round(self.mean_length, 2),
            "static_seats": self.seats,
            "static_busy_share": round(self.busy_share, 4),
            "tokens_per_s": {way: [round(rate, 1) for rate in rates] for way, rates in self.rates.items()},
            "parts": {part: round(self.gain(part), 3) for part in PARTS},
            "num_disturbed": self.num_disturbed,
        }


def measure(lab: Lab, naive: Any, asked: argparse.Namespace) -> list[Row]:
    """All laws and ways, in turns; the slow ones, which do one job at a time, with fewer jobs."""
    blocks, rows = num_blocks(asked.scale), []
    for law in laws(asked.scale):
        jobs = jobs_of(law, asked.jobs, lab.runner.vocab_size)
        lengths = [job.max_tokens for job in jobs]
        seats = static_seats(law, blocks)
        rows.append(Row(law, seats, statistics.fmean(lengths), busy_share(lengths, seats), {way: [] for way in WAYS}))
        running = ways(lab, naive, law, blocks)
        for run in running.values():
            run(jobs[: 2 * seats][:8])
        for number in range(1, asked.rounds + 1):
            for way in WAYS if number % 2 else WAYS[::-1]:
                counted = sample_of(jobs, asked.single_jobs) if way in WAYS[:2] else jobs
                measured, disturbed = rate(running[way], counted, Quiet(asked.most_other_cores, asked.tries))
                rows[-1].rates[way].append(measured)
                rows[-1].num_disturbed += disturbed
            flags.say(
                f"{law.name}, round {number}: " + ", ".join(f"{w} {r[-1]:,.0f}" for w, r in rows[-1].rates.items())
            )
    return rows


def text(rows: Sequence[Row], lab: Lab, asked: argparse.Namespace, machine: str) -> str:
    rates = [
        [row.law.name, f"{row.mean_length:.1f}", str(row.seats), f"{row.busy_share:.0%}"]
        + [f"{row.median(way):,.0f}" for way in WAYS]
        for row in rows
    ]
    parts = [
        [
            row.law.name,
            *(page.times(row.gain(part), 1) for part in PARTS),
            *(page.times(row.ratio("paged", base), 1) for base in ("naive", "static")),
        ]
        for row in rows
    ]
    disturbed = sum(row.num_disturbed for row in rows)
    note = f" {disturbed} runs were disturbed by other work to the last try." if disturbed else ""
    return "\n\n".join(
        (
            page.paragraph(
                f"`python -m ops.bench.variance`, {lab.setting}; {asked.jobs} jobs with prompts of",
                f"{rows[0].law.prompt_tokens} tokens, answers exponential with mean {rows[0].law.mean:g}, all ways",
                f"with {num_blocks(asked.scale) * BLOCK_SIZE:,} tokens of KV cache; naive and one seat with",
                f"{min(asked.single_jobs, asked.jobs)} of the jobs, of all lengths;",
                f"median of {asked.rounds} rounds. {machine}.{note}",
                "Output tokens per second:",
            ),
            page.table(["answers", "mean", "static seats", "of them busy", *WAYS], rates),
            page.paragraph(
                "Where it comes from. *Kernels*: one seat over naive. *Batching*: static over one seat. *Seats saved*:",
                "continuous over static at the same seats. *Batch size*: what paging adds by letting more of them in.",
                "Medians of each round's ratio, so that a row's product may differ a little from its total:",
            ),
            page.table(["answers", *PARTS, "paged over naive", "paged over static"], parts),
        )
    )


def picture(rows: Sequence[Row], lab: Lab) -> chart.Chart:
    ticks = (*((float(number), row.law.name) for number, row in enumerate(rows)), (len(rows) - 0.6, ""))
    rates = tuple(
        chart.Series(way, tuple((float(number), row.median(way)) for number, row in enumerate(rows))) for way in WAYS
    )
    parts = tuple(
        chart.Series(part, tuple((float(number), row.gain(part)) for number, row in enumerate(rows))) for part in PARTS
    )
    return chart.Chart(
        "Naive, static and continuous batching as answers differ more in length",
        f"{lab.setting}; the same KV memory for all",
        (
            chart.Panel("throughput", "length of answers", "tokens/s", rates, ticks),
            chart.Panel("where it comes from", "length of answers", "times", parts, ticks),
        ),
    )


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = flags.parser(__doc__)
    flags.add_picture(parser)
    flags.add_engine(parser)
    parser.add_argument(
        "--scale", type=flags.above_zero, default=4.0, help="all lengths are divided by it; %(default)s"
    )
    parser.add_argument("--jobs", type=flags.positive, default=128)
    parser.add_argument("--single-jobs", type=flags.positive, default=24, help="of naive and one seat; %(default)s")
    parser.add_argument("--rounds", type=flags.positive, default=3)
    flags.add_quiet(parser)
    return parser.parse_args(words)


@flags.told()
def main(words: Sequence[str] | None = None) -> None:
    asked = arguments(words)
    page.check_place(asked.write, PLACE)
    machine = page.machine()
    lab = open_lab(asked, num_blocks=num_blocks(asked.scale))
    naive = load_naive(lab.directory, lab.runner.dtype, asked.num_threads)
    rows = measure(lab, naive, asked)
    figures = {"machine": machine, "setting": lab.setting, "scale": asked.scale, "rows": [row.wire() for row in rows]}
    flags.leave_behind(asked, PLACE, text(rows, lab, asked, machine), figures)
    chart.write(asked.svg, picture(rows, lab))


if __name__ == "__main__":
    main()
