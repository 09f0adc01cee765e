"""One run of one engine on one workload, in a process of its own, bounded in time."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ops.bench import flags
from ops.bench.peers.engines import Contender, Ours, Peer, Settings
from ops.bench.peers.load import RESULT

from jitney_worker.bench.quiet import is_disturbed
from jitney_worker.bench.workloads import BenchJob, Workload, load_workload

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Not passed on: `num_threads` alone says how many threads an engine has."""


@dataclass(frozen=True, slots=True)
class Ground:
    """What all engines of a comparison have in common. directory: of the model called `model`."""

    workload: Path
    model: str
    directory: Path
    num_threads: int
    limit: int | None = None
    timeout_s: float = 900.0
    """Of one run, its start included."""


@dataclass(frozen=True, slots=True)
class Quiet:
    """A run during which others used more than `most_cores` is repeated, up to `tries` in all."""

    most_cores: float
    tries: int


@dataclass(frozen=True, slots=True)
class Go:
    """What came of a run: figures as `jitney bench` names them, or why there are none."""

    engine: str
    figures: Mapping[str, Any]
    failure: str = ""

    @property
    def tokens_per_s(self) -> float:
        return float(self.figures["tokens_per_s"])

    def is_disturbed(self, most: float) -> bool:
        """Did others take more than `most` cores meanwhile?"""
        return not self.failure and is_disturbed(self.figures.get("other_cores"), most)


def go(contender: Contender, name: str, ground: Ground, settings: Settings | None = None) -> Go:
    """Run once. A failure of the engine is told, not raised: others are to be compared all the same."""
    chosen = contender.tuning[0] if settings is None else settings
    if isinstance(contender, Ours):
        return _ours(contender, name, ground, chosen)
    assert isinstance(contender, Peer)
    return _peer(contender, name, ground, chosen)


def quiet_go(contender: Contender, name: str, ground: Ground, settings: Settings | None, quiet: Quiet) -> list[Go]:
    """Repeat a run that others disturbed; all runs, of which only the last one may count."""
    runs: list[Go] = []
    while not runs or (runs[-1].is_disturbed(quiet.most_cores) and len(runs) < quiet.tries):
        runs.append(go(contender, name, ground, settings))
        flags.say(f"  {contender.name}: {_words(runs[-1], quiet)}")
    return runs


def _words(run: Go, quiet: Quiet) -> str:
    if run.failure:
        return f"failed: {run.failure.splitlines()[-1]}"
    others = run.figures.get("other_cores")
    disturbed = f", but others took {others:.2f} cores" if run.is_disturbed(quiet.most_cores) else ""
    return f"{run.tokens_per_s:,.1f} tokens/s{disturbed}"


def _ours(contender: Ours, name: str, ground: Ground, settings: Settings) -> Go:
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.json"
        words = contender.command(ground.workload, name, str(ground.directory), settings, figures)
        words += ["--num-threads", str(ground.num_threads)]
        if ground.limit is not None and "--limit" not in words:
            words += ["--limit", str(ground.limit)]
        _, failure = _run(words, os.environ, "", ground.timeout_s)
        if failure:
            return Go(contender.name, {}, failure)
        return Go(contender.name, {**json.loads(figures.read_text()), "settings": dict(settings)})


def _peer(contender: Peer, name: str, ground: Ground, settings: Settings) -> Go:
    workload = load_workload(ground.workload, name, limit=contender.limits.get(name, ground.limit))
    words = [str(contender.python), "-m", f"ops.bench.peers.{contender.module}"]
    load = load_for(workload, contender.model(ground.directory, ground.model), ground.num_threads, settings)
    said, failure = _run(words, contender.variables(), json.dumps(load), ground.timeout_s)
    results = [line.removeprefix(RESULT) for line in said.splitlines() if line.startswith(RESULT)]
    if failure or not results:
        return Go(contender.name, {}, failure or "it printed no result")
    return Go(contender.name, json.loads(results[-1]))


def load_for(workload: Workload, model: Path, num_threads: int, settings: Settings) -> dict[str, Any]:
    """A workload as peers read it. All its jobs arrive at once: peers have no clock."""
    if any(job.arrives_at_s for job in workload.jobs):
        raise ValueError(f"{workload.name} comes over time, which no peer is told")
    return {
        "name": workload.name,
        "jobs": list(map(_plain, workload.jobs)),
        "warm": list(map(_plain, workload.warm)),
        "prime": list(map(_plain, workload.prime)),
        "seats": workload.seats,
        "prefix_caching": workload.prefix_caching,
        "repeats": workload.repeats,
        "counts_prompt": workload.counts_prompt,
        "model": str(model),
        "num_threads": num_threads,
        "settings": dict(settings),
    }


def _plain(job: BenchJob) -> dict[str, Any]:
    return {
        "prompt": job.prompt,
        "max_tokens": job.max_tokens,
        "temperature": job.temperature,
        "top_p": job.top_p,
        "seed": job.seed,
    }


def _run(words: Sequence[str], environment: Mapping[str, str], given: str, timeout_s: float) -> tuple[str, str]:
    """Standard output, and why the program failed: empty if it did not. All it started ends with it."""
    with subprocess.Popen(
        words,
        env={name: value for name, value in environment.items() if name not in _THREADS},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as program:
        try:
            said, complained = program.communicate(given, timeout_s)
        except subprocess.TimeoutExpired:
            return "", f"it took longer than {timeout_s:g} s"
        finally:
            _end_group(program)
    if program.returncode:
        return said, complained.strip()[-2_000:] or f"it ended with {program.returncode}"
    return said, ""


def _end_group(program: subprocess.Popen[str]) -> None:
    """Whatever is left of the program's own session, which nobody else is in."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)
    program.wait()
