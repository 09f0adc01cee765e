"""A response's stream, read strictly; and gone on with from every number, at any time, through any process."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NamedTuple

import pytest
from tests.api.api_wire import Answer
from tests.api.conftest import Api, ScriptedJob, ScriptedWorker, StartApi
from tests.api.test_api_resumed_streams import KEEP_ALIVE, TALES, Tale, body_of, failing, plain, silent, with_logprobs

from jitney.keys import Keys

DELTA = "response.output_text.delta"


async def cut(job: ScriptedJob) -> None:
    await job.say("a")
    await job.finish("b", "length")


async def cancelled(job: ScriptedJob) -> None:
    await job.say("Half")
    await job.queue.cancel(job.id)


async def cancelled_early(job: ScriptedJob) -> None:
    await job.queue.cancel(job.id)


STORIES = (plain, with_logprobs, failing, silent, cut, cancelled, cancelled_early)
assert {plain, with_logprobs, failing, silent} < set(TALES)


class Told(NamedTuple):
    """One event of a response's stream."""

    number: int
    data: dict[str, Any]
    raw: bytes


def told(body: bytes) -> list[Told]:
    """The frames of a whole stream. AssertionError for whatever a reader would have to guess at."""
    assert body.endswith(b"\n\n") or not body
    found = []
    for raw in body.split(b"\n\n")[:-1]:
        event, number, data = raw.split(b"\n")
        fields = json.loads(data.removeprefix(b"data: "))
        assert event == b"event: " + fields["type"].encode()
        assert number == b"id: %d" % fields["sequence_number"]
        found.append(Told(fields["sequence_number"], fields, raw + b"\n\n"))
    return found


async def create(api: Api, **fields: Any) -> str:
    """The id of a response in the background."""
    body = {"model": api.model, "input": "hello", "background": True, **fields}
    answer = await api.post("/v1/responses", body)
    assert answer.status == 200
    return (await answer.json())["id"]


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
async def test_from_every_number_on_a_reader_is_told_what_the_live_one_was(
    api: Api, worker: ScriptedWorker, story: Tale
) -> None:
    id = await create(api, metadata={"a": "b"}, instructions="Be brief.")
    path = f"/v1/responses/{id}?stream=true"
    job = await worker.claim()
    reading = asyncio.create_task(api.get(path))
    await story(job)
    live = await body_of(await reading)
    frames = told(live)
    assert [frame.number for frame in frames] == list(range(len(frames)))
    assert all(frame.data["delta"] or frame.data["logprobs"] for frame in frames if frame.data["type"] == DELTA)
    for number in range(len(frames) - 1):
        rest = await body_of(await api.get(f"{path}&starting_after={number}"))
        assert rest == b"".join(frame.raw for frame in frames[number + 1 :])
        assert await body_of(await api.get(path, last_event_id=str(number))) == rest
    assert await body_of(await api.get(path)) == live
    over = await api.get(f"{path}&starting_after={len(frames) - 1}")
    assert (over.status, await over.body()) == (204, b"")
    beyond = await api.get(f"{path}&starting_after={len(frames)}")
    assert (beyond.status, (await beyond.json())["error"]["code"]) == (410, "stream_lost")
    assert await (await api.get(f"/v1/responses/{id}")).json() == frames[-1].data["response"]


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
async def test_the_stream_of_a_request_is_the_stream_of_its_response(
    start_api: StartApi, write_queue_card: Any, worker: ScriptedWorker, story: Tale
) -> None:
    await write_queue_card()
    api = await start_api(headers_hold_s=0, keep_alive_s=0.05)
    answer = await api.post("/v1/responses", {"model": api.model, "input": "hello", "stream": True})
    job = await worker.claim()
    await story(job)
    live = (await answer.body()).replace(KEEP_ALIVE, b"")
    assert [frame.number for frame in told(live)] == list(range(len(told(live))))
    assert await body_of(await api.get(f"/v1/responses/resp_{job.id}?stream=true")) == live


