"""Processes to be measured: an API with its scripted worker and Redis, and a web server with nothing behind it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from ops.bench import page
from ops.bench.streams_worker import FINGERPRINT

from jitney.cards import QueueCard, write_card
from jitney.connection import Redis, connect
from jitney.embedded import EmbeddedServer
from jitney.errors import ServerError
from jitney.tether import tether

QUEUE = "streams"
WRITE_TIMEOUT_S = "3"
"""Of the API: a reader that takes nothing is cut off within a run."""


@dataclass(frozen=True)
class Stage:
    """A server that speaks server-sent events. pid: of its process. redis: None where none is behind it."""

    port: int
    pid: int
    queue: str = QUEUE
    redis: Redis | None = None


@contextlib.asynccontextmanager
async def stage(folder: Path) -> AsyncIterator[Stage]:
    """One API process with its defaults (but the write timeout), and one scripted worker."""
    with EmbeddedServer(folder, tethered=True) as server:
        redis = connect(server.url, name="streams-bench")
        card = QueueCard(model="scripted", max_model_len=8_192, vocab_size=50_000, fingerprint=FINGERPRINT)
        await write_card(redis, QUEUE, card)
        worker = ("-m", "ops.bench.streams_worker", "--redis-url", server.url, "--queue", QUEUE)
        api = ("-m", "jitney", "api", "--port", "0", "--redis-url", server.url)
        async with (
            program(*worker),
            program(*api, JITNEY_API__WRITE_TIMEOUT_S=WRITE_TIMEOUT_S) as (pid, said),
        ):
            yield Stage(port_of(said), pid, redis=redis)
        await redis.aclose()


@contextlib.asynccontextmanager
async def bare_server() -> AsyncIterator[Stage]:
    async with program("-m", "ops.bench.streams_bare") as (pid, said):
        yield Stage(port_of(said), pid)


def port_of(said: str) -> int:
    found = re.search(r"api=http://127\.0\.0\.1:(\d+)", said)
    assert found, said
    return int(found[1])


@contextlib.asynccontextmanager
async def program(*words: str, **environment: str) -> AsyncIterator[tuple[int, str]]:
    """Python with these words, once it has said `ready`: its pid, and that line. Raises ServerError."""
    running = await asyncio.create_subprocess_exec(
        sys.executable,
        *words,
        cwd=page.ROOT,
        env={**os.environ, **environment},
        stdin=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        preexec_fn=tether(signal.SIGKILL),
    )
    assert running.stderr is not None
    said = ""
    async for line in running.stderr:
        said = line.decode(errors="replace").strip()
        if said.startswith("ready"):
            break
    else:
        raise ServerError(f"{' '.join(words[:3])} did not start: {said}")
    draining = asyncio.create_task(_drop(running.stderr))
    try:
        yield running.pid, said
    finally:
        with contextlib.suppress(ProcessLookupError):
            running.terminate()
        await running.wait()
        await draining


async def _drop(stream: asyncio.StreamReader) -> None:
    """Read and forget: a full pipe would stop the program."""
    while await stream.read(65_536):
        pass
