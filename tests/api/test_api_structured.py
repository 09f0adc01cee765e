"""`response_format` and `structured_outputs` over HTTP: what the job asks for, and what is refused by which name."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from jitney.structured import StructuredOutputs

THEIRS = "response_format.json_schema.schema"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"zeta": {"type": "integer"}, "alpha": {"type": "string"}},
    "required": ["zeta", "alpha"],
    "additionalProperties": False,
}


def response_format(schema: Any = SCHEMA, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "town", "strict": True, "schema": schema, **more}}


async def structure_of(worker, asking) -> StructuredOutputs | None:
    """What the job behind a request is to look like."""
    request = asyncio.ensure_future(asking)
    job = await worker.claim()
    await job.finish("{}")
    assert (await request).status in (200, 202)
    return job.spec.sampling.structured_outputs


async def refusal_of(redis, api, asking) -> dict[str, Any]:
    """The error of a request that wrote no job."""
    answer = await asking
    assert answer.status == 400
    assert await redis.exists(f"jitney:{{jitney:{api.model}}}:counts") == 0
    return (await answer.json())["error"]


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
async def test_a_response_format_becomes_the_jobs_structure(api, worker, endpoint):
    ask = getattr(api, endpoint)
    found = await structure_of(worker, ask(response_format=response_format(description="a town")))
    assert found == StructuredOutputs(json=SCHEMA)
    assert list(orjson.loads(found.json_schema)["properties"]) == ["zeta", "alpha"]
    assert await structure_of(worker, ask(response_format={"type": "json_object"})) == StructuredOutputs(
        json_object=True
    )
    assert await structure_of(worker, ask(response_format={"type": "text"})) is None
    assert await structure_of(worker, ask(response_format=response_format(strict=False))) == found


@pytest.mark.parametrize(
    "structure", [{"json": SCHEMA}, {"regex": "a+"}, {"choice": ["a", "b"]}, {"json_object": True}]
)
async def test_structured_outputs_are_taken_everywhere_as_they_are(api, worker, structure):
    expected = StructuredOutputs(**structure)
    assert await structure_of(worker, api.chat(structured_outputs=structure)) == expected
    assert await structure_of(worker, api.complete(structured_outputs=structure)) == expected
    body = {"model": api.model, "prompt": "x", "structured_outputs": structure}
    assert await structure_of(worker, api.post("/v1/jobs", body)) == expected


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "needs json_schema"),
        ({"response_format": response_format() | {"type": "text"}}, "response_format", "takes no json_schema"),
        ({"response_format": response_format(name="no spaces")}, "response_format.json_schema.name", "pattern"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, THEIRS, "required"),
        ({"response_format": response_format([1])}, THEIRS, "must be an object"),
        ({"response_format": response_format({"not": {}})}, THEIRS, '["not"]'),
        ({"response_format": response_format({"const": "x" * 70_000})}, THEIRS, "at most"),
        ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs.json", '["not"]'),
        ({"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs.regex", "look-around"),
        ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar", "unknown name"),
        ({"structured_outputs": {}}, "structured_outputs", "needs one of"),
        ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs", "regex and json_object"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "structured_outputs", "ignore_eos"),
        ({"structured_outputs": {"regex": "a"}, "response_format": response_format()}, "response_format", "both given"),
        ({"guided_regex": "a"}, "guided_regex", "structured_outputs.regex"),
    ],
)  # fmt: skip
async def test_what_cannot_be_followed_is_a_400_by_the_name_that_was_used(redis, api, fields, param, words):
    error = await refusal_of(redis, api, api.chat(**fields))
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert words in error["message"]
    assert len(error["message"]) < 400


async def test_the_openapi_page_tells_both(api):
    document = await (await api.get("/openapi.json")).json()
    fields = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert {"response_format", "structured_outputs"} <= set(fields)
    assert set(document["components"]["schemas"]["StructuredOutputs"]["properties"]) == {
        "json", "regex", "choice", "grammar", "json_object"
    }  # fmt: skip
