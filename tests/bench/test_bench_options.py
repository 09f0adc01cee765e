"""What `jitney bench` is told: contradictions are refused by name, and the rest reaches the engine."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from jitney.errors import SettingsError
from jitney_worker.bench.options import BenchOptions
from jitney_worker.bench.run import worker_flags
from jitney_worker.bench.workloads import NAMES, load_workload


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "fast"}, "--mode 'fast' is not one of path, engine, static, serial, naive"),
        ({"policy": "lazy"}, "--policy 'lazy' is not one of continuous, static"),
        ({"is_profiled": True}, "--profile looks into an engine in this process: use --mode engine, not path"),
        ({"queue": "q"}, "--queue q is of a running stack: say where it is (--redis-url)"),
        ({"redis_url": "redis://x", "mode": "engine"}, "--mode engine starts an engine of its own"),
        ({"redis_url": "redis://x", "seats": 3}, "--seats 3 shapes a worker of our own: leave --redis-url out"),
        ({"redis_url": "redis://x", "dtype": "auto"}, "--dtype auto shapes a worker of our own"),
        ({"mode": "static", "policy": "continuous"}, "--policy continuous contradicts --mode static"),
        ({"mode": "serial", "seats": 2}, "--seats 2 contradicts --mode serial, which means --seats 1"),
        ({"mode": "serial", "policy": "static"}, "--policy static contradicts --mode serial"),
        ({"mode": "naive", "num_kv_blocks": 9}, "--num-kv-blocks 9 means nothing to --mode naive"),
    ],
)
def test_a_contradiction_is_refused_by_name_and_value(options: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError) as refused:
        BenchOptions(**options)
    assert words in str(refused.value)


def test_two_sizes_of_one_cache_are_refused_by_name(tiny_workload: Path, tiny_model: Path) -> None:
    options = BenchOptions(num_kv_blocks=9, kv_cache_bytes=10)
    with pytest.raises(SettingsError, match=r"engine\.num_kv_blocks=9 and engine\.kv_cache_bytes=10"):
        options.worker_settings(load_workload(tiny_workload, "W5"), tiny_model)


def test_everything_that_was_asked_for_reaches_the_worker(tiny_workload: Path, tiny_model: Path) -> None:
    options = BenchOptions(
        model=str(tiny_model),
        seats=3,
        policy="static",
        max_num_batched_tokens=77,
        num_kv_blocks=99,
        num_threads=2,
        dtype="float32",
        kernels="torch",
    )
    settings = options.worker_settings(load_workload(tiny_workload, "W8"), tiny_model)
    assert (settings.num_threads, settings.kernels, settings.engine.enable_prefix_caching) == (2, "torch", True)
    assert worker_flags(settings) == (
        *("--model", str(tiny_model), "--queue", "tiny-llama", "--dtype", "float32"),
        *(
            "--quantization",
            "none",
            "--max-num-seqs",
            "3",
            "--max-num-batched-tokens",
            "77",
            "--num-kv-blocks",
            "99",
            "--policy",
            "static",
        ),
    )


@pytest.mark.parametrize(
    ("mode", "seats", "policy"),
    [("path", 32, "continuous"), ("engine", 32, "continuous"), ("static", 32, "static"), ("serial", 1, "continuous")],
)
def test_seats_and_policy_are_the_modes(
    mode: str, seats: int, policy: str, tiny_workload: Path, tiny_model: Path
) -> None:
    engine = BenchOptions(mode=mode).worker_settings(load_workload(tiny_workload, "W5"), tiny_model).engine
    assert (engine.max_num_seqs, engine.policy, engine.enable_prefix_caching) == (seats, policy, False)


SHAPES = {
    "W1": (6, 64, 30, 1),
    "W2": (6, 64, 30, 1),
    "W3": (1, 1, 12, 3),
    "W4": (1, 1, 1, 3),
    "W5": (20, 32, 656, 1),
    "W6": (20, 32, 656, 1),
    "W7": (5, 32, 130, 1),
    "W7G": (5, 32, 130, 1),
    "W8": (5, 4, 20, 1),
    "W8P": (5, 4, 20, 1),
    "W9": (2, 2, 8, 1),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_workload_has_its_jobs_seats_tokens_and_repeats(name: str, tiny_workload: Path) -> None:
    found = load_workload(tiny_workload, name)
    assert (len(found.jobs), found.seats, sum(job.max_tokens for job in found.jobs), found.repeats) == SHAPES[name]
    assert (found.prefix_caching, bool(found.prime)) == (name in ("W8", "W8P"), name == "W8P")
    assert found.counts_prompt is (name == "W4")


def test_the_greedy_twin_of_w7_differs_in_nothing_but_its_sampling(tiny_workload: Path) -> None:
    sampled, greedy = (load_workload(tiny_workload, name).jobs for name in ("W7", "W7G"))
    assert [(job.prompt, job.max_tokens) for job in sampled] == [(job.prompt, job.max_tokens) for job in greedy]
    assert {(job.temperature, job.top_p) for job in sampled} == {(0.8, 0.95)}
    assert [job.seed for job in sampled] == [1, 2, 3, 4, 5]
    assert {(job.temperature, job.seed) for job in greedy} == {(0.0, None)}


def test_w6_comes_at_the_sums_of_its_gaps_over_the_rate(tiny_workload: Path) -> None:
    once, twice = (load_workload(tiny_workload, "W6", rate_per_s=rate).jobs for rate in (1.0, 2.0))
    assert [job.arrives_at_s for job in twice] == [pytest.approx(job.arrives_at_s / 2) for job in once]
    assert once[0].arrives_at_s > 0
    assert all(a.arrives_at_s < b.arrives_at_s for a, b in pairwise(once))
