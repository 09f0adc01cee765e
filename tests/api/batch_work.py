"""What tests of batches share: an input file, and a worker that answers whatever is asked."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import orjson
from tests.client.scripted_worker import ScriptedWorker, Turn

PATIENCE_S = 60.0
"""Nothing here takes so long; a test that waits longer has failed."""


def write_input(path: Path, custom_ids: Iterable[str], model: str, **fields: Any) -> Path:
    """Completions whose prompts are their custom ids."""
    with path.open("wb") as file:
        for custom_id in custom_ids:
            body = {"model": model, "prompt": custom_id, **fields}
            line = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}
            file.write(orjson.dumps(line) + b"\n")
    return path


def read_output(path: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


async def until(holds: Callable[[], bool]) -> None:
    """Look until it holds; TimeoutError after PATIENCE_S."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds():  # noqa: ASYNC110 - what is looked at is a file, or another process
            await asyncio.sleep(0.01)


class Echo:
    """Answers `<prompt>!`, and remembers in which jobs. It claims what there is, and rests where there is nothing."""

    def __init__(self, worker: ScriptedWorker, *, fails: Callable[[str], bool] = lambda _: False) -> None:
        self.most = 1_000_000
        """So many jobs it answers in all, and lets the others wait."""
        self._worker = worker
        self._fails = fails
        self._leaves = False
        self.prompts: list[str] = []
        self.most_waiting = 0

    async def work(self, at_once: int = 16) -> None:
        """Until `leave`; what was claimed by then is answered, for nobody else would get it before its lease ends."""
        while not self._leaves:
            backlog = await self._worker.queue.backlog()
            self.most_waiting = max(self.most_waiting, backlog.num_jobs)
            credit = min(at_once, self.most - len(self.prompts))
            turns = await self._worker.claim(credit=credit) if credit else []
            await asyncio.gather(*(self._perform(turn) for turn in turns))
            if not turns:
                await asyncio.sleep(0.01)

    def come(self) -> None:
        self._leaves = False

    def leave(self) -> None:
        self._leaves = True

    async def _perform(self, turn: Turn) -> None:
        prompt = str(turn.spec.prompt)
        assert turn.delivery.band == "bulk"
        self.prompts.append(prompt)
        await turn.start()
        if self._fails(prompt):
            await turn.fail({"type": "invalid_request_error", "code": "invalid_value", "message": "no", "param": "n"})
        else:
            await turn.finish(f"{prompt}!")


@contextlib.asynccontextmanager
async def working(echo: Echo, **options: Any) -> AsyncIterator[None]:
    echo.come()
    task = asyncio.create_task(echo.work(**options))
    try:
        yield
    finally:
        echo.leave()
        await asyncio.wait_for(task, PATIENCE_S)
