"""What the durable queue costs: the whole path beside the engine alone, on the same jobs, taking turns.

    python -m ops.bench.queue_tax [--names W2,W5] [--rounds 5] [--write FILE] [--json FILE]

About six minutes. The engine alone is in a process of its own without Redis, text and clients. On the path the client,
the API, Redis and the worker share the same cores with it, and every token is fenced, logged and published.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ops.bench import chart, compare, flags, goals, page
from ops.bench.peers.engines import CONTENDERS

PLACE = "queue-tax"
WAYS = ("jitney", "jitney-engine")


def text(outcomes: Sequence[compare.Outcome], asked: argparse.Namespace, model: str, machine: str) -> str:
    rows = []
    for one in outcomes:
        found = goals.ratio(one.rounds, *WAYS)
        if found is None:
            rows.append([one.name, "–", "–", one.failure("jitney") or one.failure("jitney-engine") or "disturbed"])
            continue
        rows.append(
            [
                one.name,
                f"{1 - found.median:.1%}",
                f"{1 - found.most:.1%} to {1 - found.least:.1%}",
                f"{found.num_rounds} of {asked.rounds}",
            ]
        )
    measured = {one.name: one.rounds for one in outcomes}
    return "\n\n".join(
        (
            page.paragraph(
                f"`python -m ops.bench.queue_tax`, {model}, {asked.num_threads} threads. {machine}.",
                "Tax: the part of the engine's tokens per second that the path does not reach, median of rounds:",
            ),
            page.table(["workload", "tax", "spread", "rounds that count"], rows),
            goals.table(measured, dict.fromkeys(measured, goals.TAX)),
        )
    )


def picture(outcomes: Sequence[compare.Outcome], machine: str) -> chart.Chart | None:
    """Rates of both, round by round, one panel a workload; None if no round counts."""
    panels = []
    for one in outcomes:
        lines = tuple(
            chart.Series(
                CONTENDERS[engine].about,
                tuple((float(number), rate) for number, rate in enumerate(rates, 1) if rate is not None),
            )
            for engine, rates in one.rounds.items()
        )
        if any(line.points for line in lines):
            ticks = tuple((float(number), str(number)) for number in range(1, len(next(iter(one.rounds.values()))) + 1))
            panels.append(chart.Panel(one.name, "round", "tokens/s", lines, ticks))
    return chart.Chart("What the queue costs", machine, tuple(panels)) if panels else None


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = flags.parser(__doc__)
    flags.add_picture(parser)
    parser.add_argument("--names", type=flags.listed(str, compare.COMPARED), default=("W2", "W5"), metavar="W2,W5")
    parser.add_argument("--rounds", type=flags.positive, default=5)
    flags.add_quiet(parser)
    flags.add_ground(parser)
    asked = parser.parse_args(words)
    asked.tune = False
    return asked


@flags.told()
def main(words: Sequence[str] | None = None) -> None:
    asked = arguments(words)
    page.check_place(asked.write, PLACE)
    machine = page.machine()
    ground = compare.ground_of(asked)
    chosen = [CONTENDERS[name] for name in WAYS]
    outcomes = [compare.compare(name, chosen, ground, asked) for name in asked.names]
    flags.leave_behind(
        asked,
        PLACE,
        text(outcomes, asked, ground.model, machine),
        compare.report(outcomes, machine, dict.fromkeys(asked.names, goals.TAX)),
    )
    drawn = picture(outcomes, machine)
    if drawn is not None:
        chart.write(asked.svg, drawn)


if __name__ == "__main__":
    main()
