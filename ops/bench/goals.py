"""What jitney wants to reach beside its peers, and what it has reached: ratios, never seconds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ops.bench import page
from ops.bench.peers.engines import CONTENDERS

BEST = "best peer"

Rounds = Mapping[str, Sequence[float | None]]
"""engine -> tokens per second of each round; None where a round does not count."""


@dataclass(frozen=True, slots=True)
class Bar:
    """At least `factor` times `against`, which is an engine or the best peer."""

    factor: float
    against: str = BEST

    def __str__(self) -> str:
        return f"≥ {self.factor:g} × {self.against}"


@dataclass(frozen=True, slots=True)
class Goal:
    """must: what the project promises. aim: where it wants to go. All bars of each."""

    must: tuple[Bar, ...]
    aim: tuple[Bar, ...]


_W1 = Goal((Bar(1.1), Bar(27, "naive")), (Bar(1.4), Bar(35, "naive")))
_PREFILL = Goal((Bar(0.9),), (Bar(1.1),))
GOALS: Mapping[str, Goal] = {
    "W1": _W1,
    "W2": Goal((Bar(1.1),), (Bar(1.4),)),
    "W3": Goal((Bar(1.1, "openvino"),), (Bar(1.3, "llamacpp"),)),
    "W4": _PREFILL,
    "W5": Goal((Bar(1.15),), (Bar(1.5),)),
    "W7": Goal((Bar(0.95, "jitney-greedy"),), (Bar(0.98, "jitney-greedy"),)),
    "W8": Goal((Bar(4, "openvino"), Bar(0.95, "vllm")), (Bar(1.2),)),
    "W8P": Goal((Bar(0.95),), (Bar(1.2),)),
    "W9": _PREFILL,
}
GOALS_OF: Mapping[str, Mapping[str, Goal]] = {
    "jitney": GOALS,
    "jitney-int8": {"W2": Goal((), (Bar(1.3, "jitney"), Bar(1.0)))},
}
"""Who has goals beside others. With int8 weights: beside our own bfloat16, and beside peers with int8 weights."""
TAX = Goal((Bar(0.93, "jitney-engine"),), (Bar(0.97, "jitney-engine"),))
"""The durable queue costs at most 7 %, and is to cost at most 3 %."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """Of two engines, over the rounds in which both counted."""

    median: float
    least: float
    most: float
    num_rounds: int

    def __str__(self) -> str:
        return f"×{self.median:.2f} ({self.least:.2f}–{self.most:.2f})"


def ratio(rounds: Rounds, ours: str, other: str) -> Ratio | None:
    """Median of the ratios of single rounds: both met the same machine. None if no round counts for both."""
    pairs = zip(rounds.get(ours, ()), rounds.get(other, ()), strict=False)
    found = [a / b for a, b in pairs if a is not None and b is not None]
    return Ratio(statistics.median(found), min(found), max(found), len(found)) if found else None


def best_peer(rounds: Rounds, ours: str = "jitney") -> str | None:
    """The peer that is hardest to beat at the precision of ours: the one with the lowest ratio."""
    precision = CONTENDERS[ours].precision
    ratios = {
        name: found.median
        for name, contender in CONTENDERS.items()
        if contender.is_peer and contender.precision == precision and (found := ratio(rounds, ours, name)) is not None
    }
    return min(ratios, key=lambda name: ratios[name], default=None)


def verdict(bar: Bar, rounds: Rounds, ours: str = "jitney") -> tuple[str, str]:
    """(what was reached, `met` or `not met`); dashes where the other one was not measured."""
    against = best_peer(rounds, ours) if bar.against == BEST else bar.against
    found = None if against is None else ratio(rounds, ours, against)
    if found is None:
        return "–", "not measured"
    named = f" of {against}" if bar.against == BEST else ""
    return f"{found}{named}", "met" if found.median >= bar.factor else "not met"


HEAD = ("workload", "goal", "bar", "reached", "")


def rows(measured: Mapping[str, Rounds], goals: Mapping[str, Goal] = GOALS, ours: str = "jitney") -> list[list[str]]:
    """One row for each bar of each workload that was measured."""
    return [
        [name, kind, str(bar), *verdict(bar, rounds, ours)]
        for name, rounds in measured.items()
        if name in goals
        for kind, bars in (("must", goals[name].must), ("aim", goals[name].aim))
        for bar in bars
    ]


def table(measured: Mapping[str, Rounds], goals: Mapping[str, Goal] = GOALS, ours: str = "jitney") -> str:
    return page.table(HEAD, rows(measured, goals, ours))
