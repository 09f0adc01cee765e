"""A line's answer is the body that the endpoint itself gives: one real worker, asked both ways."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from tests.api.batch_work import PATIENCE_S, read_output
from tests.api.conftest import Api, StartApi
from tests.runtime.harness import LIVENESS_S, crew

from jitney import AsyncClient
from jitney.connection import Redis
from jitney_api.batches.shell import Files, run_file
from jitney_worker.build import register
from jitney_worker.model.runner import load_runner
from jitney_worker.model.tiny import make_tiny
from jitney_worker.runtime.worker import Worker
from jitney_worker.settings import load_settings
from jitney_worker.text.tokenizer import Tokenizer

SAID = [{"role": "user", "content": [{"type": "text", "text": "the sea"}]}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}

ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": SAID, "max_completion_tokens": 8, "seed": 1, "temperature": 1.5, "n": 2}),
    ("/v1/chat/completions", {"messages": SAID, "max_tokens": 4, "logprobs": True, "top_logprobs": 2, "user": None}),
    ("/v1/chat/completions", {"messages": SAID, "max_tokens": 40, "tools": [TOOL], "tool_choice": "required"}),
    ("/v1/completions", {"prompt": ["once upon"], "temperature": 0, "logprobs": 1}),
    ("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 3, "seed": 2, "prompt_logprobs": 1}),
    (
        "/v1/completions",
        {"prompt": "one", "max_tokens": 12, "structured_outputs": {"choice": ["yes", "no"]}, "echo": True},
    ),
    ("/v1/embeddings", {"input": ["the sea", "a ship"], "encoding_format": "base64"}),
    ("/v1/embeddings", {"input": [1, 2, 3]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "sea " * 3_000}]}),
    ("/v1/chat/completions", {"messages": SAID, "max_tokens": 5_000}),
    ("/v1/embeddings", {"input": "sea " * 3_000}),
]


@pytest.fixture
async def stack(
    redis: Redis, redis_url: str, queue_name: str, start_api: StartApi, tmp_path: Path
) -> AsyncIterator[Api]:
    """A real worker with a tiny model, and an API."""
    settings = load_settings(redis_url=redis_url, queue=queue_name)
    directory = make_tiny(tmp_path / "tiny")
    runner = load_runner(directory, dtype="float32", device="cpu", num_blocks=256, num_threads=1)
    made = crew(settings, Tokenizer.load(directory), runner, {"max_num_seqs": 8})
    worker, ready = Worker(settings, await register(redis, made)), asyncio.Event()
    run = asyncio.create_task(worker.run(ready.set))
    await asyncio.wait_for(ready.wait(), LIVENESS_S)
    yield await start_api()
    worker.drain()
    assert await asyncio.wait_for(run, LIVENESS_S) == 0


def comparable(status: int, body: dict[str, Any]) -> Any:
    """Without what differs between two sendings of one request. The worker says in its own words what is too long."""
    if "error" in body:
        return status, {name: value for name, value in body["error"].items() if name != "message"}
    for choice in body.get("choices", ()):
        for call in choice.get("message", {}).get("tool_calls", ()):
            call.pop("id")
    return status, {name: value for name, value in body.items() if name not in ("id", "created")}


async def test_every_endpoint_answers_a_line_as_it_answers_a_request(
    stack: Api, redis_url: str, queue_name: str, tmp_path: Path
) -> None:
    files = Files(tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "errors.jsonl")
    bodies = [{"model": queue_name, **({} if "input" in body else {"seed": 7}), **body} for _, body in ASKED]
    lines = [
        {"custom_id": str(number), "method": "POST", "url": url, "body": body}
        for number, ((url, _), body) in enumerate(zip(ASKED, bodies, strict=True))
    ]
    files.input.write_bytes(b"\n".join(map(orjson.dumps, lines)))
    async with AsyncClient(redis_url) as client, asyncio.timeout(PATIENCE_S):
        await run_file(client, files, model=None, window=4, show=lambda _: None)
    responses = {line["custom_id"]: line["response"] for line in read_output(files.output) + read_output(files.errors)}
    for number, (url, _) in enumerate(ASKED):
        direct = await stack.post(url, bodies[number])
        given = responses[str(number)]
        assert comparable(given["status_code"], given["body"]) == comparable(direct.status, await direct.json()), url
