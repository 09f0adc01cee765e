"""OpenAI's own client runs a batch from upload to output on the real stack, while its parts are killed one by one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI
from tests.faults.answers import Asked
from tests.faults.arena import Arena, arena
from tests.faults.children import Child

from jitney.embedded import EmbeddedServer
from jitney_api.batches.ledger import Ledger

NUM_LINES = 2_000
PATIENCE_S = 240.0


def asked(number: int, model: str) -> Asked:
    fields = {"model": model, "prompt": f"the river {number}", "max_tokens": 1 + number % 4, "temperature": 0.0}
    return Asked(f"line {number}", fields)


def input_file(model: str) -> bytes:
    ones = [asked(number, model) for number in range(NUM_LINES)]
    lines = [{"custom_id": one.name, "method": "POST", "url": "/v1/completions", "body": one.fields} for one in ones]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


@dataclass
class Stack:
    """Server, API, jitney workers and an RQ worker, each a process that may be killed; and OpenAI's client."""

    field: Arena
    client: AsyncOpenAI

    async def start_rq_worker(self, name: str) -> Child:
        """Its start is when RQ looks for jobs that others have left."""
        url = ("--redis-url", self.field.server.url)
        child = await Child.start(name, "jitney", "rq-worker", *url, ledger=self.field.ledger)
        self.field.workers[name] = child  # gone at the end, like them
        await child.until("ready")
        return child

    async def forget_heartbeat(self, batch_id: str) -> None:
        """As if a minute and a half had gone by: RQ holds a job for so long after its worker's last beat."""
        [entry] = await self.field.redis.zrange("rq:wip:jitney", 0, -1)
        assert entry.decode().startswith(f"{batch_id}:")
        await self.field.redis.zadd("rq:wip:jitney", {entry: 1}, xx=True)

    async def until_completed(self, batch_id: str, num_lines: int) -> Any:
        """The batch, as soon as so many of its lines are done, or it has ended."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                batch = await self.client.batches.retrieve(batch_id)
                assert batch.status in ("validating", "in_progress", "finalizing", "completed"), batch
                if batch.status == "completed" or batch.request_counts.completed >= num_lines:
                    return batch
                await asyncio.sleep(0.05)


@pytest.fixture
async def stack(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stack]:
    monkeypatch.setenv("JITNEY_BATCH__FILES", str(tmp_path / "files"))
    async with contextlib.AsyncExitStack() as running:
        server = running.enter_context(EmbeddedServer(tmp_path / "data", appendfsync="always"))
        (tmp_path / "run").mkdir()
        field = await running.enter_async_context(arena(tmp_path / "run", tiny_model, server))
        await field.start_api()
        base_url = f"http://127.0.0.1:{field.ports()[0]}/v1"
        # A dead Redis is a 503 for as long as it takes; the client has its own way to wait.
        client = await running.enter_async_context(AsyncOpenAI(base_url=base_url, api_key="x", max_retries=30))
        yield Stack(field, client)


async def test_batches_are_complete_whatever_is_killed_in_the_middle_of_them(stack: Stack) -> None:
    """kill -9 of the RQ worker, of a jitney worker and of Redis: every custom_id once, with the answer it has alone."""
    field, client = stack.field, stack.client
    await field.start_workers("w1", "w2", step_s=0.001)
    first = await stack.start_rq_worker("rq1")
    file = await client.files.create(file=("in.jsonl", input_file(field.queue_name)), purpose="batch")
    batch = await client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", metadata={"night": "1"}
    )
    reached = [await stack.until_completed(batch.id, 100)]

    first.send(signal.SIGKILL)
    await first.ended()
    await stack.forget_heartbeat(batch.id)
    second = await stack.start_rq_worker("rq2")
    reached.append(await stack.until_completed(batch.id, 600))

    field.workers["w1"].send(signal.SIGKILL)
    reached.append(await stack.until_completed(batch.id, 1_200))

    await asyncio.to_thread(field.server.kill)
    await asyncio.to_thread(field.server.start)
    assert [one.status for one in reached] == ["in_progress"] * 3, "a fault came after the end: it proves nothing"
    assert reached[-1].request_counts.completed < NUM_LINES

    ended = await stack.until_completed(batch.id, NUM_LINES + 1)
    assert second.is_alive
    assert (await Ledger(field.redis).find(batch.id)).fence == 2, "nobody took the batch from somebody"
    assert ended.request_counts.model_dump() == {"total": NUM_LINES, "completed": NUM_LINES, "failed": 0}
    assert (ended.model, ended.error_file_id, ended.metadata) == (field.queue_name, None, {"night": "1"})
    output = await client.files.content(ended.output_file_id)
    lines = [json.loads(line) for line in output.text.splitlines()]
    assert Counter(line["custom_id"] for line in lines) == Counter(f"line {n}" for n in range(NUM_LINES))
    said = {line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in lines}
    for number in range(0, NUM_LINES, 20):
        one = asked(number, field.queue_name)
        assert said[one.name] == field.alone.answer(one).text
    assert ended.usage.output_tokens == sum(line["response"]["body"]["usage"]["completion_tokens"] for line in lines)
