"""Where a run takes place: the fault suite's arena, with its scripted workers or with a real model."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from tests.faults.answers import Alone
from tests.faults.arena import Arena
from tests.faults.ledger import Ledger

from jitney.embedded import EmbeddedServer
from jitney.tasks import end_tasks
from jitney_worker.model.resolve import resolve
from jitney_worker.model.tiny import make_tiny

STUCK = "engine_stuck"
SEATS = 32
STEP_S = 0.04
"""What a step of the scripted workers takes."""


@dataclass(frozen=True, slots=True)
class Model:
    """What workers compute, and what is asked of them.

    max_tokens: answers are that long at least and at most. num_requests: different requests, 0 = never the same.
    flags: of the worker program.
    """

    name: str
    max_tokens: tuple[int, int]
    num_requests: int
    flags: Mapping[str, Any]

    @property
    def is_scripted(self) -> bool:
        return self.name == "scripted"

    def directory(self, folder: Path) -> Path:
        """Where its files are; made here, or fetched, when they are not there yet."""
        return resolve(self.name) if self.name == "smollm2-135m-instruct" else make_tiny(folder / "tiny")


MODELS = {
    model.name: model
    for model in (
        Model("scripted", (60, 200), 0, {"seats": SEATS, "max_num_batched_tokens": 256}),
        Model("tiny", (60, 200), 24, {"seats": SEATS, "num_blocks": 640}),
        Model("smollm2-135m-instruct", (20, 60), 12, {"seats": SEATS, "num_blocks": 320}),
    )
}


@dataclass
class ModelArena(Arena):
    """An arena whose workers have a real model. `tokenizer` is its directory."""

    worker_module: ClassVar[str] = "ops.bench.nemesis.model_worker"

    def worker_flags(self) -> dict[str, Any]:
        return {"model": self.tokenizer, "lease_s": self.lease_s}


@contextlib.asynccontextmanager
async def open_field(
    folder: Path, directory: Path, model: Model, server: EmbeddedServer, lease_s: float
) -> AsyncIterator[Arena]:
    """A queue of its own on a server that runs. Processes die with it; the ledger stays in the folder."""
    kind = Arena if model.is_scripted else ModelArena
    arena = kind(
        folder=folder,
        tokenizer=directory,
        alone=Alone.of(directory),
        server=server,
        queue_name=f"q{secrets.token_hex(6)}",
        ledger=Ledger(folder / "ledger.jsonl"),
        lease_s=lease_s,
        step_s=STEP_S,
    )
    try:
        yield arena
    finally:
        await arena.aclose()


@contextlib.asynccontextmanager
async def supervised(arena: Arena, names: Sequence[str], **launch: Any) -> AsyncIterator[None]:
    """Workers called `<name>.0`, and for each that ends, or says that it is stuck, `<name>.1` and so on."""

    async def supervise(name: str) -> None:
        for number in itertools.count():
            child = await arena.launch_worker(f"{name}.{number}", **launch)
            await child.ended_or_says(STUCK)
            if any(STUCK in line for line in child.lines):
                await child.finish_off()
            # Killing one that is about to end would cost its exit code: the signal reaps it.
            await child.ended()

    supervisors = [asyncio.create_task(supervise(name), name=f"supervisor of {name}") for name in names]
    try:
        yield
    finally:
        await end_tasks(supervisors)
