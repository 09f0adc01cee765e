"""What a peer is given and what it gives back: plain jobs on standard input, one line `RESULT {json}` at the end.

Every peer runs in an environment of its own, in which jitney is not installed: of the project it imports nothing but
this, and two files of the standard library's that `PYTHONPATH` shows it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jitney_worker.bench.percentiles import percentile
from jitney_worker.bench.quiet import Reading, other_cores, reading

RESULT = "RESULT "


@dataclass(frozen=True, slots=True)
class PeerJob:
    """Exactly `max_tokens` tokens are wanted: end tokens are ignored. temperature 0 = greedy."""

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    top_p: float
    seed: int | None


@dataclass(frozen=True, slots=True)
class Load:
    """A workload for a peer. settings: what it is tuned with; each peer knows its own names."""

    name: str
    jobs: tuple[PeerJob, ...]
    warm: tuple[PeerJob, ...]
    prime: tuple[PeerJob, ...]
    seats: int
    prefix_caching: bool
    repeats: int
    counts_prompt: bool
    model: Path
    num_threads: int
    settings: dict[str, int] = field(default_factory=dict)

    @property
    def longest(self) -> int:
        """Tokens of the longest job, prompt and output."""
        return max(len(job.prompt) + job.max_tokens for job in (*self.jobs, *self.warm, *self.prime))


@dataclass(frozen=True, slots=True)
class Outcome:
    """Tokens of each job, and when it was done, in seconds from the start; empty where the engine does not say."""

    token_ids: tuple[tuple[int, ...], ...]
    ended_s: tuple[float, ...] = ()


Generate = Callable[[Sequence[PeerJob]], Outcome]


def read_load() -> Load:
    """The load on standard input."""
    given = json.load(sys.stdin)
    for group in ("jobs", "warm", "prime"):
        given[group] = tuple(PeerJob(**{**job, "prompt": tuple(job["prompt"])}) for job in given[group])
    return Load(**{**given, "model": Path(given["model"])})


def measure(load: Load, generate: Generate, *, engine: str, version: str, dtype: str, load_s: float) -> None:
    """Warm up, prime, run (the best of `repeats`), and print the figures.

    Raises AssertionError if a job did not get the tokens it was asked for.
    """
    if load.warm:
        generate(load.warm)
    if load.prime:
        generate(load.prime)
    best: dict[str, Any] | None = None
    for _ in range(load.repeats):
        before, start = reading(), time.monotonic()
        outcome = generate(load.jobs)
        wall_s, after = time.monotonic() - start, reading()
        if best is None or wall_s < best["wall_s"]:
            best = figures(load, outcome, wall_s, before, after)
    assert best is not None, "a load is run at least once"
    about = {"mode": engine, "version": version, "dtype": dtype, "load_s": round(load_s, 2), "settings": load.settings}
    print(f"{RESULT}{json.dumps({**about, **best, 'peak_rss_mb': tree_rss_mb()})}", flush=True)


def figures(
    load: Load, outcome: Outcome, wall_s: float, before: Reading | None, after: Reading | None
) -> dict[str, Any]:
    """Named as in the figures of `jitney bench`."""
    wanted = [job.max_tokens for job in load.jobs]
    came = [len(ids) for ids in outcome.token_ids]
    assert came == wanted, f"{load.name}: {came} tokens came, {wanted} were asked for"
    prompt_tokens, output_tokens = sum(len(job.prompt) for job in load.jobs), sum(came)
    found: dict[str, Any] = {
        "name": load.name,
        "num_jobs": len(load.jobs),
        "output_tokens": output_tokens,
        "prompt_tokens": prompt_tokens,
        "wall_s": round(wall_s, 3),
        "tokens_per_s": round((prompt_tokens if load.counts_prompt else output_tokens) / wall_s, 1),
        "other_cores": other_cores(before, after),
        "first_token_ids": [list(ids[:32]) for ids in outcome.token_ids[:4]],
    }
    if outcome.ended_s:
        found["completion_s"] = {
            "mean": round(sum(outcome.ended_s) / len(outcome.ended_s), 3),
            "p50": round(percentile(outcome.ended_s, 0.5), 3),
            "p99": round(percentile(outcome.ended_s, 0.99), 3),
        }
    return found


def tree_rss_mb(proc: Path = Path("/proc")) -> float:
    """Highest resident memory of this process and of all that descend from it, added up, in MB."""
    parents: dict[int, int] = {}
    peaks: dict[int, int] = {}
    for entry in proc.glob("[0-9]*"):
        try:
            lines = dict(line.split(":", 1) for line in (entry / "status").read_text().splitlines() if ":" in line)
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
        parents[int(entry.name)] = int(lines["PPid"])
        peaks[int(entry.name)] = int(lines.get("VmHWM", "0 kB").split()[0])
    ours = {int((proc / "self").resolve().name)}
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    return round(sum(peaks[pid] for pid in ours if pid in peaks) / 1_000, 1)
