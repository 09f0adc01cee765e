"""Named workloads out of a JSON file: which jobs, how many seats, when they arrive."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import orjson

from jitney.errors import SettingsError

NAMES = ("W1", "W2", "W3", "W4", "W5", "W6", "W7", "W7G", "W8", "W8P", "W9")
MAX_SEATS = 64


@dataclass(frozen=True, slots=True)
class BenchJob:
    """One job of a workload. arrives_at_s: after the start. End tokens are ignored, so lengths are exact."""

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    arrives_at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """jobs: what is timed. warm: run before, not counted. prime: run before to fill the prefix cache.

    repeats: how often it is run; the best counts. counts_prompt: the rate is prompt tokens per second.
    """

    name: str
    model: str
    jobs: tuple[BenchJob, ...]
    seats: int
    warm: tuple[BenchJob, ...]
    prime: tuple[BenchJob, ...] = ()
    prefix_caching: bool = False
    repeats: int = 1
    counts_prompt: bool = False


def load_workload(path: Path, name: str, *, rate_per_s: float = 1.0, limit: int | None = None) -> Workload:
    """The workload `name` of a file; at most `limit` of its jobs. Raises SettingsError."""
    if name not in NAMES:
        raise SettingsError(f"--name {name!r} is not one of {', '.join(NAMES)}")
    try:
        contents = orjson.loads(path.read_bytes())
    except OSError as error:
        raise SettingsError(f"--workload {path}: {error.strerror}") from None
    except orjson.JSONDecodeError as error:
        raise SettingsError(f"--workload {path} is not JSON: {error}") from None
    try:
        workload = _named(contents, name, rate_per_s)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise SettingsError(f"--workload {path} does not hold {name}: {type(error).__name__}: {error}") from None
    workload = replace(workload, jobs=workload.jobs[:limit])
    if not workload.jobs:
        raise SettingsError(f"--workload {path} holds no job of {name}")
    return workload


def _named(contents: dict[str, Any], name: str, rate_per_s: float) -> Workload:
    warm = tuple(BenchJob(tuple(prompt), 8) for prompt in contents["warm"])
    model = contents["model"]
    if name in ("W1", "W2"):
        lengths = contents[f"{name.lower()}_out"]
        jobs = tuple(BenchJob(tuple(p), n) for p, n in zip(contents["prompts"], lengths, strict=True))
        return Workload(name, model, jobs, MAX_SEATS, warm)
    if name in ("W3", "W4"):
        one = BenchJob(tuple(contents[name.lower()]["prompt"]), contents["w3"]["out"] if name == "W3" else 1)
        return Workload(name, model, (one,), 1, warm, repeats=3, counts_prompt=name == "W4")
    if name in ("W5", "W6", "W7", "W7G"):
        return _mixed(contents, name, rate_per_s, warm)
    if name == "W9":
        w9 = contents["w9"]
        return Workload(name, model, tuple(BenchJob(tuple(p), w9["out"]) for p in w9["prompts"]), w9["seats"], warm)
    w8 = contents["w8"]
    jobs = tuple(BenchJob((*w8["prefix"], *suffix), w8["out"]) for suffix in w8["suffixes"])
    prime = (BenchJob((*w8["prefix"], *contents["warm"][0][:32]), 1),) if name == "W8P" else ()
    return Workload(name, model, jobs, w8["seats"], warm, prime=prime, prefix_caching=True)


def _mixed(contents: dict[str, Any], name: str, rate_per_s: float, warm: tuple[BenchJob, ...]) -> Workload:
    """W5, and its variations: as a Poisson stream (W6), sampled (W7), and the jobs of W7 greedy (W7G)."""
    jobs = [BenchJob(tuple(row["prompt"]), row["out"]) for row in contents["w5"]]
    if name == "W6":
        times = accumulate(gap / rate_per_s for gap in contents["w6_gaps"])
        jobs = [replace(job, arrives_at_s=at) for job, at in zip(jobs, times, strict=True)]
    if name == "W7":
        w7 = contents["w7"]
        jobs = [
            replace(job, temperature=w7["temperature"], top_p=w7["top_p"], seed=seed)
            for job, seed in zip(jobs, w7["seeds"], strict=False)
        ][: w7["n"]]
    if name == "W7G":
        jobs = jobs[: contents["w7"]["n"]]
    return Workload(name, contents["model"], tuple(jobs), 32, warm)
