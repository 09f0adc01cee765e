"""Figures of a run: as JSON for programs, as a table for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from jitney_worker.bench.percentiles import percentile
from jitney_worker.bench.rides import Run
from jitney_worker.bench.workloads import Workload

_ENGINE_FACTS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "num_blocks",
    "block_size",
    "policy",
    "enable_prefix_caching",
    "kernels",
    "quantization",
)


def figures(workload: Workload, mode: str, run: Run) -> dict[str, Any]:
    """tokens_per_s: output tokens over wall time, prompt tokens where the workload says so. Seconds elsewhere."""
    ttft = [ride.token_times[0] - ride.enqueued_at for ride in run.rides if ride.token_times]
    itl = [b - a for ride in run.rides for a, b in zip(ride.token_times, ride.token_times[1:], strict=False)]
    completion = [ride.ended_at - ride.enqueued_at for ride in run.rides]
    output_tokens = sum(len(ride.token_ids) for ride in run.rides)
    prompt_tokens = sum(len(job.prompt) for job in workload.jobs)
    counted = prompt_tokens if workload.counts_prompt else output_tokens
    return {
        "name": workload.name,
        "mode": mode,
        "num_jobs": len(run.rides),
        "output_tokens": output_tokens,
        "prompt_tokens": prompt_tokens,
        "wall_s": round(run.wall_s, 3),
        "tokens_per_s": round(counted / run.wall_s, 1),
        "ttft_s": _p50_p99(ttft),
        "itl_s": _p50_p99(itl),
        "completion_s": {"mean": round(sum(completion) / len(completion), 3), **_p50_p99(completion)},
        "num_preemptions": run.num_preemptions,
        "peak_rss_mb": run.peak_rss_mb,
        "load_cpu_s": round(run.load_cpu_s, 3),
        "dtype": run.features.get("dtype"),
        "device": run.features.get("device"),
        "other_cores": run.other_cores,
        "engine": {name: run.features[name] for name in _ENGINE_FACTS if name in run.features},
        "first_token_ids": [list(ride.token_ids[:32]) for ride in run.rides[:4]],
    } | ({} if run.profile is None else {"profile": run.profile})


def _p50_p99(values: Sequence[float]) -> dict[str, float]:
    return {"p50": round(percentile(values, 0.5), 4), "p99": round(percentile(values, 0.99), 4)}


def _readable(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1.0 else f"{seconds * 1_000:.1f} ms"


def table(result: dict[str, Any]) -> Table:
    """The same for people."""
    page = Table(title=f"{result['name']}, mode {result['mode']}", show_header=False)
    page.add_row("jobs", str(result["num_jobs"]))
    page.add_row("prompt / output tokens", f"{result['prompt_tokens']} / {result['output_tokens']}")
    page.add_row("wall", f"{result['wall_s']:.2f} s")
    page.add_row("tokens per second", f"{result['tokens_per_s']:.1f}")
    for key, label in (("ttft_s", "time to first token"), ("itl_s", "between tokens"), ("completion_s", "completion")):
        times = "   ".join(f"{name} {_readable(value)}" for name, value in result[key].items())
        page.add_row(label, times)
    page.add_row("preemptions", str(result["num_preemptions"]))
    page.add_row("peak RSS of the worker", f"{result['peak_rss_mb']:.0f} MB")
    page.add_row("CPU of the load generator", f"{result['load_cpu_s']:.2f} s")
    page.add_row("dtype, device", f"{result['dtype']}, {result['device']}")
    if result["other_cores"] is not None:
        page.add_row("cores that others used", f"{result['other_cores']:.2f}")
    for name, words in _profile_rows(result.get("profile", {})):
        page.add_row(name, words)
    return page


def _profile_rows(profile: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Steps, and what the mean one is made of, the largest part first."""
    if not profile.get("num_steps"):
        return
    times = "   ".join(f"{name} {value:.2f} ms" for name, value in profile["step_ms"].items())
    yield (
        "steps",
        f"{profile['num_steps']:,} of {profile['mean_batch']:.1f} sequences, {profile['mean_tokens']:.1f} tokens",
    )
    yield "a step", times
    for name, value in sorted(profile["parts_ms"].items(), key=lambda part: -part[1]):
        yield f"  {name}", f"{value:.3f} ms"
