"""Fixtures around `harness`: a tokenizer, a worker in this event loop, a client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.engine.scripted_model import HashModel
from tests.runtime.harness import LIVENESS_S, MAX_MODEL_LEN, Ears, StartWorker, crew

from jitney import AsyncClient
from jitney.logs import listening
from jitney_worker.engine.protocol import ModelRunner
from jitney_worker.model.tiny import make_tiny
from jitney_worker.runtime.worker import Worker
from jitney_worker.settings import load_settings
from jitney_worker.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tokenizer(tiny_directory: Path) -> Tokenizer:
    return Tokenizer.load(tiny_directory)


@pytest.fixture
async def start_worker(
    redis_url: str, queue_name: str, tokenizer: Tokenizer, write_queue_card: Callable[..., Awaitable[object]]
) -> StartWorker:
    """`async with start_worker(runner, engine={"max_num_seqs": 4}, lease={...}) as worker:` drained at the end."""
    # As these workers would write it: one whose queue was forgotten compares it with its own.
    await write_queue_card(
        max_model_len=MAX_MODEL_LEN, vocab_size=tokenizer.vocab_size, tokenizer_digest=tokenizer.digest
    )

    @contextlib.asynccontextmanager
    async def start(
        runner: ModelRunner | None = None,
        *,
        engine: dict[str, Any] | None = None,
        policy: str = "continuous",
        **settings: Any,
    ) -> AsyncIterator[Worker]:
        # After every step, so that a test that counts steps sees what each gave; test_publish_pace has the other way.
        settings["worker"] = {"publish_interval_s": 0.0, **settings.get("worker", {})}
        made = load_settings(redis_url=redis_url, queue=queue_name, engine={"policy": policy}, **settings)
        worker = Worker(made, crew(made, tokenizer, runner or HashModel(), engine or {}))
        ready = asyncio.Event()
        run = asyncio.create_task(worker.run(ready.set))
        await asyncio.wait({asyncio.ensure_future(ready.wait()), run}, return_when=asyncio.FIRST_COMPLETED)
        assert ready.is_set(), run.exception()
        try:
            yield worker
        finally:
            worker.drain()
            exit_code = await asyncio.wait_for(run, LIVENESS_S)
        assert exit_code == 0

    return start


@pytest.fixture
async def ears() -> AsyncIterator[Ears]:
    hearing = Ears()
    with listening(hearing):
        yield hearing


@pytest.fixture
async def client(redis_url: str, queue_name: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(redis_url, queue=queue_name) as made:
        yield made
