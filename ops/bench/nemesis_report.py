"""What faults cost under a load that never ebbs: one row a scenario, every answer judged token by token.

    python -m ops.bench.nemesis_report [--seconds 20] [--model scripted] [--server valkey] [--write FILE] [--json FILE]

Three workers under a supervisor, 40 streams (half of them over HTTP) and 30 bulk jobs; whoever has its answer asks
the next question at once. The same load undisturbed comes first and last: gaps and tokens per second are given
beside it. Ends with 1 if a job failed, was lost, or said one token that a run alone would not have said.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ops.bench import page
from ops.bench.nemesis import figures
from ops.bench.nemesis.fields import MODELS
from ops.bench.nemesis.run import Conditions, Measured, run
from ops.bench.nemesis.scenarios import SCENARIOS, Scenario

HEAD = (
    *("", "faults", "jobs", "failed", "lost", "answers gone on with", "longest gap", "recovery: median, longest"),
    *("done twice: tokens, positions", "tokens/s"),
)


@dataclass(frozen=True, slots=True)
class Yardstick:
    """The undisturbed runs of the same go: what a gap and a rate are compared with."""

    lease_s: float
    gap_s: float
    tokens_per_s: float
    positions_per_token: float = 0.0

    @classmethod
    def of(cls, rows: Iterable[Measured], lease_s: float) -> Yardstick:
        """Of all rows that nothing was done to: their longest gap, and the mean of their rates."""
        calm = [row for row in rows if row.scenario.name == "undisturbed" and not row.wrong]
        if not calm:
            return cls(lease_s, 0.0, 0.0)
        gap_s = max(figures.longest_s(row.stalls) for row in calm)
        rate, positions = (sum(column) / len(calm) for column in zip(*(_pace(row) for row in calm), strict=True))
        return cls(lease_s, gap_s, rate, positions)


def _pace(row: Measured) -> tuple[float, float]:
    """Tokens a second, and positions computed for each of them."""
    return row.tokens_per_s, row.tally.num_computed / max(1, row.summary.num_tokens)


def row_of(measured: Measured, stick: Yardstick) -> dict[str, Any]:
    """The figures of one scenario by name, for programs."""
    recoveries = figures.recoveries_s(measured.faults, measured.stalls, stick.gap_s)
    longest_s, num_tokens = figures.longest_s(measured.stalls), measured.summary.num_tokens
    return {
        "scenario": measured.scenario.name,
        "seconds": measured.seconds,
        "faults": len(measured.faults),
        "jobs": measured.summary.num_accepted,
        "failed": measured.summary.num_otherwise,
        "lost": measured.summary.num_lost,
        "resumed": measured.resumed,
        "longest_gap_s": round(longest_s, 3),
        "slowest_first_event_s": round(measured.slowest_first_s, 3),
        "recoveries_s": [round(recovery, 3) for recovery in recoveries],
        "redis_away_s": [round(away, 3) for away in measured.away_s],
        "done_twice_percent": round(figures.percent_more(measured.tally.num_sampled, num_tokens), 2),
        "recomputed_percent": round(
            figures.percent_more(measured.tally.num_computed, round(stick.positions_per_token * num_tokens)), 2
        ),
        "tokens_per_s": round(measured.tokens_per_s, 1),
        "wrong": measured.wrong,
    }


def cells(measured: Measured, stick: Yardstick) -> list[str]:
    """The same, for people."""
    if measured.wrong:
        return [measured.title, "**promise broken**", *[""] * (len(HEAD) - 2)]
    row = row_of(measured, stick)
    recoveries, gap_s = row["recoveries_s"], row["longest_gap_s"]
    of_lease, of_calm = page.times(gap_s, stick.lease_s), page.times(gap_s, stick.gap_s, digits=1)
    return [
        measured.title,
        str(row["faults"]),
        f"{row['jobs']:,}",
        str(row["failed"]),
        str(row["lost"]),
        str(row["resumed"]),
        f"{gap_s:.2f} s ({of_lease} lease, {of_calm} undisturbed)",
        f"{figures.median(recoveries):.2f} s, {max(recoveries):.2f} s" if recoveries else "–",
        f"{row['done_twice_percent']:.1f} %, {row['recomputed_percent']:.1f} %",
        page.times(row["tokens_per_s"], stick.tokens_per_s),
    ]


def text(rows: Sequence[Measured], given: Conditions, server: str, machine: str, command: str) -> str:
    """The whole block: how it was measured, the table, and what its columns mean."""
    stick = Yardstick.of(rows, given.lease_s)
    return "\n\n".join(
        (
            page.paragraph(
                f"`{command}`, {server}: {given.seconds:g} s a row, three workers, lease {given.lease_s:g} s,",
                f"{given.num_streams} streams (half of them over HTTP) and {given.num_bulk} bulk jobs at any moment.",
                f"{machine}.",
            ),
            page.table(HEAD, [cells(row, stick) for row in rows]),
            page.paragraph(
                "*Failed*: ended otherwise than the same request alone ends. *Longest gap*: between two events of one",
                "stream, as its reader saw it. *Recovery*: from a fault until the last stream that it had silenced for",
                "longer than anything was silent in the undisturbed runs went on. *Done twice*: tokens sampled and",
                "not shown, because another worker had to sample them again, in percent of those shown; and positions",
                "run through the model (prompts and earlier tokens too) beyond what the undisturbed runs needed.",
                f"*tokens/s*: shown, as a multiple of the undisturbed runs' ({stick.tokens_per_s:,.0f} a second).",
            ),
        )
    )


async def run_all(wanted: Iterable[Scenario], given: Conditions, folder: Path) -> list[Measured]:
    rows = []
    for number, scenario in enumerate(wanted):
        print(f"{scenario.name} ...", file=sys.stderr, flush=True)
        rows.append(await run(scenario, given, Path(tempfile.mkdtemp(prefix=f"{number}-{scenario.name}-", dir=folder))))
        print("\n".join(f"  {line}" for line in rows[-1].wrong[:20]) or "  kept its promises", file=sys.stderr)
    return rows


def in_order(names: Sequence[str]) -> list[Scenario]:
    """What to run: the undisturbed run first and last, so that a machine that changes meanwhile is seen."""
    disturbed = [SCENARIOS[name] for name in names if name != "undisturbed"]
    return [SCENARIOS["undisturbed"], *disturbed, SCENARIOS["undisturbed"]]


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each row; the report of record: 120")
    parser.add_argument("--model", choices=MODELS, default="scripted")
    parser.add_argument("--server", choices=("valkey", "redis"), default="valkey")
    parser.add_argument("--lease-s", type=float, default=5.0)
    parser.add_argument("--streams", type=int, default=40)
    parser.add_argument("--bulk", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=[name for name in SCENARIOS if name != "undisturbed"])
    parser.add_argument("--write", type=Path, help="a document with a place for this table")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(words)


def main() -> int:
    asked = arguments()
    place = f"nemesis-{asked.model}"
    page.check_place(asked.write, place)
    binary = page.server_binary(asked.server)
    if binary is None:
        raise SystemExit(f"--server {asked.server}: there is none on this machine")
    machine = page.machine()
    folder = Path(tempfile.mkdtemp(prefix="jitney-nemesis-"))
    model = MODELS[asked.model]
    given = Conditions(
        model, model.directory(folder), binary, asked.seconds, asked.lease_s, asked.streams, asked.bulk, asked.seed
    )
    rows = asyncio.run(run_all(in_order(asked.only or list(SCENARIOS)), given, folder))
    if not any(row.wrong for row in rows):
        shutil.rmtree(folder)
    command = f"python -m ops.bench.nemesis_report --seconds {asked.seconds:g} --model {asked.model}"
    block = text(rows, given, page.server_version(binary), machine, command)
    print(block)
    page.write(asked.write, place, block)
    stick = Yardstick.of(rows, given.lease_s)
    if asked.json:
        asked.json.write_text(json.dumps([row_of(row, stick) for row in rows], indent=2) + "\n")
    return int(any(row.wrong or row.summary.num_otherwise or row.summary.num_lost for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
