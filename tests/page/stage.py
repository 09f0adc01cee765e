"""The real stack in one event loop: a server of its own, a worker on the tiny model that steps as told, and the API."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.api.conftest import make_server
from tests.runtime.harness import LIVENESS_S, crew

from jitney import AsyncClient
from jitney.embedded import EmbeddedServer
from jitney.workers import WorkerView, list_workers
from jitney_worker.build import register
from jitney_worker.engine.protocol import ModelOutput, ModelRunner, SchedulerOutput
from jitney_worker.model.runner import load_runner
from jitney_worker.model.tiny import make_tiny
from jitney_worker.runtime.worker import Worker
from jitney_worker.settings import load_settings
from jitney_worker.text.tokenizer import Tokenizer

QUEUE = "tiny"
SNAPSHOT_EVERY_S = 0.02


@dataclass
class Gate:
    """A runner in front of another one, which computes as many steps as it was told to. steps: it did so many."""

    runner: ModelRunner
    hidden_size: int = 0
    steps: int = 0
    _allowed: float = float("inf")
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def execute(self, scheduled: SchedulerOutput) -> ModelOutput:
        with self._changed:
            self._changed.wait_for(lambda: self._allowed > 0)
            self._allowed -= 1
        output = self.runner.execute(scheduled)
        with self._changed:
            self.steps += 1
            self._changed.notify_all()
        return output

    def pass_one(self) -> None:
        """One more step, and back when it is done."""
        with self._changed:
            done, self._allowed = self.steps, 1
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self.steps > done, LIVENESS_S), "the engine did not step"

    def allow(self, num_steps: float) -> None:
        """So many more steps and none besides. inf: all from now on."""
        with self._changed:
            self._allowed = num_steps
            self._changed.notify_all()


@dataclass
class Stage:
    url: str
    redis_url: str
    client: AsyncClient
    gate: Gate
    worker: Worker

    async def enqueue(self, length: int, *prompt: int, **fields: Any) -> Any:
        return await self.client.enqueue(list(prompt) or [3, 1, 4], max_tokens=length, ignore_eos=True, **fields)

    async def advance(self, num_steps: int) -> None:
        """So many steps, each of them to be seen by itself."""
        for _ in range(num_steps):
            await asyncio.to_thread(self.gate.pass_one)
            await asyncio.sleep(2 * SNAPSHOT_EVERY_S)

    async def until_seated(self, *jobs: Any) -> None:
        """As many steps as that takes."""
        wanted = {job.id for job in jobs}
        await self.until(lambda view: wanted <= {seat.job for seat in view.seats})

    async def until(self, holds: Callable[[WorkerView], bool]) -> None:
        """As many steps as it takes until the worker shows what is wanted."""
        async with asyncio.timeout(LIVENESS_S):
            while not any(map(holds, await list_workers(self.client.redis, QUEUE))):
                await self.advance(1)

    async def clear(self, *jobs: Any) -> None:
        """Everything runs again, and these jobs are over."""
        self.gate.allow(float("inf"))
        for job in jobs:
            await job.cancel()


@contextlib.asynccontextmanager
async def staged(directory: Path, *, num_blocks: int = 64, max_num_seqs: int = 4, **api: Any) -> AsyncIterator[Stage]:
    """Torn down in order: the API, the worker, the server."""
    tiny = make_tiny(directory / "tiny")
    with EmbeddedServer(directory / "server", tethered=True) as server:
        runner = load_runner(tiny, dtype="float32", device="cpu", num_blocks=num_blocks)
        gate = Gate(runner)
        section = {"publish_interval_s": 0.0, "snapshot_every_s": SNAPSHOT_EVERY_S, "claim_ahead": 4, "id": "worker-1"}
        settings = load_settings(redis_url=server.url, queue=QUEUE, lease={"duration_s": 3_600}, worker=section)
        engine = {
            "num_blocks": num_blocks,
            "block_size": runner.block_size,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": 64,
        }
        async with AsyncClient(server.url, queue=QUEUE, name="page-test") as client:
            made = crew(settings, Tokenizer.load(tiny), gate, engine)
            worker, ready = Worker(settings, await register(client.redis, made)), asyncio.Event()
            run = asyncio.create_task(worker.run(ready.set))
            await asyncio.wait_for(ready.wait(), LIVENESS_S)
            http, listening = make_server(redis_url=server.url, **api)
            serving = asyncio.create_task(http.serve([listening]))
            try:
                yield Stage(f"http://127.0.0.1:{listening.getsockname()[1]}/", server.url, client, gate, worker)
            finally:
                http.should_exit = True
                await asyncio.wait_for(serving, LIVENESS_S)
                gate.allow(float("inf"))
                worker.drain()
                await asyncio.wait_for(run, LIVENESS_S)
