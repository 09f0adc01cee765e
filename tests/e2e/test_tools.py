"""Tools as users meet them: a round trip through the `openai` SDK, and a worker killed in the middle of a call."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from openai import BadRequestError, OpenAI
from tests.e2e.programs import program, words
from tests.e2e.test_up import up
from tests.text.tool_templates import HERMES, TOOLS

from jitney import Client
from jitney_worker.model.tiny import make_tiny

PLAN: dict[str, Any] = {
    "type": "object",
    "properties": {
        "stops": {
            "type": "array",
            "items": {"enum": ["sea", "shore", "town"]},
            "minItems": 30,
            "maxItems": 60,
        },
        "name": {"type": "string", "maxLength": 12},
    },
    "required": ["stops", "name"],
    "additionalProperties": False,
}
PLANNED: list[dict[str, Any]] = [{"type": "function", "function": {"name": "plan", "parameters": PLAN}}]
USER: dict[str, Any] = {"role": "user", "content": "Is it warm?"}


@pytest.fixture(scope="module")
def calling_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose template has a place for tools, in the form of Hermes."""
    directory = make_tiny(tmp_path_factory.mktemp("models") / "tiny-hermes")
    (directory / "chat_template.jinja").write_text(HERMES)
    return directory


def test_a_round_trip_of_the_openai_sdk(calling_model: Path, tmp_path: Path) -> None:
    with program(*up(calling_model, tmp_path)) as stack, contextlib.ExitStack() as clients:
        ready = words(stack.until_line("ready "))
        openai = clients.enter_context(OpenAI(base_url=f"{ready['api']}/v1", api_key="none", max_retries=0))
        options: dict[str, Any] = {"model": ready["queue"], "tools": TOOLS, "seed": 3, "max_tokens": 300}
        named = {"type": "function", "function": {"name": "weather"}}
        whole = openai.chat.completions.create(messages=[USER], tool_choice=named, **options).choices[0]
        (call,) = whole.message.tool_calls
        assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
        assert call.function.name == "weather"
        jsonschema.validate(json.loads(call.function.arguments), TOOLS[0]["function"]["parameters"])
        with openai.chat.completions.stream(messages=[USER], tool_choice=named, **options) as stream:
            events = list(stream)
            final = stream.get_final_completion().choices[0]
        assert final.message.tool_calls[0].function.arguments == call.function.arguments
        assert final.finish_reason == "tool_calls"
        assert final.message.content is None
        assert sum(event.type == "tool_calls.function.arguments.delta" for event in events) > 1
        answered = [
            USER,
            whole.message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"},
        ]
        free = openai.chat.completions.create(messages=answered, **{**options, "max_tokens": 8})
        bare = openai.chat.completions.create(messages=answered[:1], **{**options, "max_tokens": 8})
        assert free.usage.prompt_tokens > bare.usage.prompt_tokens + 40
        assert free.choices[0].message.content
        many = openai.chat.completions.create(messages=[USER], tool_choice="required", n=2, **options)
        for choice in many.choices:
            if choice.finish_reason == "tool_calls":
                for one in choice.message.tool_calls:
                    assert isinstance(json.loads(one.function.arguments), dict)
        odd = [{"type": "function", "function": {"name": "odd", "parameters": {"type": "object", "not": {}}}}]
        with pytest.raises(BadRequestError) as refused:
            openai.chat.completions.create(messages=[USER], tool_choice="required", **{**options, "tools": odd})
        assert refused.value.param == "tools"


def test_a_model_without_a_place_for_tools_is_a_400(tiny_model: Path, tmp_path: Path) -> None:
    with program(*up(tiny_model, tmp_path)) as stack, contextlib.ExitStack() as clients:
        ready = words(stack.until_line("ready "))
        openai = clients.enter_context(OpenAI(base_url=f"{ready['api']}/v1", api_key="none", max_retries=0))
        with pytest.raises(BadRequestError) as refused:
            openai.chat.completions.create(model=ready["queue"], messages=[USER], tools=TOOLS)
        assert (refused.value.param, refused.value.code) == ("tools", "tools_not_supported")


def test_a_worker_killed_in_the_middle_of_a_call_changes_no_byte_of_it(
    redis_url: str, queue_name: str, calling_model: Path
) -> None:
    """Two real workers; the one that has begun is killed, and the other goes on from the log."""
    options = ("--model", str(calling_model), "--redis-url", redis_url, "--queue", queue_name, "--dtype", "float32")
    options += ("--num-kv-blocks", "200", "--num-threads", "1", "--lease-s", "4")
    environment = {"JITNEY_WORKER__PUBLISH_INTERVAL_S": "0"}
    asked: dict[str, Any] = {
        "messages": [USER],
        "tools": PLANNED,
        "tool_choice": {"type": "function", "function": {"name": "plan"}},
        "max_tokens": 1_500,
        "temperature": 0.8,
        "seed": 11,
    }
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(program("worker", *options, environment=environment))
        first.until_line("ready ")
        client = stack.enter_context(Client(redis_url, queue=queue_name))
        undisturbed = client.generate(**asked)
        (call,) = undisturbed.choices[0].tool_calls
        jsonschema.validate(json.loads(call.arguments), PLAN)
        job = client.enqueue(**asked)
        shown = ""
        for event in job.stream():
            shown += event.text
            if len(shown) > 80:
                break
        first.kill()
        first.wait()
        assert job.status().state == "running"
        stack.enter_context(program("worker", *options, environment=environment)).until_line("ready ")
        result = job.result(timeout_s=90)
        events = list(job.stream())
    assert (result.text, result.token_ids) == (undisturbed.text, undisturbed.token_ids)
    assert result.choices[0].tool_calls[0].arguments == call.arguments
    assert [event.call_format for event in events if event.type == "started"] == ["hermes"] * 2
    assert shown == undisturbed.text[: len(shown)]
