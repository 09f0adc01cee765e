"""`python -m ops.bench.path_worker`: a worker to be measured, with a model or over a runner that costs nothing.

`crew` is the same for the engine that is driven without Redis, so that both compute the same in the same way.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from dataclasses import replace
from pathlib import Path

from ops.bench.bare import make_bare
from ops.bench.step_cost import IdleRunner

from jitney.connection import connect
from jitney.logs import configure
from jitney_worker.build import build_crew, register
from jitney_worker.crew import crew_of
from jitney_worker.engine.settings import EngineSettings
from jitney_worker.runtime.worker import Crew, Worker
from jitney_worker.settings import WorkerSettings, load_settings
from jitney_worker.text.tokenizer import Tokenizer

IDLE = "idle"
MAX_MODEL_LEN = 512


def settings(model: str, queue: str, seats: int, redis_url: str = "redis://localhost") -> WorkerSettings:
    """One thread for the model, as beside a server and clients on a small machine; blocks for every seat."""
    return load_settings(
        redis_url=redis_url,
        model=model,
        queue=queue,
        num_threads=1,
        engine={
            "max_num_seqs": seats,
            "max_model_len": MAX_MODEL_LEN,
            "num_kv_blocks": (seats + 1) * MAX_MODEL_LEN // 16,
            "enable_prefix_caching": False,
        },
    )


def crew(given: WorkerSettings, directory: Path, *, kind: str) -> Crew:
    """kind: `idle` = the runner that costs nothing, with the tokenizer of `directory`; otherwise its model."""
    if kind != IDLE:
        return build_crew(given)
    options, tokenizer = given.engine, Tokenizer.load(directory)
    assert options.max_num_seqs is not None
    assert options.num_kv_blocks is not None
    engine_settings = EngineSettings(
        max_model_len=MAX_MODEL_LEN,
        num_blocks=options.num_kv_blocks,
        max_num_seqs=options.max_num_seqs,
        enable_prefix_caching=False,
    )
    return crew_of(
        IdleRunner(),
        engine_settings,
        tokenizer,
        model=IDLE,
        queue=given.queue_name,
        fingerprint="idle.1",
        worker_id="w1",
    )


async def serve(asked: argparse.Namespace) -> int:
    given = settings(str(asked.directory), asked.queue, asked.seats, asked.redis_url)
    made = replace(crew(given, asked.directory, kind=asked.kind), worker_id="w1")
    redis = connect(given.redis_url, name="register")
    made = await register(redis, made)
    await redis.aclose()
    worker = Worker(given, made)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, worker.drain)
    return await worker.run(lambda: print("ready", file=sys.stderr, flush=True))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="path_worker")
    parser.add_argument("--redis-url", required=True)
    parser.add_argument("--queue", required=True)
    parser.add_argument("--kind", required=True, help=f"{IDLE}, or anything else for the directory's model")
    parser.add_argument("--directory", required=True, type=Path)
    parser.add_argument("--seats", type=int, required=True)
    parser.add_argument("--bare", action="store_true", help="without lease, fence and log")
    return parser.parse_args()


if __name__ == "__main__":
    configure()
    chosen = arguments()
    if chosen.bare:
        make_bare()
    raise SystemExit(asyncio.run(serve(chosen)))
