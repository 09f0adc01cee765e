"""What it costs that the KV cache is too small: the same jobs with less and less of what they need.

    python -m ops.bench.preemption [--write FILE] [--json FILE] [--svg FILE]

Ten to twelve minutes. The need is measured first, not guessed: the most blocks in use at once in a run that was never
short of any. Then the same jobs run with that many blocks, and with fewer; all of them take turns. A preempted sequence
loses its blocks and keeps its tokens, and is computed again when it returns: those tokens are counted. Each pool runs
with the engine's admission reserve, which avoids most preemptions, and without it, which shows what they cost.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

from ops.bench import chart, flags, page
from ops.bench.lab import Lab, open_lab

from jitney.errors import SettingsError
from jitney_worker.bench.inprocess import lengths, num_tokens_needed, ride_engine
from jitney_worker.bench.quiet import other_cores, reading
from jitney_worker.bench.workloads import BenchJob, load_workload
from jitney_worker.engine.engine import LocalEngine
from jitney_worker.engine.protocol import SchedulerOutput

PLACE = "preemption"
PERCENT = (100, 75, 50, 35, 25)
NAMES = ("W1", "W2", "W5", "W9")
BLOCK_SIZE = 16
RESERVES = (15, 0)
"""Percent of all blocks that newcomers leave to those who run: as the engine has it by default, and none."""

Pool = tuple[int, int]
"""(percent of the need, percent of the pool in reserve)"""


@dataclass(frozen=True, slots=True)
class Round:
    """One run with so many blocks. mean_batch: sequences in a step. num_recomputed: tokens computed again."""

    num_blocks: int
    tokens_per_s: float
    num_preemptions: int
    num_recomputed: int
    mean_batch: float
    other_cores: float | None


@dataclass(slots=True)
class Watch:
    """What the steps of one run need."""

    most_blocks: int = 0
    num_rows: int = 0
    num_steps: int = 0
    engine: LocalEngine | None = None

    def before_step(self, scheduled: SchedulerOutput) -> None:
        assert self.engine is not None
        capacity = self.engine.capacity()
        self.most_blocks = max(self.most_blocks, capacity.num_blocks - capacity.num_free_blocks)
        self.num_rows += len(scheduled.scheduled)
        self.num_steps += 1


def blocks_of(job: BenchJob) -> int:
    return -(-(len(job.prompt) + job.max_tokens - 1) // BLOCK_SIZE)


def plenty(jobs: Sequence[BenchJob], seats: int) -> int:
    """Blocks with which nobody ever waits for one: the largest jobs all at once, and the reserve besides."""
    largest = sorted(map(blocks_of, jobs), reverse=True)[:seats]
    return ceil(sum(largest) / (1 - max(RESERVES) / 100)) + max(largest)


def one_run(lab: Lab, jobs: Sequence[BenchJob], seats: int, num_blocks: int, reserve: int) -> tuple[Round, Watch]:
    """All jobs at once, on a fresh engine."""
    watch = Watch()
    watch.engine = lab.engine(
        seats, num_blocks=num_blocks, admission_reserve=reserve / 100, before_step=watch.before_step
    )
    before, start = reading(), time.perf_counter()
    rides = ride_engine(watch.engine, jobs)
    seconds, after = time.perf_counter() - start, reading()
    snapshot = watch.engine.snapshot()
    num_tokens = sum(len(ride.token_ids) for ride in rides)
    measured = Round(
        num_blocks,
        round(num_tokens / seconds, 1),
        snapshot.num_preemptions,
        snapshot.num_computed_tokens - num_tokens_needed(jobs),
        round(watch.num_rows / watch.num_steps, 2),
        other_cores(before, after),
    )
    return measured, watch


def measured_need(lab: Lab, jobs: Sequence[BenchJob], seats: int) -> int:
    """The most blocks in use at once when there are always more."""
    measured, watch = one_run(lab, jobs, seats, lab.runner.num_blocks, reserve=0)
    assert measured.num_preemptions == 0, "a run that is to show the need was short of blocks itself"
    return watch.most_blocks


def pools(need: int, percentages: Sequence[int], jobs: Sequence[BenchJob]) -> dict[int, int]:
    """percent -> blocks. Raises SettingsError for a pool in which the largest job can never run."""
    largest = max(jobs, key=blocks_of)
    found = {}
    for percentage in percentages:
        found[percentage] = need * percentage // 100
        if found[percentage] < blocks_of(largest):
            raise SettingsError(
                f"--percent {percentage} of the {need} blocks needed are {found[percentage]}, but the longest job "
                f"({max(lengths([largest]))} tokens) takes {blocks_of(largest)} alone: leave it out"
            )
    return found


def measure(
    lab: Lab, jobs: Sequence[BenchJob], seats: int, asked: argparse.Namespace
) -> tuple[int, dict[Pool, list[Round]]]:
    """The need, and the rounds of each pool."""
    need = measured_need(lab, jobs, seats)
    sizes = pools(need, asked.percent, jobs)
    flags.say(f"needed at once: {need} blocks, {need * BLOCK_SIZE:,} tokens")
    rounds: dict[Pool, list[Round]] = {(percentage, reserve): [] for reserve in RESERVES for percentage in sizes}
    for number in range(1, asked.rounds + 1):
        for percentage, reserve in sorted(rounds, reverse=number % 2 == 1):
            measured, _ = one_run(lab, jobs, seats, sizes[percentage], reserve)
            rounds[percentage, reserve].append(measured)
            flags.say(
                f"round {number}, {percentage} %, reserve {reserve} %: {measured.tokens_per_s:,.0f} tokens/s, "
                f"{measured.num_preemptions} preemptions"
            )
    return need, rounds


def row_of(pool: Pool, rounds: Sequence[Round]) -> dict[str, Any]:
    """For programs. The counts are the same in every round, since nothing in the engine is left to chance."""
    rates = [one.tokens_per_s for one in rounds]
    return {
        "percent": pool[0],
        "reserve_percent": pool[1],
        "tokens_per_s": statistics.median(rates),
        "spread": [min(rates), max(rates)],
        "rounds": [asdict(one) for one in rounds],
    }


def text(need: int, rounds: dict[Pool, list[Round]], about: str, num_needed: int) -> str:
    base = statistics.median(one.tokens_per_s for one in next(iter(rounds.values())))
    rows = []
    for (percentage, reserve), measured in rounds.items():
        rates = [one.tokens_per_s for one in measured]
        last = measured[-1]
        rows.append(
            [
                f"{reserve} %",
                f"{percentage} %",
                f"{last.num_blocks:,}",
                f"{statistics.median(rates):,.0f}",
                f"{min(rates):,.0f}–{max(rates):,.0f}",
                page.times(statistics.median(rates), base),
                f"{last.mean_batch:.1f}",
                f"{last.num_preemptions:,}",
                f"{last.num_recomputed:,} ({last.num_recomputed / num_needed:.1%})",
            ]
        )
    return "\n\n".join(
        (
            page.paragraph(
                about,
                f"The jobs need {need:,} blocks of {BLOCK_SIZE} tokens at once, and {num_needed:,} tokens computed.",
            ),
            page.table(
                [
                    "reserve",
                    "pool",
                    "blocks",
                    "tokens/s",
                    "spread",
                    "of the first",
                    "mean batch",
                    "preemptions",
                    "recomputed tokens",
                ],
                rows,
            ),
        )
    )


def picture(rounds: dict[Pool, list[Round]], about: str, num_needed: int) -> chart.Chart:
    ticks = tuple((float(percentage), f"{percentage} %") for percentage, reserve in rounds if reserve == RESERVES[0])

    def lines(value: Callable[[Sequence[Round]], float]) -> tuple[chart.Series, ...]:
        return tuple(
            chart.Series(
                f"admission reserve {reserve} %",
                tuple((float(percentage), value(one)) for (percentage, its), one in rounds.items() if its == reserve),
            )
            for reserve in RESERVES
        )

    rate = lines(lambda measured: statistics.median(one.tokens_per_s for one in measured))
    again = lines(lambda measured: measured[-1].num_recomputed / num_needed * 100)
    return chart.Chart(
        "What preemption costs",
        about,
        (
            chart.Panel("throughput", "pool, of the need", "tokens/s", rate, ticks),
            chart.Panel("tokens computed again", "pool, of the need", "% of all", again, ticks),
        ),
    )


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = flags.parser(__doc__)
    flags.add_picture(parser)
    flags.add_engine(parser)
    flags.add_workload(parser)
    parser.add_argument("--name", choices=NAMES, default="W5")
    parser.add_argument("--percent", type=flags.listed(flags.percent), default=PERCENT, metavar="100,75,50")
    parser.add_argument("--rounds", type=flags.positive, default=3)
    return parser.parse_args(words)


@flags.told()
def main(words: Sequence[str] | None = None) -> None:
    asked = arguments(words)
    page.check_place(asked.write, PLACE)
    machine = page.machine()
    workload = load_workload(asked.workload, asked.name, limit=asked.limit)
    jobs, seats = workload.jobs, workload.seats
    lab = open_lab(asked, num_blocks=plenty(jobs, seats))
    ride_engine(lab.engine(seats), workload.warm)
    need, rounds = measure(lab, jobs, seats, asked)
    about = f"`python -m ops.bench.preemption`, {asked.name}, {seats} seats, {lab.setting}. {machine}."
    figures = {
        "machine": machine,
        "setting": lab.setting,
        "name": asked.name,
        "need_blocks": need,
        "num_tokens_needed": num_tokens_needed(jobs),
        "pools": [row_of(pool, measured) for pool, measured in rounds.items()],
    }
    flags.leave_behind(asked, PLACE, text(need, rounds, about, num_tokens_needed(jobs)), figures)
    chart.write(asked.svg, picture(rounds, f"{asked.name}, {seats} seats, {lab.setting}", num_tokens_needed(jobs)))


if __name__ == "__main__":
    main()