async def test_a_stream_goes_on_through_a_process_that_was_started_after_the_first_one_ended(
    start_api: StartApi, write_queue_card: Any, worker: ScriptedWorker
) -> None:
    await write_queue_card()
    first = await start_api(headers_hold_s=0)
    id = await create(first, instructions="Be brief.")
    path = f"/v1/responses/{id}?stream=true"
    answer = await first.get(path)
    job = await worker.claim()
    await job.say("a", "b")
    heard = b""
    async for chunk in answer.chunks():
        heard += chunk.replace(KEEP_ALIVE, b"")
        if heard.count(DELTA.encode() + b"\n") == 2:
            break
    first.server.should_exit = True
    last_words = b"".join([chunk async for chunk in answer.chunks()]).removeprefix(KEEP_ALIVE)
    assert json.loads(last_words.removeprefix(b"data: "))["error"]["code"] == "api_stopping"
    await job.say("c")
    second = await start_api()
    again = await second.get(f"{path}&starting_after={told(heard)[-1].number}")
    await job.finish("d")
    rest = await body_of(again)
    third = await start_api()
    assert heard + rest == await body_of(await third.get(path))


async def test_a_log_that_was_folded_says_the_same(api: Api, worker: ScriptedWorker, redis: Any) -> None:
    id = await create(api)
    await plain(await worker.claim())
    path = f"/v1/responses/{id}"
    before, stream = await (await api.get(path)).json(), await body_of(await api.get(f"{path}?stream=true"))
    keys, job_id = Keys(worker.queue.name), id.removeprefix("resp_")
    await redis.zadd(keys.ended, {job_id: 1})  # long ago
    assert await worker.queue.fold_ended() == 1
    assert not await redis.exists(keys.tokens(job_id))
    assert await (await api.get(path)).json() == before
    assert await body_of(await api.get(f"{path}?stream=true")) == stream


async def test_a_second_attempt_is_no_second_beginning(api: Api, worker: ScriptedWorker) -> None:
    id = await create(api)
    job = await worker.claim()
    await job.say("a")
    assert await worker.queue.release(job.delivery.id, job.delivery.fence) == "ok"
    queued_again = await (await api.get(f"/v1/responses/{id}")).json()
    assert queued_again["status"] == "in_progress", "it has begun, though it waits"
    again = await worker.claim()
    assert again.id == job.id
    again.seq, again.num_tokens, again.positions = job.seq, job.num_tokens, job.positions
    await again.finish("b")
    kinds = [frame.data["type"] for frame in told(await body_of(await api.get(f"/v1/responses/{id}?stream=true")))]
    assert kinds.count("response.in_progress") == kinds.count("response.output_item.added") == 1
    assert kinds.count(DELTA) == 2


async def test_a_number_that_the_log_has_not_come_to_is_of_another_stream(api: Api, worker: ScriptedWorker) -> None:
    id = await create(api)
    path = f"/v1/responses/{id}?stream=true&starting_after="
    assert (await api.get(f"{path}2")).status == 410
    job = await worker.claim()
    await job.say("a")
    assert (await api.get(f"{path}6")).status == 410
    waiting: Answer = await api.get(f"{path}5")
    assert waiting.status == 200
    await job.finish("b")
    assert told(await body_of(waiting))[0].data["delta"] == "b"


@pytest.mark.parametrize(
    ("query", "headers", "param"),
    [
        ("?starting_after=1", {}, "starting_after"),
        ("?stream=true&starting_after=-1", {}, "starting_after"),
        ("?stream=true&starting_after=x", {}, "starting_after"),
        ("?stream=maybe", {}, "stream"),
        ("?stream=true", {"last_event_id": "x"}, "Last-Event-ID"),
        ("?stream=true&starting_after=1", {"last_event_id": "0"}, "Last-Event-ID"),
    ],
)
async def test_a_cursor_that_makes_no_sense_is_refused_by_name(
    api: Api, query: str, headers: dict[str, str], param: str
) -> None:
    answer = await api.get(f"/v1/responses/{await create(api)}{query}", **headers)
    assert (answer.status, (await answer.json())["error"]["param"]) == (400, param)
