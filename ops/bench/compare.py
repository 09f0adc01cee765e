"""jitney beside other engines: the same weights, prompts, threads and seats, in one go, taking turns.

    python -m ops.bench.compare --names W1,W2,W5 --engines jitney,openvino,vllm --rounds 3 \\
        [--ours jitney-int8] [--tune] [--json FILE] [--write ops/bench/RESULTS.md]

Every run is a process of its own: it loads, warms up, and only then is timed. In each round all engines run one after
the other, in the next one in the opposite order. A run during which other processes took more than 0.2 cores is
repeated; if the last try is disturbed too, that engine has no figure in that round. What is compared is the ratio of
two engines in one round; its median over the rounds is told, with the lowest and the highest.

--tune gives every engine the same budget first: each of its three settings is tried once per workload, and the fastest
is kept. Without it each runs as it comes. --add keeps what an earlier run has left of other workloads in the --json
file, so that a long comparison can be made in parts. A workload takes about ten minutes with vLLM, which needs more
than a minute to start, and five without.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from ops.bench import chart, flags, goals, page
from ops.bench.go import Go, Ground, Quiet, go, quiet_go
from ops.bench.peers.engines import CONTENDERS, Contender, Peer, Settings

from jitney.errors import SettingsError
from jitney_worker.bench.workloads import NAMES
from jitney_worker.model.resolve import resolve

PLACE = "compare"
COMPARED = tuple(name for name in NAMES if name not in ("W6", "W7G"))


@dataclass(slots=True)
class Outcome:
    """One workload. counted: of each engine, one entry a round, None where the round does not count for it."""

    name: str
    settings: dict[str, Settings]
    num_tuning_runs: dict[str, int]
    runs: list[dict[str, Any]] = field(default_factory=list)
    counted: dict[str, list[Go | None]] = field(default_factory=dict)

    @property
    def rounds(self) -> dict[str, list[float | None]]:
        return {
            engine: [None if one is None else one.tokens_per_s for one in runs] for engine, runs in self.counted.items()
        }

    def failure(self, engine: str) -> str:
        """Why it has no figures, in its last words; empty if it has, or was only disturbed."""
        failures = [run["failure"] for run in self.runs if run["contender"] == engine and run["failure"]]
        return failures[-1].splitlines()[-1][:100] if failures else ""


def ground_of(asked: argparse.Namespace) -> Ground:
    """Raises ModelError for a model that is not here."""
    directory = resolve(asked.model)
    name = directory.name if Path(asked.model).is_dir() else asked.model
    return Ground(asked.workload, name, directory, asked.num_threads, asked.limit, asked.timeout_s)


def contenders(names: Sequence[str] | None, ground: Ground) -> list[Contender]:
    """Those asked for, in that order, or all that are set up. Raises SettingsError for one that is not."""
    chosen = []
    for name in names or CONTENDERS:
        contender = CONTENDERS[name]
        try:
            if isinstance(contender, Peer):
                contender.check_set_up(ground.directory, ground.model)
        except SettingsError as error:
            if names:
                raise
            flags.say(f"left out: {error}")
            continue
        chosen.append(contender)
    return chosen


def tuned(contender: Contender, name: str, ground: Ground) -> tuple[Settings, int]:
    """The fastest of its settings, each tried once, and how many there were."""
    tries = [(settings, go(contender, name, ground, settings)) for settings in contender.tuning]
    for settings, run in tries:
        told = run.failure.splitlines()[-1] if run.failure else f"{run.tokens_per_s:,.1f} tokens/s"
        flags.say(f"  {contender.name} with {dict(settings) or 'nothing'}: {told}")
    best = max(tries, key=lambda tried: 0.0 if tried[1].failure else tried[1].tokens_per_s)
    return best[0], len(tries)


def compare(name: str, chosen: Sequence[Contender], ground: Ground, asked: argparse.Namespace) -> Outcome:
    """All rounds of one workload."""
    quiet = Quiet(asked.most_other_cores, asked.tries)
    taking_part = [contender for contender in chosen if contender.runs(name)]
    outcome = Outcome(name, {}, {})
    for contender in taking_part:
        settings, num_runs = (contender.tuning[0], 0)
        if asked.tune and len(contender.tuning) > 1:
            settings, num_runs = tuned(contender, name, ground)
        outcome.settings[contender.name], outcome.num_tuning_runs[contender.name] = settings, num_runs
        outcome.counted[contender.name] = []
    for number in range(1, asked.rounds + 1):
        flags.say(f"{name}, round {number} of {asked.rounds}")
        for contender in taking_part if number % 2 else taking_part[::-1]:
            runs = quiet_go(contender, name, ground, outcome.settings[contender.name], quiet)
            last = runs[-1]
            counts = not last.failure and not last.is_disturbed(quiet.most_cores)
            outcome.counted[contender.name].append(last if counts else None)
            outcome.runs += [_wire(name, number, run, counts=counts and run is last) for run in runs]
    return outcome


def _wire(name: str, number: int, run: Go, *, counts: bool) -> dict[str, Any]:
    """A run for programs, and for `kept`."""
    about = {"name": name, "round": number, "contender": run.engine, "failure": run.failure, "counts": counts}
    return {**run.figures, **about}


def kept(path: Path | None, names: Sequence[str]) -> list[Outcome]:
    """Outcomes of workloads other than `names` in a file that an earlier run has written; none without one."""
    if path is None or not path.exists():
        return []
    try:
        earlier = json.loads(path.read_text())
        return [_outcome(earlier, name) for name in earlier["rounds"] if name not in names]
    except (KeyError, TypeError, ValueError) as error:
        raise SettingsError(f"--add: {path} is not of this command: {type(error).__name__}: {error}") from None


def _outcome(earlier: Mapping[str, Any], name: str) -> Outcome:
    """One workload as it was when it was measured."""
    runs = [run for run in earlier["runs"] if run["name"] == name]
    outcome = Outcome(name, earlier["settings"][name], earlier["num_tuning_runs"][name], runs)
    for engine, rates in earlier["rounds"][name].items():
        counted = {run["round"]: Go(engine, run) for run in runs if run["contender"] == engine and run["counts"]}
        outcome.counted[engine] = [counted.get(number) for number in range(1, len(rates) + 1)]
    return outcome


def agreement(ours: Go | None, other: Go | None) -> str:
    """Of the first four jobs: how many of the first 32 tokens are the same before one differs."""
    if ours is None or other is None:
        return "–"
    pairs = zip(ours.figures["first_token_ids"], other.figures["first_token_ids"], strict=False)
    found = []
    for one, another in pairs:
        alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, another, strict=False)))
        found.append("all" if alike == min(len(one), len(another)) else str(alike))
    return " ".join(found) or "–"


HEAD = ("engine", "tokens/s", "spread", "jitney is", "spread", "first tokens alike", "peak RSS, MB", "settings")


def outcome_rows(outcome: Outcome, ours: str) -> list[list[str]]:
    """One row for each engine of a workload."""
    first = next((run for run in outcome.counted.get(ours, []) if run is not None), None)
    found = []
    for engine, runs in outcome.counted.items():
        counted = [run for run in runs if run is not None]
        if not counted:
            why = outcome.failure(engine) or "disturbed in every round"
            found.append([CONTENDERS[engine].about, "–", why, "–", "–", "–", "–", "–"])
            continue
        rates = [run.tokens_per_s for run in counted]
        ratio = goals.ratio(outcome.rounds, ours, engine) if engine != ours else None
        alike = "–" if outcome.name == "W7" or engine == ours else agreement(first, counted[0])
        found.append(
            [
                CONTENDERS[engine].about,
                f"{statistics.median(rates):,.0f}",
                f"{min(rates):,.0f}–{max(rates):,.0f} of {len(rates)}",
                "–" if ratio is None else f"×{ratio.median:.2f}",
                "–" if ratio is None else f"{ratio.least:.2f}–{ratio.most:.2f}",
                alike,
                f"{max(run.figures['peak_rss_mb'] for run in counted):,.0f}",
                _settings(outcome, engine),
            ]
        )
    return found


def _settings(outcome: Outcome, engine: str) -> str:
    words = ", ".join(f"{name} {value}" for name, value in outcome.settings[engine].items()) or "as it comes"
    num_tried = outcome.num_tuning_runs[engine]
    return f"{words} (best of {num_tried})" if num_tried else words


def versions(outcomes: Sequence[Outcome]) -> str:
    """What was compared, as each names itself."""
    found = {run["contender"]: run["version"] for one in outcomes for run in one.runs if run.get("version")}
    return ", ".join(f"{engine} {version}" for engine, version in found.items())


def text(outcomes: Sequence[Outcome], ground: Ground, asked: argparse.Namespace, machine: str) -> str:
    bars = goals.GOALS_OF[asked.ours]
    dropped = sum(run is None for one in outcomes for runs in one.counted.values() for run in runs)
    tuned_names = [one.name for one in outcomes if any(one.num_tuning_runs.values())]
    budget = f"each tried with three settings on {', '.join(tuned_names)}" if tuned_names else "each as it comes"
    peers = versions(outcomes)
    parts = [
        page.paragraph(
            f"{machine}. {ground.model}, {ground.num_threads} threads; {asked.rounds} rounds,",
            f"{budget}{'; ' + peers if peers else ''}.",
            f"{dropped} runs do not count: they failed, or others disturbed even the last of {asked.tries} tries.",
            "Output tokens per second of wall time with loading and warming up left out (W4: prompt tokens).",
        )
    ]
    measured = {one.name: one.rounds for one in outcomes}
    if goals.rows(measured, bars, asked.ours):
        parts.append(goals.table(measured, bars, asked.ours))
    for one in outcomes:
        parts += [f"**{one.name}**", page.table(HEAD, outcome_rows(one, asked.ours))]
    parts.append(
        page.paragraph(
            f"*Jitney is*: the median, over rounds, of the rate of *{CONTENDERS[asked.ours].about}* over that of the",
            "engine, in the same round. *First tokens alike*: of the first four jobs, how many of the first 32 greedy",
            "tokens are the same before one differs. Products added up in another order give another token where two",
            "are almost equally likely.",
        )
    )
    return "\n\n".join(parts)


def picture(outcomes: Sequence[Outcome], machine: str, ours: str) -> chart.Chart | None:
    """Each engine's median on each workload, as a multiple of the best peer's, or of the first engine's without one.

    None if nothing counts.
    """
    bases = {one.name: goals.best_peer(one.rounds, ours) or next(iter(one.rounds), "") for one in outcomes}
    lines = []
    for engine in dict.fromkeys(engine for one in outcomes for engine in one.counted):
        ratios = [(number, goals.ratio(one.rounds, engine, bases[one.name])) for number, one in enumerate(outcomes, 1)]
        points = tuple((float(number), ratio.median) for number, ratio in ratios if ratio is not None)
        lines.append(chart.Series(CONTENDERS[engine].about, points, is_joined=False))
    if not any(line.points for line in lines):
        return None
    has_peer = any(CONTENDERS[base].is_peer for base in bases.values() if base)
    ticks = tuple((float(number), one.name) for number, one in enumerate(outcomes, 1))
    ticks = (*ticks, (len(outcomes) + 1.0, ""))
    label = "times the best peer's" if has_peer else "times the first engine's"
    panel = chart.Panel("tokens per second", "workload", label, tuple(lines), ticks)
    return chart.Chart("Beside other engines", machine, (panel,))


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = flags.parser(__doc__)
    flags.add_picture(parser)
    parser.add_argument("--names", type=flags.listed(str, COMPARED), default=("W5",), metavar="W1,W5")
    parser.add_argument("--engines", type=flags.listed(str, tuple(CONTENDERS)), metavar="jitney,vllm")
    parser.add_argument(
        "--ours", choices=tuple(goals.GOALS_OF), default="jitney", help="who is held against the others"
    )
    parser.add_argument("--rounds", type=flags.positive, default=3)
    parser.add_argument("--add", action="store_true", help="keep what the --json file has of other workloads")
    parser.add_argument("--tune", action="store_true", help="try each engine's settings first, once each")
    flags.add_quiet(parser)
    flags.add_ground(parser)
    return parser.parse_args(words)


def report(
    outcomes: Sequence[Outcome], machine: str, bars: Mapping[str, goals.Goal], ours: str = "jitney"
) -> Mapping[str, Any]:
    """For programs."""
    measured = {one.name: one.rounds for one in outcomes}
    return {
        "machine": machine,
        "goals": [
            dict(zip((*goals.HEAD[:4], "verdict"), row, strict=True)) for row in goals.rows(measured, bars, ours)
        ],
        "settings": {one.name: {engine: dict(chosen) for engine, chosen in one.settings.items()} for one in outcomes},
        "num_tuning_runs": {one.name: one.num_tuning_runs for one in outcomes},
        "rounds": measured,
        "runs": [run for one in outcomes for run in one.runs],
    }


@flags.told()
def main(words: Sequence[str] | None = None) -> None:
    asked = arguments(words)
    place = PLACE if asked.ours == "jitney" else f"{PLACE}-{asked.ours}"
    page.check_place(asked.write, place)
    machine = page.machine()
    ground = ground_of(asked)
    chosen = contenders(asked.engines, ground)
    bars = goals.GOALS_OF[asked.ours]
    outcomes = kept(asked.json, asked.names) if asked.add else []
    for name in asked.names:
        outcomes.append(compare(name, chosen, ground, asked))
        outcomes.sort(key=lambda one: COMPARED.index(one.name))
        if asked.json is not None:  # a long run that is cut short leaves what it has
            flags.write_json(asked.json, report(outcomes, machine, bars, asked.ours))
    found = report(outcomes, machine, bars, asked.ours)
    flags.leave_behind(asked, place, text(outcomes, ground, asked, machine), found)
    drawn = picture(outcomes, machine, asked.ours)
    if drawn is not None:
        chart.write(asked.svg, drawn)


if __name__ == "__main__":
    main()
