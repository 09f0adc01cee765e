"""Run a workload as it is done without any of this: transformers' `generate`, one job after the other."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from jitney_worker.bench.quiet import other_cores, reading
from jitney_worker.bench.rides import AfterEach, Ride, Run, peak_rss_mb, unwatched
from jitney_worker.bench.workloads import BenchJob, Workload


class TokenClock:
    """What `generate` calls a streamer: notes when each token came."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._is_prompt = True

    def put(self, value: Any) -> None:
        """The prompt first, as transformers has it, then one token at a time."""
        if not self._is_prompt:
            self.times.append(time.monotonic())
        self._is_prompt = False

    def end(self) -> None:
        """All tokens have come."""


def load_naive(directory: Path, dtype: str, num_threads: int | None) -> Any:
    """The model as transformers loads it; it never stops before `max_new_tokens`. dtype: as a worker takes it."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from jitney_worker.model.runner import pick_dtype

    if num_threads is not None:
        torch.set_num_threads(num_threads)
    logging.disable_progress_bar()
    kind = pick_dtype(dtype, torch.device("cpu"))
    model = AutoModelForCausalLM.from_pretrained(str(directory), dtype=kind, local_files_only=True).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def measure_naive(model: Any, workload: Workload, after_each: AfterEach = unwatched) -> Run:
    """Warm up, then run (the best of `repeats`). A prefix cache is not a thing here, so nothing is primed."""
    for job in workload.warm[:2]:
        generate(model, job)
    runs = [_timed(model, workload.jobs, after_each) for _ in range(workload.repeats)]
    return min(runs, key=lambda run: run.wall_s)


def _timed(model: Any, jobs: Sequence[BenchJob], after_each: AfterEach) -> Run:
    before, start = reading(), time.monotonic()
    rides = []
    for job in jobs:
        time.sleep(max(0.0, start + job.arrives_at_s - time.monotonic()))
        rides.append(_ride(model, job, start + job.arrives_at_s))
        after_each()
    wall_s, after = time.monotonic() - start, reading()
    return Run(
        tuple(rides),
        wall_s,
        load_cpu_s=0.0,
        num_preemptions=0,
        peak_rss_mb=peak_rss_mb(),
        features={"dtype": str(model.dtype).removeprefix("torch."), "device": str(model.device), "max_num_seqs": 1},
        other_cores=other_cores(before, after),
    )


def _ride(model: Any, job: BenchJob, enqueued_at: float) -> Ride:
    clock = TokenClock()
    token_ids = generate(model, job, clock)
    return Ride(enqueued_at, tuple(clock.times), time.monotonic(), tuple(token_ids))


@torch.inference_mode()
def generate(model: Any, job: BenchJob, clock: TokenClock | None = None) -> list[int]:
    """The job's tokens, exactly `max_tokens` of them."""
    prompt = torch.tensor([job.prompt])
    options: dict[str, Any] = {"do_sample": False}
    if job.temperature > 0:
        torch.manual_seed(job.seed or 0)
        options = {"do_sample": True, "temperature": job.temperature, "top_p": job.top_p, "top_k": 0}
    output = model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=job.max_tokens,
        streamer=clock,
        **options,
    )
    token_ids: list[int] = output[0, prompt.shape[1] :].tolist()
    assert len(token_ids) == job.max_tokens, f"{len(token_ids)} tokens came, {job.max_tokens} were asked for"
    return token_ids
