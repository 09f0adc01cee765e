"""One workload, one mode, one run: the only place that knows what each mode starts."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from jitney_worker.bench.options import BenchOptions
from jitney_worker.bench.rides import AfterEach, Run, unwatched
from jitney_worker.bench.workloads import Workload
from jitney_worker.settings import WorkerSettings, load_settings


def run(workload: Workload, options: BenchOptions, after_each: AfterEach = unwatched) -> Run:
    """All repeats of a workload.

    Raises SettingsError, ModelError or ServerError, and what a job that can never run raises.
    """
    if options.redis_url is not None:
        from jitney_worker.bench.measure import measure

        queue = options.queue or load_settings(model=options.model or workload.model).queue_name
        return asyncio.run(measure(options.redis_url, queue, workload, after_each))
    from jitney_worker.model.resolve import resolve

    directory = resolve(options.model or workload.model)
    if options.mode == "naive":
        from jitney_worker.bench.naive import load_naive, measure_naive

        return measure_naive(load_naive(directory, options.dtype or "auto", options.num_threads), workload, after_each)
    settings = options.worker_settings(workload, directory)
    if options.mode == "engine":
        return _in_this_process(workload, settings, after_each, profiled=options.is_profiled)
    return asyncio.run(on_own_stack(workload, settings, after_each))


def _in_this_process(workload: Workload, settings: WorkerSettings, after_each: AfterEach, *, profiled: bool) -> Run:
    from jitney_worker.bench.inprocess import measure_engine
    from jitney_worker.build import build_crew
    from jitney_worker.engine.engine import LocalEngine

    crew = build_crew(settings)
    assert isinstance(crew.engine, LocalEngine)
    return measure_engine(crew.engine, workload, crew.features, profiled=profiled, after_each=after_each)


async def on_own_stack(workload: Workload, settings: WorkerSettings, after_each: AfterEach = unwatched) -> Run:
    """Server, API and one worker for the length of the run."""
    from jitney_worker.bench.measure import measure
    from jitney_worker.stack.local import LocalStack, StackSettings

    with tempfile.TemporaryDirectory(prefix="jitney-bench-") as folder:
        stack_settings = StackSettings(
            data_dir=Path(folder),
            queue=settings.queue_name,
            port=0,
            worker_flags=worker_flags(settings),
            num_threads=settings.num_threads,
            environment={
                "JITNEY_ENGINE__ENABLE_PREFIX_CACHING": str(settings.engine.enable_prefix_caching).lower(),
                "JITNEY_KERNELS": settings.kernels,
            },
        )
        async with LocalStack(stack_settings) as stack:
            return await measure(stack.redis_url, settings.queue_name, workload, after_each)


def worker_flags(settings: WorkerSettings) -> tuple[str, ...]:
    """Settings as a worker's command line says them; threads are the stack's to give."""
    engine = settings.engine
    flags: dict[str, object] = {
        "--model": settings.model,
        "--queue": settings.queue_name,
        "--dtype": settings.dtype,
        "--quantization": settings.quantization,
        "--max-num-seqs": engine.max_num_seqs,
        "--max-num-batched-tokens": engine.max_num_batched_tokens,
        "--num-kv-blocks": engine.num_kv_blocks,
        "--kv-cache-bytes": engine.kv_cache_bytes,
        "--policy": engine.policy,
    }
    return tuple(str(word) for flag, value in flags.items() if value is not None for word in (flag, value))
