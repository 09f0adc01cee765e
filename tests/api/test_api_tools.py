"""Tools over HTTP: what a job asks for, what is refused by which name, and an answer's calls, whole and streamed."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from openai import AsyncOpenAI
from tests.api.api_wire import Answer
from tests.api.conftest import Api, ScriptedJob, ScriptedWorker, StartApi
from tests.api.test_api_requests import accepted, refused

from jitney.tool_calls import call_id

ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"zeta": {"type": "integer"}, "a": {"type": "integer"}}},
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock", "strict": True}}
NAMED: dict[str, Any] = {"type": "function", "function": {"name": "clock"}}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": '{"zeta": 1}'}}
TEXT = 'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"zeta": 1, "a": "}"}}\n</tool_call>\n'
TWICE = TEXT + '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize(
    ("fields", "names", "is_forced", "max_calls"),
    [
        ({}, ["add", "clock"], False, None),
        ({"tool_choice": "auto", "parallel_tool_calls": True}, ["add", "clock"], False, None),
        ({"parallel_tool_calls": False}, ["add", "clock"], False, 1),
        ({"tool_choice": "required"}, ["add", "clock"], True, None),
        ({"tool_choice": "required", "parallel_tool_calls": False}, ["add", "clock"], True, 1),
        ({"tool_choice": NAMED}, ["clock"], True, 1),
        ({"tool_choice": allowed("auto", "add")}, ["add"], False, None),
        ({"tool_choice": allowed("required", "clock", "add")}, ["add", "clock"], True, None),
    ],
)
@pytest.mark.parametrize("door", ["chat", "jobs"])
async def test_tools_arrive_in_the_job_in_their_own_order(
    api: Api,
    worker: ScriptedWorker,
    door: str,
    fields: dict[str, Any],
    names: list[str],
    is_forced: bool,
    max_calls: Any,
) -> None:
    body = {"model": api.model, "messages": [{"role": "user", "content": "x"}], "tools": [ADD, CLOCK], **fields}
    if door == "jobs":
        assert (await api.post("/v1/jobs", body)).status == 202
        job = await worker.claim()
        spec = job.spec
        await job.finish()
    else:
        spec = await accepted(worker, api.post("/v1/chat/completions", body))
    use = spec.tool_use
    assert [tool["function"]["name"] for tool in use.tools] == names
    assert (use.is_forced, use.max_calls) == (is_forced, max_calls)
    if "add" in names:
        assert list(use.tools[0]["function"]["parameters"]["properties"]) == ["zeta", "a"]


@pytest.mark.parametrize("fields", [{"tools": [ADD], "tool_choice": "none"}, {"tools": []}, {"tool_choice": "auto"}])
async def test_tools_that_may_not_be_called_are_none(api: Api, worker: ScriptedWorker, fields: dict[str, Any]) -> None:
    assert (await accepted(worker, api.chat(seed=1, **fields))).tool_use is None


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": "x"}, "tools", "not JSON"),
        ({"tools": {"a": 1}}, "tools", "not a list"),
        ({"tools": [{}]}, "tools.0.type", "only 'function'"),
        ({"tools": [ADD, {"type": "custom", "custom": {"name": "x"}}]}, "tools.1.type", "'custom'"),
        ({"tools": [{"type": "function"}]}, "tools.0.function", "required"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name", "letters"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name", "'a b'"),
        ({"tools": [{"type": "function", "function": {"name": "a", "description": 1}}]},
         "tools.0.function.description", "string"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}]},
         "tools.0.function.parameters", "object"),
        ({"tools": [ADD, ADD]}, "tools", "twice"),
        ({"tools": [CLOCK] * 129}, "tools", "at most 128"),
        ({"tools": [{"type": "function", "function": {"name": "a", "description": "x" * 300_000}}]}, "tools", "262144"),
        ({"tools": [ADD], "tool_choice": "sometimes"}, "tool_choice", "allowed_tools"),
        ({"tools": [ADD], "tool_choice": {"type": "function"}}, "tool_choice", "allowed_tools"),
        ({"tools": [ADD], "tool_choice": allowed("auto")}, "tool_choice", "allowed_tools"),
        ({"tools": [ADD], "tool_choice": NAMED}, "tool_choice", "'clock', which is not among tools"),
        ({"tools": [ADD], "tool_choice": allowed("auto", "add", "sub")}, "tool_choice", "'sub'"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": NAMED}, "tool_choice", "needs tools"),
        ({"tools": [ADD], "parallel_tool_calls": "yes"}, "parallel_tool_calls", "true or false"),
        ({"tools": [ADD], "response_format": {"type": "json_object"}}, "tools", "both given"),
        ({"tools": [ADD], "tool_choice": "required", "ignore_eos": True}, "tools", "ignore_eos"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"not": {}}}}],
          "tool_choice": "required"}, "tools", "parameters of 'a' cannot be followed"),
    ],
)  # fmt: skip
async def test_what_cannot_be_served_is_a_400_by_its_name(
    api: Api, redis: Any, fields: dict[str, Any], param: str, words: str
) -> None:
    error = await refused(redis, api.model, await api.chat(**fields))
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert words in error["message"]
    assert len(error["message"]) < 400


async def test_tools_need_a_chat(api: Api, redis: Any) -> None:
    body = {"model": api.model, "prompt": "x", "tools": [ADD]}
    assert (await refused(redis, api.model, await api.post("/v1/jobs", body)))["param"] == "tools"


async def test_calls_and_what_they_gave_come_back_in(api: Api, worker: ScriptedWorker) -> None:
    """B60."""
    messages = [
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None, "audio": None},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": [{"type": "text", "text": "1"}]},
    ]
    spec = await accepted(worker, api.chat(messages=messages, tools=[ADD]))
    assert spec.messages == (
        messages[0],
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "1"},
    )


async def answered(worker: ScriptedWorker, asking: Any, text: str, reason: str = "stop", **started: Any) -> Any:
    """The body of a request whose job said this."""
    request = asyncio.ensure_future(asking)
    job = await worker.claim()
    job.started = {"call_format": "hermes", **started}
    await job.say(*text)
    await job.finish("", reason)
    return job, await (await request).json()


async def test_an_answer_tells_its_calls_beside_what_it_says(api: Api, worker: ScriptedWorker) -> None:
    job, body = await answered(worker, api.chat(tools=[ADD, CLOCK]), TWICE)
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see."
    assert choice["message"]["tool_calls"] == [
        {
            "id": call_id(job.id, 0, 0),
            "type": "function",
            "function": {"name": "add", "arguments": '{"zeta": 1, "a": "}"}'},
        },
        {"id": call_id(job.id, 0, 1), "type": "function", "function": {"name": "clock", "arguments": "{}"}},
    ]
    told = await (await api.get(f"/v1/jobs/{job.id}")).json()
    assert told["choices"][0]["tool_calls"] == choice["message"]["tool_calls"]
    assert told["choices"][0]["text"] == TWICE


@pytest.mark.parametrize(
    ("text", "reason", "content", "num_calls", "ending"),
    [
        ("Just words.", "stop", "Just words.", 0, "stop"),
        ('<tool_call>{"name": "add", "arguments": {}}', "stop", None, 1, "tool_calls"),
        ('<tool_call>{"name": "add", "arguments": {"a"', "length", None, 1, "length"),
        ("<tool_call>oops", "stop", "<tool_call>oops", 0, "stop"),
    ],
)
async def test_content_is_null_where_nothing_is_said_but_calls(
    api: Api, worker: ScriptedWorker, text: str, reason: str, content: str | None, num_calls: int, ending: str
) -> None:
    _, body = await answered(worker, api.chat(tools=[ADD]), text, reason)
    (choice,) = body["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (content, ending)
    assert len(choice["message"].get("tool_calls", [])) == num_calls


async def test_with_parallel_tool_calls_false_one_call_is_told(api: Api, worker: ScriptedWorker) -> None:
    asking = api.chat(tools=[ADD, CLOCK], parallel_tool_calls=False)
    _, body = await answered(worker, asking, TWICE, max_calls=1)
    assert [call["function"]["name"] for call in body["choices"][0]["message"]["tool_calls"]] == ["add"]


async def deltas_of(answer: Answer) -> tuple[list[dict[str, Any]], list[Any]]:
    """Of a stream: the deltas of choice 0, and its endings."""
    chunks = [json.loads(frame.data) async for frame in answer.frames() if frame.data != "[DONE]"]
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    return [one["delta"] for one in choices], [one["finish_reason"] for one in choices if one["finish_reason"]]


async def test_a_stream_tells_id_and_name_first_and_then_the_arguments(api: Api, worker: ScriptedWorker) -> None:
    asking = asyncio.ensure_future(api.chat(tools=[ADD], stream=True))
    job = await worker.claim()
    job.started = {"call_format": "hermes"}
    await job.say("Hm. ", "<tool_call>", '{"name": "add", "arguments": ', '{"zeta"', ": 1}", "}", "</tool_call>")
    await job.finish()
    told, endings = await deltas_of(await asking)
    assert told == [
        {"role": "assistant", "content": None},
        {"content": "Hm."},
        {"tool_calls": [{
            "index": 0, "id": call_id(job.id, 0, 0), "type": "function", "function": {"name": "add", "arguments": ""}
        }]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"zeta"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]},
        {},
    ]  # fmt: skip
    assert endings == ["tool_calls"]


@pytest.mark.parametrize("text", ["a <tool", '<tool_call>{"name": "a', " "])
async def test_what_was_held_back_and_became_no_call_is_told_at_the_end(
    api: Api, worker: ScriptedWorker, text: str
) -> None:
    asking = asyncio.ensure_future(api.chat(tools=[ADD], stream=True))
    job = await worker.claim()
    job.started = {"call_format": "hermes"}
    await job.say(*text)
    await job.finish()
    told, endings = await deltas_of(await asking)
    assert "".join(delta.get("content") or "" for delta in told) == text
    assert endings == ["stop"]


async def test_log_probabilities_are_told_once_whatever_their_tokens_became(api: Api, worker: ScriptedWorker) -> None:
    asking = asyncio.ensure_future(api.chat(tools=[ADD], stream=True, logprobs=True))
    job = await worker.claim()
    job.started = {"call_format": "hermes"}
    texts = ['Yes. <tool_call>{"name": "add", "arguments": {"zeta": 1}', "}", "</tool_call>"]
    for text in texts:
        await job.say(text, logprobs=({"token_id": 7, "token": text, "logprob": -0.5, "bytes": None, "top": []},))
    await job.finish()
    chunks = [json.loads(frame.data) async for frame in (await asking).frames() if frame.data != "[DONE]"]
    found = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [entry["token"] for one in found if one for entry in one["content"]] == texts


async def talk(job: ScriptedJob) -> None:
    job.started = {"call_format": "hermes"}
    await job.say(*TWICE)
    await job.finish()


async def test_the_official_helper_adds_a_stream_up_to_what_the_whole_answer_says(
    api: Api, worker: ScriptedWorker
) -> None:
    options: dict[str, Any] = {"model": api.model, "messages": [{"role": "user", "content": "x"}]}
    async with AsyncOpenAI(base_url=f"http://127.0.0.1:{api.port}/v1", api_key="none", max_retries=0) as openai:
        asking = asyncio.ensure_future(openai.chat.completions.create(**options, tools=[ADD, CLOCK]))
        await talk(await worker.claim())
        whole = (await asking).choices[0]

        async def helped() -> tuple[list[Any], Any]:
            async with openai.chat.completions.stream(**options, tools=[ADD, CLOCK]) as stream:
                events = [event async for event in stream]
                return events, await stream.get_final_completion()

        helping = asyncio.ensure_future(helped())
        await talk(await worker.claim())
        events, final = await helping
    message, expected = final.choices[0].message, whole.message
    assert message.content == expected.content
    assert [call.function.name for call in message.tool_calls] == ["add", "clock"]
    assert [call.function.arguments for call in message.tool_calls] == [
        call.function.arguments for call in expected.tool_calls or []
    ]
    assert final.choices[0].finish_reason == whole.finish_reason == "tool_calls"
    assert [event.name for event in events if event.type == "tool_calls.function.arguments.done"] == ["add", "clock"]


async def test_ids_are_the_same_through_another_process_and_from_the_middle_of_a_call(
    api: Api, start_api: StartApi, worker: ScriptedWorker
) -> None:
    asking = asyncio.ensure_future(api.chat(tools=[ADD, CLOCK], stream=True))
    job = await worker.claim()
    await talk(job)
    live = (await (await asking).body()).replace(b": keep-alive\n\n", b"")
    other = await start_api()
    path = f"/v1/jobs/{job.id}/events?format=chat.completion.chunk"
    for cursor in (0, 1, 40, 80, job.seq - 1):
        rest = await (await other.get(path, last_event_id=str(cursor))).body()
        assert live.endswith(rest.replace(b": keep-alive\n\n", b""))
    assert call_id(job.id, 0, 1).encode() in live
