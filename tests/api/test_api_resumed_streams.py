"""Every stream, read strictly; and gone on with from every cursor: through another process, after a restart, later."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.api.api_wire import Answer
from tests.api.conftest import Api, ScriptedJob, ScriptedWorker, StartApi
from tests.api.strict_sse import dispatched

from jitney.keys import Keys

FORMATS = ("job", "chat.completion.chunk", "completion")
USAGE = ("", "&include_usage=true", "&include_usage=true&continuous_usage_stats=true")
KEEP_ALIVE = b": keep-alive\n\n"


def entry(token: str) -> dict[str, Any]:
    one = {"token_id": 7, "token": token, "logprob": -0.5, "bytes": list(token.encode())}
    return {**one, "top": [one]}


async def plain(job: ScriptedJob) -> None:
    await job.say("Hi", " ", "", "you\n\ndata: [DONE]\r\n")
    await job.finish(" end")


async def two_choices(job: ScriptedJob) -> None:
    await job.say("one", prompt_logprobs=(None, entry("x")))
    await job.say("two", choice=1)
    await job.say("!", choice=1, finish_reason="stop")
    await job.finish("", "length")


async def with_logprobs(job: ScriptedJob) -> None:
    await job.say("Hé", logprobs=(entry("Hé"),))
    await job.say("", logprobs=(entry(""),))
    await job.say(" you", logprobs=(entry(" you"),))
    await job.finish()


async def failing(job: ScriptedJob) -> None:
    await job.say("Half")
    await job.fail(message="it broke\n\ndata: lies")


async def silent(job: ScriptedJob) -> None:
    await job.finish()


async def calling(job: ScriptedJob) -> None:
    job.started = {"call_format": "hermes"}
    await job.say("Let me", " see. ", "<tool_", 'call>\n{"name": "add", "argum', 'ents": {"a"', ": 1}", "}\n</tool")
    await job.say("_call>", '\n<tool_call>{"name": "add", "arguments": {}}', "</tool_call>", "\n")
    await job.finish()


async def two_that_call(job: ScriptedJob) -> None:
    job.started = {"call_format": "llama", "max_calls": 1}
    await job.say('{"name": "add", "par', logprobs=(entry('{"name": "add", "par'),))
    await job.say('{"name"', ": 5}", choice=1)
    await job.say('ameters": {}}', logprobs=(entry('ameters": {}}'),))
    await job.say("", choice=1, finish_reason="length")
    await job.finish(" ; ")


TALES = (plain, two_choices, with_logprobs, failing, silent, calling, two_that_call)
Tale = Callable[[ScriptedJob], Awaitable[None]]


async def body_of(answer: Answer) -> bytes:
    """Without the comments, which tell of silence and of nothing else."""
    assert answer.status == 200
    return (await answer.body()).replace(KEEP_ALIVE, b"")


@pytest.mark.parametrize("tale", TALES, ids=lambda tale: tale.__name__)
@pytest.mark.parametrize("usage", USAGE, ids=["none", "last", "every"])
@pytest.mark.parametrize("stream_format", FORMATS)
async def test_from_every_cursor_on_a_reader_is_told_what_the_live_one_was(
    api: Api, worker: ScriptedWorker, stream_format: str, usage: str, tale: Tale
) -> None:
    job_id = await api.create_job()
    path = f"/v1/jobs/{job_id}/events?format={stream_format}{usage}"
    job = await worker.claim()
    reading = asyncio.create_task(api.get(path))
    await tale(job)
    live = await body_of(await reading)
    dispatched(live)
    for seq in range(job.seq):
        rest = await body_of(await api.get(f"{path}&starting_after={seq}"))
        assert live.endswith(rest)
        dispatched(rest)
        assert await body_of(await api.get(path, last_event_id=str(seq))) == rest
        # Neither too much nor too little of it: exactly what comes after the cursor.
        assert ids_of(rest) == {number for number in ids_of(live) if number > seq}


def ids_of(body: bytes) -> set[int]:
    return {int(line[4:]) for line in body.split(b"\n") if line.startswith(b"id: ")}


@pytest.mark.parametrize("stream_format", FORMATS)
async def test_a_stream_goes_on_through_a_process_that_was_started_after_the_first_one_ended(
    start_api: StartApi, write_queue_card, worker: ScriptedWorker, stream_format: str
) -> None:
    await write_queue_card()
    first = await start_api(headers_hold_s=0)
    job_id = await first.create_job()
    path = f"/v1/jobs/{job_id}/events?format={stream_format}&include_usage=true"
    job = await worker.claim()
    answer = await first.get(path)
    await job.say("a", "b")
    heard = b""
    async for chunk in answer.chunks():
        heard += chunk.replace(KEEP_ALIVE, b"")
        if b"id: 3\n" in heard:
            break
    first.server.should_exit = True
    heard += b"".join([chunk async for chunk in answer.chunks()])
    *whole, stopped = dispatched(heard)
    assert json.loads(stopped.data)["error"]["code"] == "api_stopping"
    await job.say("c")
    second = await start_api()
    again = await second.get(path, last_event_id=whole[-1].id)
    await job.finish("d")
    rest = await body_of(again)
    third = await start_api()
    assert [*whole, *dispatched_after(rest, whole[-1].id)] == dispatched(await body_of(await third.get(path)))


def dispatched_after(body: bytes, last_id: str) -> list[Any]:
    """As a reader sees them that came with this id: it stays in force until another one comes."""
    return dispatched(b"id: " + last_id.encode() + b"\ndata: x\n\n" + body)[1:]


@pytest.mark.parametrize("stream_format", FORMATS)
async def test_a_log_that_was_folded_says_the_same_bytes(
    api: Api, worker: ScriptedWorker, redis: Any, stream_format: str
) -> None:
    job_id = await api.create_job()
    job = await worker.claim()
    await two_choices(job)
    path = f"/v1/jobs/{job_id}/events?format={stream_format}&include_usage=true"
    before = await body_of(await api.get(path))
    keys = Keys(worker.queue.name)
    await redis.zadd(keys.ended, {job_id: 1})  # long ago
    assert await worker.queue.fold_ended() == 1
    assert not await redis.exists(keys.tokens(job_id))
    assert await body_of(await api.get(path)) == before
    rest = await body_of(await api.get(path, last_event_id="3"))
    assert before.endswith(rest)
    assert 0 < len(rest) < len(before)


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
@pytest.mark.parametrize("tale", TALES, ids=lambda tale: tale.__name__)
async def test_the_stream_of_a_completion_is_read_strictly_and_its_job_says_the_same(
    start_api: StartApi, write_queue_card, worker: ScriptedWorker, endpoint: str, tale: Tale
) -> None:
    await write_queue_card()
    api = await start_api(headers_hold_s=0, keep_alive_s=0.05)
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = await getattr(api, endpoint)(stream=True, stream_options=options)
    job = await worker.claim()
    await tale(job)
    raw = await answer.body()
    assert raw.startswith(KEEP_ALIVE)
    live = raw.replace(KEEP_ALIVE, b"")
    assert dispatched(raw) == dispatched(live)
    kind = "chat.completion.chunk" if endpoint == "chat" else "completion"
    path = f"/v1/jobs/{job.id}/events?format={kind}&include_usage=true&continuous_usage_stats=true"
    assert await body_of(await api.get(path)) == live


async def test_usage_in_every_chunk_counts_up_to_that_chunk(api: Api, worker: ScriptedWorker) -> None:
    for endpoint in ("chat", "complete"):
        serving = asyncio.create_task(worker.serve("a", "b"))
        options = {"include_usage": True, "continuous_usage_stats": True}
        answer = await getattr(api, endpoint)(stream=True, stream_options=options)
        events = [json.loads(event.data) for event in dispatched(await body_of(answer))[:-1]]
        await serving
        told = [event["usage"]["completion_tokens"] for event in events]
        assert told == ([1, 1, 2, 3, 3] if endpoint == "chat" else [1, 2, 3, 3])
        assert {event["usage"]["prompt_tokens"] for event in events} == {7}
        assert events[-1]["choices"] == []
        assert events[-1]["usage"]["total_tokens"] == 10


@pytest.mark.parametrize(
    "options", [{"continuous_usage_stats": True}, {"continuous_usage_stats": True, "include_usage": False}]
)
async def test_usage_in_every_chunk_needs_usage(api: Api, redis: Any, options: dict[str, Any]) -> None:
    answer = await api.chat(stream=True, stream_options=options)
    error = (await answer.json())["error"]
    assert (answer.status, error["param"]) == (400, "stream_options.continuous_usage_stats")
    assert [key async for key in redis.scan_iter(f"{Keys(api.model).prefix}:*")] == []
    job_id = await api.create_job()
    answer = await api.get(f"/v1/jobs/{job_id}/events?continuous_usage_stats=true")
    assert (answer.status, (await answer.json())["error"]["param"]) == (400, "continuous_usage_stats")


@pytest.mark.parametrize(
    "body",
    [
        b"data: x",
        b"data: x\n",
        b"data: x\r\n\r\n",
        b"event: x\ndata: y\n\n",
        b"data:x\n\n",
        b"id: 2\ndata: x\n\nid: 2\ndata: y\n\n",
        b"id: x\ndata: x\n\n",
        b"data: x\nid: 1\n\n",
        b"data: \xff\n\n",
    ],
)
def test_the_strict_reader_is_strict(body: bytes) -> None:
    with pytest.raises((AssertionError, UnicodeDecodeError)):
        dispatched(body)
