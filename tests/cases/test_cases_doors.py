"""B57, B58, B66: what a stream says at its end, in words that no client takes for another ending; ids of users."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import quote

import orjson
import pytest
from tests.api.api_wire import Answer
from tests.api.conftest import Api, ScriptedWorker, StartApi
from tests.faults.proxy import Proxy

from jitney.connection import Redis
from jitney.embedded import EmbeddedServer

ABSENT = object()
PATHS = ("/v1/chat/completions", "/v1/completions")


def body_of(api: Api, path: str, **fields: Any) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
    return {"model": api.model, **asked, **{name: value for name, value in fields.items() if value is not ABSENT}}


async def last_words(answer: Answer) -> tuple[list[Any], bool]:
    """Every frame's JSON, and whether `[DONE]` was the last one. The stream must end in good order."""
    frames = [frame.data async for frame in answer.frames()]
    done = frames[-1:] == ["[DONE]"]
    return [orjson.loads(data) for data in frames if data != "[DONE]"], done


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"include_usage": True}, True),
        ({"include_usage": False}, False),
        ({"include_usage": None}, False),
        ({}, False),
        (None, False),
        (ABSENT, False),
    ],
)
async def test_usage_stands_in_one_chunk_before_done_or_nowhere(
    start_api: StartApi, write_queue_card: Any, worker: ScriptedWorker, path: str, options: Any, wanted: bool
) -> None:
    """B57: and every other chunk has choices, and no usage."""
    await write_queue_card()
    api = await start_api()
    asking = asyncio.create_task(api.post(path, body_of(api, path, stream=True, stream_options=options)))
    await worker.serve("a", "b")
    chunks, done = await last_words(await asking)
    assert done
    with_usage = [chunk for chunk in chunks if chunk.get("usage")]
    assert len(with_usage) == (1 if wanted else 0)
    if wanted:
        assert chunks[-1] is with_usage[0]
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["total_tokens"] > 0
    assert all(chunk["choices"] for chunk in chunks[: len(chunks) - len(with_usage)])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, None, ABSENT])
async def test_stream_options_without_a_stream_are_refused(
    start_api: StartApi, write_queue_card: Any, path: str, stream: Any
) -> None:
    """B57: OpenAI refuses them, and a client that forgot `stream` should hear of it."""
    await write_queue_card()
    api = await start_api()
    answer = await api.post(path, body_of(api, path, stream=stream, stream_options={"include_usage": True}))
    error = (await answer.json())["error"]
    assert (answer.status, error["param"]) == (400, "stream_options")


@pytest.mark.parametrize("path", PATHS)
async def test_what_is_refused_before_the_first_byte_has_a_status_of_its_own(
    start_api: StartApi, write_queue_card: Any, worker: ScriptedWorker, path: str
) -> None:
    """B58: by the API at once, and by a worker before its first token."""
    await write_queue_card()
    api = await start_api(headers_hold_s=20.0)
    answer = await api.post(path, body_of(api, path, stream=True, n=0))
    assert (answer.status, (await answer.json())["error"]["param"]) == (400, "n")
    asking = asyncio.create_task(api.post(path, body_of(api, path, stream=True)))
    job = await worker.claim()
    await job.fail(type="invalid_request_error", code="context_length_exceeded", message="too long", param="prompt")
    answer = await asking
    error = (await answer.json())["error"]
    assert (answer.status, error["code"], answer.headers["content-type"]) == (
        400,
        "context_length_exceeded",
        "application/json",
    )


@pytest.mark.parametrize("path", PATHS)
async def test_what_fails_after_it_is_one_error_and_no_done(
    start_api: StartApi, write_queue_card: Any, worker: ScriptedWorker, path: str
) -> None:
    """B58: no chunk has a finish reason, so nothing looks like a full answer; and the connection ends."""
    await write_queue_card()
    api = await start_api()
    asking = asyncio.create_task(
        api.post(path, body_of(api, path, stream=True, stream_options={"include_usage": True}))
    )
    job = await worker.claim()
    await job.say("half")
    answer = await asking
    await job.fail(code="max_attempts", message="tried 3 times, without progress")
    chunks, done = await last_words(answer)
    assert not done
    assert [set(chunk) for chunk in chunks if "error" in chunk] == [{"error"}]
    assert chunks[-1]["error"]["code"] == "max_attempts"
    assert not [choice for chunk in chunks[:-1] for choice in chunk["choices"] if choice["finish_reason"]]
    assert not [chunk for chunk in chunks if chunk.get("usage")]


async def test_a_redis_that_goes_away_in_the_middle_ends_the_stream_as_an_error_when_it_stays_away(
    start_api: StartApi, write_queue_card: Any, worker: ScriptedWorker, server: EmbeddedServer
) -> None:
    """B58: never an endless wait with pings."""
    await write_queue_card()
    async with Proxy(server.port) as proxy:
        api = await start_api(redis_url=server.url.replace(f":{server.port}/", f":{proxy.port}/"))
        api.service.client.reader._max_outage_s = 3.0
        asking = asyncio.create_task(api.complete(stream=True))
        job = await worker.claim()
        await job.say("half")
        answer = await asking
        proxy.refuse()
        proxy.reset()
        chunks, done = await last_words(answer)
        assert not done
        assert chunks[-1]["error"]["type"] == "service_unavailable_error"
        proxy.heal()


@pytest.mark.parametrize("given", ["a:b", "*", "../x", "{tag}", "x" * 200, "jitney:keys", "a\tb", "a\rX: y"])
async def test_an_id_of_a_users_own_names_no_key_and_is_echoed_only_when_it_is_harmless(
    start_api: StartApi, write_queue_card: Any, redis: Redis, given: str
) -> None:
    """B66: as the request's id, as an idempotency key, and in the place of a job's id."""
    await write_queue_card()
    api = await start_api()
    before = {name async for name in redis.scan_iter(match=f"*{api.model}*")}
    answer = await api.post("/v1/jobs", {"model": api.model, "prompt": "x", "idempotency_key": given})
    known = (await answer.json())["id"]
    made = {name async for name in redis.scan_iter(match=f"*{api.model}*")} - before
    assert not [name for name in made if given.encode() in name]
    assert known.startswith(f"{api.model}.")
    if "\r" not in given:
        answer = await api.get("/livez", x_request_id=given)
        echoed = answer.headers["x-request-id"]
        assert echoed == given if given in ("a:b", "jitney:keys") else echoed.startswith("req_")
        assert "x" not in answer.headers
    for method in ("GET", "DELETE"):
        answer = await api.ask(method, f"/v1/jobs/{quote(given, safe='')}")
        assert (answer.status, (await answer.json())["error"]["type"]) == (404, "invalid_request_error")
