"""docs/RESPONSES.md against the official package's request type on one side, and against the code on the other."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from openai.types.responses import response_create_params
from tests.api.conftest import Api
from tests.api.test_api_requests import accepted, refused
from tests.api.test_openai_table import EXAMPLES

from jitney_api import fields as chat_fields
from jitney_api.response_fields import IGNORED, REFUSED, RENAMED
from jitney_api.response_schemas import ResponseRequest
from jitney_api.schemas import Sampled

PAGE = Path(__file__).parent.parent.parent / "docs" / "RESPONSES.md"
ROW = re.compile(r"^\| `(\w+)` \| (served|ignored|refused)(?: unless ((?:`[^`]*`(?: or )?)+))?(?:: .*)? \|$")


class Row(NamedTuple):
    """neutral: the values that a refused field may have."""

    field: str
    fate: str
    neutral: tuple[Any, ...]


def rows() -> list[Row]:
    found = []
    table = PAGE.read_text().partition("| field | what happens |\n|---|---|\n")[2].partition("\n\n")[0]
    for line in table.splitlines():
        match = ROW.match(line)
        assert match, f"not a row of the table: {line}"
        field, fate, unless = match.groups()
        found.append(Row(field, fate, tuple(json.loads(value) for value in re.findall(r"`([^`]*)`", unless or ""))))
    return found


ROWS = rows()


def those(fate: str) -> list[Any]:
    return [pytest.param(row, id=row.field) for row in ROWS if row.fate == fate]


def test_every_field_of_the_official_package_is_in_the_table() -> None:
    official = {*response_create_params.ResponseCreateParamsBase.__annotations__, "stream"}
    assert official - {row.field for row in ROWS} == set()


def test_every_field_that_the_code_names_is_in_the_table_once() -> None:
    named = [row.field for row in ROWS]
    assert len(named) == len(set(named))
    as_in_chats = {*chat_fields.REFUSED, *chat_fields.RENAMED}
    assert {*IGNORED, *REFUSED, *RENAMED} - as_in_chats - set(named) == set()


def ask(api: Api, **given: Any) -> Any:
    return api.post("/v1/responses", {"model": api.model, "input": "hello", "seed": 1, **given})


SERVED: dict[str, dict[str, Any]] = {
    "input": {"input": "other"},
    "instructions": {"instructions": "Be brief."},
    "max_output_tokens": {"max_output_tokens": 5},
    "temperature": {"temperature": 0.5},
    "top_p": {"top_p": 0.5},
    "text": {"text": {"format": {"type": "json_object"}, "verbosity": "medium"}},
    "include": {"include": ["message.output_text.logprobs"]},
    "top_logprobs": {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    "store": {"store": False},
    "metadata": {"metadata": {"a": "b"}},
}
ELSEWHERE = {"model", "stream", "stream_options", "background", "previous_response_id"}
"""Tested for what they do, in test_api_responses and test_api_responses_sdk."""


@pytest.mark.parametrize("row", those("served"))
async def test_what_the_table_calls_served_changes_the_job(api: Api, worker: Any, row: Row) -> None:
    assert row.field in ResponseRequest.model_fields
    if row.field not in ELSEWHERE:
        plain = await accepted(worker, ask(api))
        assert await accepted(worker, ask(api, **SERVED[row.field])) != plain


@pytest.mark.parametrize("row", those("ignored"))
async def test_what_the_table_calls_ignored_changes_nothing(api: Api, worker: Any, row: Row) -> None:
    assert row.field in IGNORED
    assert await accepted(worker, ask(api, **{row.field: "anything"})) == await accepted(worker, ask(api))


@pytest.mark.parametrize("row", those("refused"))
async def test_what_the_table_calls_refused_is_refused_by_name_unless_it_changes_nothing(
    api: Api, worker: Any, redis: Any, row: Row
) -> None:
    error = await refused(redis, api.model, await ask(api, **{row.field: {"something": "else"}}))
    assert (error["param"], error["code"]) == (row.field, "unsupported_parameter")
    assert row.neutral == (() if row.field in RENAMED else REFUSED[row.field])
    plain = await accepted(worker, ask(api))
    for value in row.neutral:
        assert await accepted(worker, ask(api, **{row.field: value})) == plain


@pytest.mark.parametrize("field", sorted(Sampled.model_fields.keys() - {row.field for row in ROWS} - {"seed"}))
async def test_options_that_openai_does_not_know_do_what_they_do_in_chats(api: Api, worker: Any, field: str) -> None:
    plain, given = await accepted(worker, ask(api)), {field: EXAMPLES[field]}
    spec = await accepted(worker, ask(api, **given))
    assert spec != plain
    assert spec.sampling == (await accepted(worker, api.chat(seed=1, **given))).sampling


@pytest.mark.parametrize("field", sorted(chat_fields.REFUSED.keys() - {row.field for row in ROWS}))
async def test_what_chats_refuse_is_refused_here_too(api: Api, redis: Any, field: str) -> None:
    error = await refused(redis, api.model, await ask(api, **{field: {"something": "else"}}))
    assert error["param"] == field
