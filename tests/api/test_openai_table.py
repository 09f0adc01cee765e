"""docs/OPENAI.md against the official package's request types on one side, and against the code on the other."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from tests.api.conftest import Api
from tests.api.test_api_requests import accepted, refused

from jitney_api.fields import IGNORED, REFUSED, RENAMED
from jitney_api.schemas import ChatRequest, CompletionRequest

PAGE = Path(__file__).parent.parent.parent / "docs" / "OPENAI.md"
REQUESTS: dict[str, Any] = {"chat": ChatRequest, "completions": CompletionRequest}
OFFICIAL: dict[str, Any] = {
    "chat": chat_create_params.CompletionCreateParamsBase,
    "completions": completion_create_params.CompletionCreateParamsBase,
}
ROW = re.compile(
    r"^\| `(\w+)` \| (both|chat|completions) \| (served|ignored|refused)"
    r"(?: unless ((?:`[^`]*`(?: or )?)+))?(?:: .*)? \|$"
)


class Row(NamedTuple):
    """neutral: the values that a refused field may have."""

    field: str
    endpoint: str
    fate: str
    neutral: tuple[Any, ...]


def rows() -> list[Row]:
    found = []
    for line in PAGE.read_text().splitlines():
        if line.startswith("| `"):
            match = ROW.match(line)
            assert match, f"not a row of the table: {line}"
            field, where, fate, unless = match.groups()
            neutral = tuple(json.loads(value) for value in re.findall(r"`([^`]*)`", unless or ""))
            found += [Row(field, endpoint, fate, neutral) for endpoint in REQUESTS if where in ("both", endpoint)]
    return found


ROWS = rows()


def those(fate: str) -> list[Any]:
    return [pytest.param(row, id=f"{row.endpoint}-{row.field}") for row in ROWS if row.fate == fate]


@pytest.mark.parametrize("endpoint", OFFICIAL)
def test_every_field_of_the_official_package_is_in_the_table(endpoint: str) -> None:
    official = {*OFFICIAL[endpoint].__annotations__, "stream"}
    assert official - {row.field for row in ROWS if row.endpoint == endpoint} == set()


def test_every_field_that_the_code_names_is_in_the_table_once() -> None:
    named = [(row.field, row.endpoint) for row in ROWS]
    assert len(named) == len(set(named))
    own = {"adapter", "prefix"}  # reserved for jobs, no field of OpenAI's or vLLM's
    assert ({*IGNORED, *REFUSED, *RENAMED} - own) - {row.field for row in ROWS} == set()


def ask(api: Api, endpoint: str, **fields: Any) -> Any:
    return (api.chat if endpoint == "chat" else api.complete)(**fields)


def known_example(schema: Any, field: str) -> Any:
    return EXAMPLES[field](schema) if callable(EXAMPLES[field]) else EXAMPLES[field]


EXAMPLES: dict[str, Any] = {
    "max_completion_tokens": 5,
    "max_tokens": 5,
    "temperature": 0.5,
    "top_p": 0.5,
    "n": 2,
    "stop": "x",
    "seed": 7,
    "logprobs": lambda schema: True if schema is ChatRequest else 2,
    "logit_bias": {"5": 1},
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "echo": True,
    "metadata": {"a": "b"},
    "top_k": 5,
    "min_p": 0.5,
    "repetition_penalty": 1.5,
    "min_tokens": 2,
    "stop_token_ids": [5],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "skip_special_tokens": False,
    "truncate_prompt_tokens": 5,
    "prompt_logprobs": 1,
    "allowed_token_ids": [5],
    "bad_words": ["rude"],
    "priority": 1,
    "cache_salt": "s",
    "add_generation_prompt": False,
    "continue_final_message": True,
    "response_format": {"type": "json_object"},
    "structured_outputs": {"choice": ["yes", "no"]},
    "tools": [{"type": "function", "function": {"name": "clock"}}],
}
ELSEWHERE = {"model", "messages", "prompt", "stream", "stream_options", "top_logprobs"}
ELSEWHERE |= {"tool_choice", "parallel_tool_calls"}
"""Tested for what they do, in test_api_requests, test_api_streams, test_api_tools and test_api_openai_sdk."""


@pytest.mark.parametrize("row", those("served"))
async def test_what_the_table_calls_served_changes_the_job(api: Api, worker: Any, row: Row) -> None:
    assert row.field in REQUESTS[row.endpoint].model_fields
    if row.field in ELSEWHERE:
        return
    plain = await accepted(worker, ask(api, row.endpoint, seed=1))
    given = {"seed": 1, row.field: known_example(REQUESTS[row.endpoint], row.field)}
    assert await accepted(worker, ask(api, row.endpoint, **given)) != plain


@pytest.mark.parametrize("row", those("ignored"))
async def test_what_the_table_calls_ignored_changes_nothing(api: Api, worker: Any, row: Row) -> None:
    assert row.field in IGNORED
    plain = await accepted(worker, ask(api, row.endpoint, seed=1))
    assert await accepted(worker, ask(api, row.endpoint, seed=1, **{row.field: "anything"})) == plain


@pytest.mark.parametrize("row", those("refused"))
async def test_what_the_table_calls_refused_is_refused_by_name_unless_it_changes_nothing(
    api: Api, worker: Any, redis: Any, row: Row
) -> None:
    error = await refused(redis, api.model, await ask(api, row.endpoint, **{row.field: {"something": "else"}}))
    assert (error["param"], error["code"]) == (row.field, "unsupported_parameter")
    assert row.neutral == (() if row.field in RENAMED else REFUSED[row.field])
    plain = await accepted(worker, ask(api, row.endpoint, seed=1))
    for value in row.neutral:
        assert await accepted(worker, ask(api, row.endpoint, seed=1, **{row.field: value})) == plain


@pytest.mark.parametrize("endpoint", REQUESTS)
@pytest.mark.parametrize("value", [True, False])
async def test_special_tokens_are_what_they_are_anyway(api: Api, worker: Any, endpoint: str, value: bool) -> None:
    as_ever = value is (endpoint == "completions")
    asking = ask(api, endpoint, add_special_tokens=value)
    if as_ever:
        await accepted(worker, asking)
    else:
        answer = await asking
        assert (answer.status, (await answer.json())["error"]["param"]) == (400, "add_special_tokens")


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "refusal"])
async def test_a_part_that_is_no_text_is_refused_by_its_type(api: Api, redis: Any, kind: str) -> None:
    parts = [{"type": "text", "text": "look"}, {"type": kind, kind: {"url": "data:x"}}]
    error = await refused(redis, api.model, await api.chat(parts))  # type: ignore[arg-type]
    assert error["param"] == "messages.0.content"
    assert f"part 1 has type '{kind}'" in error["message"]


@pytest.mark.parametrize("field", ["audio", "refusal"])
async def test_what_an_assistant_said_otherwise_is_refused_by_name(
    api: Api, worker: Any, redis: Any, field: str
) -> None:
    said = {"role": "assistant", "content": "yes"}
    user = {"role": "user", "content": "hello"}
    answer = await api.chat(messages=[{**said, field: "no"}, user])
    assert (await refused(redis, api.model, answer))["param"] == f"messages.0.{field}"
    spec = await accepted(worker, api.chat(messages=[{**said, field: None}, user]))
    assert spec.messages == (said, user)
