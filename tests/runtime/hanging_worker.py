"""`python -m tests.runtime.hanging_worker URL QUEUE TOKENIZER`: a worker whose first step never ends.

It hangs in a thread that Python waits for at exit, as native libraries wait for theirs.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import typer
from tests.runtime.harness import crew

from jitney_worker.cli import leave
from jitney_worker.engine.protocol import ModelOutput, SchedulerOutput
from jitney_worker.runtime.worker import Worker
from jitney_worker.settings import load_settings
from jitney_worker.text.tokenizer import Tokenizer


class HangingForEver:
    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)

    def execute(self, scheduled: SchedulerOutput) -> ModelOutput:
        self._pool.submit(threading.Event().wait).result()
        raise AssertionError("it cannot come here")


def main(redis_url: str, queue: str, tokenizer: Path) -> None:
    settings = load_settings(redis_url=redis_url, queue=queue, lease={"duration_s": 3_600, "stall_after_s": 0.2})
    worker = Worker(settings, crew(settings, Tokenizer.load(tokenizer), HangingForEver(), {}))
    leave(asyncio.run(worker.run()))


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
    except typer.Exit as end:
        sys.exit(end.exit_code)
