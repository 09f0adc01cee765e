"""`python -m ops.bench.nemesis.model_worker`: `jitney worker`, and a tally of what its model computed.

The tally is of the same shape as that of the scripted worker: a line a step, "tokens sampled, positions computed,
preemptions". Everything else is the product's.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path
from typing import Any

from jitney.logs import configure
from jitney_worker import build
from jitney_worker.cli import serve
from jitney_worker.engine.protocol import ModelOutput, ModelRunner, SchedulerOutput
from jitney_worker.model.runner import load_runner
from jitney_worker.settings import WorkerSettings, load_settings


class Tallied:
    """A runner in front of another one, that counts. All else is asked of the other one."""

    def __init__(self, runner: ModelRunner, tally: int) -> None:
        self._runner = runner
        self._tally = tally

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def execute(self, scheduled: SchedulerOutput) -> ModelOutput:
        output = self._runner.execute(scheduled)
        computed = sum(item.stop - item.start for item in scheduled.scheduled)
        os.write(self._tally, b"%d %d %d\n" % (len(output.rows), computed, len(scheduled.preempted)))
        return output


def count_into(path: Path) -> None:
    """From now on every runner that this process builds a worker with is counted."""
    if vars(build)["load_runner"] is not load_runner:
        raise LookupError("build.py loads its runner in another way: model_worker.py must follow")
    tally = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def load_counted(*given: Any, **named: Any) -> Tallied:
        return Tallied(load_runner(*given, **named), tally)

    vars(build)["load_runner"] = load_counted


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="model_worker")
    parser.add_argument("--redis-url", required=True)
    parser.add_argument("--queue", required=True)
    parser.add_argument("--id", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tally", required=True, type=Path)
    parser.add_argument("--lease-s", type=float, required=True)
    parser.add_argument("--drain-timeout-s", type=float, required=True)
    parser.add_argument("--seats", type=int, required=True)
    parser.add_argument("--num-blocks", type=int, required=True)
    return parser.parse_args()


def settings_of(asked: argparse.Namespace) -> WorkerSettings:
    return load_settings(
        redis_url=asked.redis_url,
        queue=asked.queue,
        model=asked.model,
        dtype="float32",  # in which a resumed answer equals a solo one exactly
        num_threads=1,
        engine={"max_num_seqs": asked.seats, "num_kv_blocks": asked.num_blocks},
        lease={"duration_s": asked.lease_s},
        worker={"id": asked.id, "drain_timeout_s": asked.drain_timeout_s},
    )


if __name__ == "__main__":
    configure()
    given = arguments()
    count_into(given.tally)
    raise SystemExit(asyncio.run(serve(settings_of(given))))
