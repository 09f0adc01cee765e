"""Tools through a whole worker and no API: what its first event says, what it refuses, and what a client reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tests.runtime.harness import LIVENESS_S, StartWorker
from tests.text.tool_templates import HERMES, TOOLS, UNKNOWN

from jitney import AsyncClient, AsyncJob, Event, JobFailed
from jitney_worker.model.runner import TorchRunner, load_runner
from jitney_worker.text.tokenizer import Tokenizer

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS}
FORCED: dict[str, Any] = {
    "tool_choice": {"type": "function", "function": {"name": "weather"}},
    "max_tokens": 200,
    "temperature": 1.1,
    "seed": 5,
}
SCHEMA = TOOLS[0]["function"]["parameters"]


@pytest.fixture
def template() -> str:
    return HERMES


@pytest.fixture
def tokenizer(tiny_directory: Path, tmp_path: Path, template: str) -> Tokenizer:
    """The tiny model's, with another template."""
    for path in tiny_directory.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(template)
    return Tokenizer.load(tmp_path)


async def first_event(job: AsyncJob) -> Event:
    return await anext(aiter(job.stream()))


@pytest.fixture
def runner(tiny_directory: Path) -> TorchRunner:
    return load_runner(tiny_directory, dtype="float32", device="cpu", num_blocks=160)


def engine_of(runner: TorchRunner) -> dict[str, Any]:
    return {"num_blocks": runner.num_blocks, "block_size": runner.block_size, "max_num_seqs": 8}


async def test_forced_choices_are_calls_and_the_first_event_says_in_which_form(
    start_worker: StartWorker, client: AsyncClient, runner: TorchRunner
) -> None:
    async with start_worker(runner, engine=engine_of(runner)):
        job = await client.enqueue(**CHAT, **FORCED, n=3)
        result = await job.result(LIVENESS_S)
        started = await first_event(job)
    assert (started.call_format, started.max_calls) == ("hermes", 1)
    ids = set()
    for choice in result.choices:
        (call,) = choice.tool_calls
        assert (choice.content, choice.finish_reason, call.name) == (None, "stop", "weather")
        jsonschema.validate(json.loads(call.arguments), SCHEMA)
        assert choice.text == f'<tool_call>\n{{"name": "weather", "arguments": {call.arguments}}}\n</tool_call>'
        ids.add(call.id)
    assert len(ids) == 3


async def test_free_answers_are_text_of_the_same_model(
    start_worker: StartWorker, client: AsyncClient, runner: TorchRunner
) -> None:
    async with start_worker(runner, engine=engine_of(runner)):
        job = await client.enqueue(**CHAT, max_tokens=5, seed=1)
        result = await job.result(LIVENESS_S)
        started = await first_event(job)
        unseen = await client.enqueue(**CHAT, tool_choice="none", max_tokens=5, seed=1)
        await unseen.result(LIVENESS_S)
        other = await first_event(unseen)
    assert (started.call_format, started.max_calls) == ("hermes", None)
    assert result.choices[0].content == result.text
    assert other.call_format is None
    assert other.prompt_tokens < started.prompt_tokens - 50


@pytest.mark.parametrize(
    ("template", "fields", "code"),
    [
        (UNKNOWN, {}, "unknown_call_format"),
        ("{% for message in messages %}{{ message.content }}{% endfor %}", {}, "tools_not_supported"),
    ],
)
async def test_what_the_model_cannot_do_fails_the_job_by_name(
    start_worker: StartWorker, client: AsyncClient, fields: dict[str, Any], code: str
) -> None:
    async with start_worker():
        job = await client.enqueue(**CHAT, **fields)
        with pytest.raises(JobFailed) as failed:
            await job.result(LIVENESS_S)
    assert failed.value.error is not None
    assert failed.value.error["code"] == code
    assert failed.value.error["type"] == "invalid_request_error"
