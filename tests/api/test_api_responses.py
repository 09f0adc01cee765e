"""Responses over HTTP: who sees them, for how long, and what is refused by which name."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest
from tests.api.api_wire import until
from tests.api.conftest import Api, ScriptedWorker
from tests.api.test_api_disconnect import ending_of, send_and_leave_when

from jitney.keys import Keys

PATH = "/v1/responses"


async def create(api: Api, **fields: Any) -> Any:
    return await api.post(PATH, {"model": api.model, "input": "hello", **fields})


async def refusal_of(redis: Any, api: Api, **fields: Any) -> dict[str, Any]:
    """The error of a request that wrote no job."""
    answer = await create(api, **fields)
    assert answer.status == 400
    assert [key async for key in redis.scan_iter(f"{Keys(api.model).prefix}:*")] == []
    return (await answer.json())["error"]


SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": []}, "input", "list of messages"),
        ({"input": 5}, "input", "list of messages"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input", "'function_call_output'"),
        ({"input": [{"role": "user", "content": "x"}, {"type": "item_reference", "id": "x"}]}, "input", "item 1"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input.0.role", "'user'"),
        ({"input": [{"role": "user"}]}, "input.0.content", "required"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content", "type 'input_image'"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input.0.content", "text: '...'"),
        ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
        ({"temperature": -1}, "temperature", "0"),
        ({"top_logprobs": 3}, "top_logprobs", "include"),
        ({"include": ["x"]}, "include.0", "message.output_text.logprobs"),
        ({"background": True, "store": False}, "store", "needs store=true"),
        ({"background": True, "on_disconnect": "cancel"}, "on_disconnect", "background"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options", "needs stream=true"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation", ""),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format", "needs name and schema"),
        ({"text": {"format": {"type": "json_object", "schema": {}}}}, "text.format", "takes no schema"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type", "json_schema"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "medium"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}},
            "text.format.schema",
            '["not"]',
        ),
        ({"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}}, "text.format", "both"),
        ({"truncation": "auto"}, "truncation", "'disabled'"),
        ({"tools": [{"type": "web_search"}]}, "tools", "not supported"),
        ({"max_tokens": 5}, "max_tokens", "max_output_tokens"),
        ({"messages": []}, "messages", "input"),
        ({"response_format": {"type": "json_object"}}, "response_format", "text.format"),
        ({"previous_response_id": "resp_x"}, "previous_response_id", "no response resp_x"),
        ({"metadata": {str(n): "x" for n in range(17)}}, "metadata", "16"),
    ],
)  # fmt: skip
async def test_what_cannot_be_done_is_refused_by_its_name(
    api: Api, redis: Any, fields: dict[str, Any], param: str, words: str
) -> None:
    error = await refusal_of(redis, api, **fields)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert words in error["message"]


async def test_model_and_input_are_required(api: Api) -> None:
    for body, param in (({"input": "x"}, "model"), ({"model": api.model}, "input")):
        answer = await api.post(PATH, body)
        assert (answer.status, (await answer.json())["error"]["param"]) == (400, param)
    answer = await api.post(PATH, {"model": "nobody", "input": "x"})
    assert (answer.status, (await answer.json())["error"]["code"]) == (404, "model_not_found")


async def test_a_response_that_is_not_stored_is_not_found_and_its_input_is_not_kept(
    api: Api, worker: ScriptedWorker, redis: Any
) -> None:
    answering = asyncio.create_task(create(api, store=False))
    job = await worker.claim()
    await job.say("Hi")
    id = f"resp_{job.id}"
    while_it_runs = await (await api.get(f"{PATH}/{id}")).json()
    await job.finish()
    body = await (await answering).json()
    assert (body["id"], body["store"], body["status"]) == (id, False, "completed")
    assert await redis.exists(Keys(api.model).body(job.id)) == 0
    gone = await api.get(f"{PATH}/{id}")
    assert gone.status == 404
    error = (await gone.json())["error"]
    assert while_it_runs["error"] == error
    assert "store=false" in error["message"]
    assert (await api.get(f"{PATH}/{id}?stream=true")).status == 404
    assert (await api.post(f"{PATH}/{id}/cancel")).status == 404
    refused = await create(api, previous_response_id=id)
    assert (await refused.json())["error"]["code"] == "previous_response_not_found"


async def test_what_is_no_response_is_not_found_in_the_same_words(api: Api, worker: ScriptedWorker) -> None:
    job_id = await api.create_job()
    response_id = (await (await create(api, background=True)).json())["id"]
    bare = response_id.removeprefix("resp_")
    for id in (f"resp_{job_id}", job_id, bare, "resp_", "x", f"resp_{api.model}.{'0' * 22}", "resp_" + "x" * 500):
        for answer in (await api.get(f"{PATH}/{id}"), await api.post(f"{PATH}/{id}/cancel")):
            error = (await answer.json())["error"]
            assert (answer.status, error["code"]) == (404, "job_not_found")
            told = f"no response {id[:96]}: it never existed, was created with store=false, or has expired"
            assert error["message"] == told


async def test_what_is_kept_ends_with_the_result(api: Api, worker: ScriptedWorker, redis: Any) -> None:
    answer = await create(api, background=True, result_ttl_s=77)
    job = await worker.claim()
    await job.finish("Hi")
    keys = Keys(api.model)
    for key in (keys.body(job.id), keys.job(job.id), keys.tokens(job.id)):
        assert 0 < await redis.pttl(key) <= 77_000
    id = (await answer.json())["id"]
    await redis.delete(keys.job(job.id), keys.tokens(job.id), keys.body(job.id))  # as time will
    assert (await api.get(f"{PATH}/{id}")).status == 404


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels_what_it_waited_for(api: Api, worker: ScriptedWorker, stream: bool) -> None:
    job = await send_and_leave_when(api, worker.claim, PATH, {"input": "hello", "stream": stream})
    assert await ending_of(api, job.id) == "cancelled"


async def test_a_stream_in_the_background_begins_at_once_and_goes_on_when_its_client_leaves(
    start_api: Any, write_queue_card: Any, worker: ScriptedWorker
) -> None:
    await write_queue_card()
    api = await start_api(disconnect_grace_s=0, headers_hold_s=600)
    answer = await create(api, stream=True, background=True)
    first = await anext(aiter(answer.chunks()))
    assert first.startswith(b"event: response.created\n")
    await answer.close()

    async def num_requests() -> int:
        return len(api.server.server_state.tasks)

    await until(num_requests, 0)  # the API has seen that nobody is there, and done what it does then
    [job] = await worker.serve("Hi")
    assert (await (await api.get(f"{PATH}/resp_{job.id}")).json())["status"] == "completed"


async def test_one_that_has_not_ended_well_cannot_be_gone_on_with(api: Api, worker: ScriptedWorker) -> None:
    id = (await (await create(api, background=True)).json())["id"]
    for status in ("queued", "cancelled"):
        error = (await (await create(api, previous_response_id=id)).json())["error"]
        assert (error["param"], error["code"]) == ("previous_response_id", "invalid_value")
        assert f"is {status}" in error["message"]
        await api.post(f"{PATH}/{id}/cancel")


async def test_a_request_that_is_repeated_under_its_key_finds_its_response(api: Api, worker: ScriptedWorker) -> None:
    answers = [await create(api, background=True, idempotency_key="k") for _ in range(2)]
    first, second = [await answer.json() for answer in answers]
    assert first == second
    [job] = await worker.serve("Hi")
    third = await (await create(api, background=True, idempotency_key="k")).json()
    assert (third["id"], third["status"]) == (f"resp_{job.id}", "completed")
    other = await create(api, background=True, idempotency_key="k", instructions="x")
    assert other.status == 409


async def test_the_header_names_the_job_behind_it(api: Api, worker: ScriptedWorker) -> None:
    answer = await create(api, background=True)
    id = (await answer.json())["id"]
    assert id == f"resp_{answer.headers['x-jitney-job-id']}"
    assert (await api.get(f"{PATH}/{id}")).headers["x-jitney-job-id"] == answer.headers["x-jitney-job-id"]


async def test_what_expires_in_the_queue_has_failed(api: Api, worker: ScriptedWorker, redis: Any) -> None:
    id = (await (await create(api, background=True, deadline=1)).json())["id"]
    assert (await worker.queue.claim("w", "n", credit=1, fingerprint="fp", lease_s=60)).deliveries == ()
    found = await (await api.get(f"{PATH}/{id}")).json()
    assert (found["status"], found["error"]["code"], found["output"]) == ("failed", "job_expired", [])


@pytest.mark.parametrize("response", [{"format": 5}, {"background": "?"}, {"previous_response_id": []}])
async def test_what_somebody_else_wrote_into_a_job_is_no_accident(
    api: Api, worker: ScriptedWorker, redis: Any, response: Any
) -> None:
    id = (await (await create(api, background=True)).json())["id"]
    body = Keys(api.model).body(id.removeprefix("resp_"))
    await redis.set(body, orjson.dumps(orjson.loads(await redis.get(body)) | {"response": response}))
    assert (await api.get(f"{PATH}/{id}")).status == 404


async def test_a_log_without_its_end_is_told_of_and_not_taken_for_an_answer(
    api: Api, worker: ScriptedWorker, redis: Any
) -> None:
    id = (await (await create(api, background=True)).json())["id"]
    [job] = await worker.serve("Hi")
    await redis.xdel(worker.queue.keys.tokens(job.id), f"{job.seq}-0")
    for answer in (await api.get(f"{PATH}/{id}"), await api.get(f"{PATH}/{id}?stream=true&starting_after=1")):
        assert (answer.status, (await answer.json())["error"]["code"]) == (410, "stream_lost")


async def test_a_conversation_that_has_grown_too_large_is_refused_by_the_callers_own_field(
    api: Api, worker: ScriptedWorker, redis: Any
) -> None:
    half = "x" * 600_000
    serving = asyncio.create_task(worker.serve("Hi"))
    first = await (await create(api, input=half)).json()
    await serving
    answer = await create(api, input=half, previous_response_id=first["id"])
    error = (await answer.json())["error"]
    assert (answer.status, error["param"]) == (400, "input")
    assert "at most 1048576 are allowed" in error["message"]
