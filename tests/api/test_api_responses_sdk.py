"""The official client's `responses` against the API: created, streamed, polled, gone on with, cancelled."""

from __future__ import annotations

import asyncio
from typing import Any

import openai as sdk
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

FULL_TURN = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


async def test_a_whole_response_has_text_usage_and_what_was_asked_for(api, worker, openai: AsyncOpenAI):
    serving = asyncio.create_task(worker.serve("Hi", " there"))
    answer = await openai.responses.create(
        model=api.model,
        input="hello",
        instructions="Be brief.",
        metadata={"who": "me"},
        max_output_tokens=9,
        temperature=0.5,
        top_p=0.9,
    )
    [job] = await serving
    assert job.spec.messages == ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"})
    assert (job.spec.sampling.max_tokens, job.spec.sampling.temperature, job.spec.sampling.top_p) == (9, 0.5, 0.9)
    assert answer.id == f"resp_{job.id}"
    assert (answer.object, answer.status, answer.model) == ("response", "completed", api.model)
    assert answer.output_text == "Hi there"
    [item] = answer.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    assert (answer.instructions, answer.metadata, answer.max_output_tokens) == ("Be brief.", {"who": "me"}, 9)
    assert (answer.temperature, answer.top_p, answer.truncation) == (0.5, 0.9, "disabled")
    assert (answer.tools, answer.tool_choice, answer.error, answer.incomplete_details) == ([], "auto", None, None)
    usage = answer.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (7, 3, 10)
    assert usage.input_tokens_details.cached_tokens == 3
    assert (await openai.responses.retrieve(answer.id)).to_dict() == answer.to_dict()


async def test_a_limit_that_was_reached_makes_the_response_incomplete(api, worker, openai: AsyncOpenAI):
    async def cut() -> None:
        job = await worker.claim()
        await job.say("Hi")
        await job.finish(" th", "length")

    for stream in (False, True):
        cutting = asyncio.create_task(cut())
        answer: Any = await openai.responses.create(model=api.model, input="x", max_output_tokens=2, stream=stream)
        if stream:
            events = [event async for event in answer]
            assert events[-1].type == "response.incomplete"
            answer = events[-1].response
        await cutting
        assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert answer.output[0].status == "incomplete"
        assert answer.output_text == "Hi th"
        assert (await openai.responses.retrieve(answer.id)).to_dict() == answer.to_dict()


async def test_a_streamed_response_has_openais_events_in_their_order_with_dense_numbers(
    api, worker, openai: AsyncOpenAI
):
    serving = asyncio.create_task(worker.serve("Hi", " there"))
    events = [event async for event in await openai.responses.create(model=api.model, input="hello", stream=True)]
    [job] = await serving
    assert [event.type for event in events] == FULL_TURN
    assert [event.sequence_number for event in events] == list(range(len(FULL_TURN)))
    assert [event.delta for event in events if event.type == "response.output_text.delta"] == ["Hi", " there"]
    assert events[-4].text == "Hi there"
    assert {event.response.id for event in events if hasattr(event, "response")} == {f"resp_{job.id}"}
    assert [events[0].response.status, events[1].response.status] == ["in_progress", "in_progress"]
    assert events[-2].item.to_dict() == events[-1].response.output[0].to_dict()


class Town(BaseModel):
    name: str


async def test_the_streaming_helper_builds_the_response_and_parses_it(api, worker, openai: AsyncOpenAI):
    async def serve() -> Any:
        job = await worker.claim()
        await job.say('{"name":', '"Rome"}')
        await job.finish()
        return job.spec

    serving = asyncio.create_task(serve())
    async with openai.responses.stream(model=api.model, input="a town", text_format=Town) as stream:
        final = await stream.get_final_response()
    spec = await serving
    assert final.output_parsed == Town(name="Rome")
    assert spec.sampling.structured_outputs.kind == "json"
    assert final.text.format.type == "json_schema"
    assert final.text.format.name == "Town"
    assert final.text.format.schema_["required"] == ["name"]
    serving = asyncio.create_task(serve())
    parsed = await openai.responses.parse(model=api.model, input="a town", text_format=Town)
    await serving
    assert parsed.output_parsed == Town(name="Rome")


async def test_a_response_in_the_background_is_answered_at_once_and_polled(api, worker, openai: AsyncOpenAI):
    answer = await openai.responses.create(model=api.model, input="hello", background=True, metadata={"a": "b"})
    assert (answer.status, answer.background, answer.output, answer.usage) == ("queued", True, [], None)
    assert (await openai.responses.retrieve(answer.id)).to_dict() == answer.to_dict()
    job = await worker.claim()
    assert job.spec.on_disconnect == "continue"
    await job.say("Half")
    running = await openai.responses.retrieve(answer.id)
    assert (running.status, running.output) == ("in_progress", [])
    await job.finish(" and whole")
    ended = await openai.responses.retrieve(answer.id)
    assert (ended.status, ended.output_text, ended.metadata) == ("completed", "Half and whole", {"a": "b"})
    assert (ended.created_at, ended.id) == (answer.created_at, answer.id)


async def test_a_stream_in_the_background_is_resumed_after_the_last_number_seen(api, worker, openai: AsyncOpenAI):
    stream = await openai.responses.create(model=api.model, input="hello", background=True, stream=True)
    job = await worker.claim()
    await job.say("Hi", " there")
    seen = []
    async for event in stream:
        seen.append(event)
        if event.type == "response.output_text.delta":
            break
    await stream.close()
    assert [event.type for event in seen[:3]] == ["response.created", "response.queued", "response.in_progress"]
    assert seen[0].response.status == seen[1].response.status == "queued"
    id, last = seen[0].response.id, seen[-1].sequence_number
    rest = await openai.responses.retrieve(id, stream=True, starting_after=last)
    await job.finish()
    more = [event async for event in rest]
    assert [event.sequence_number for event in (*seen, *more)] == list(range(len(seen) + len(more)))
    assert more[0].delta == " there"
    assert more[-1].type == "response.completed"
    assert more[-1].response.output_text == "Hi there"
    assert [
        e async for e in await openai.responses.retrieve(id, stream=True, starting_after=more[-1].sequence_number)
    ] == []
    async with openai.responses.stream(response_id=id, starting_after=last) as helper:
        helped = [event async for event in helper]
    assert [event.sequence_number for event in helped] == [event.sequence_number for event in more]


async def test_a_response_is_cancelled_as_often_as_anybody_likes(api, worker, openai: AsyncOpenAI):
    waiting = await openai.responses.create(model=api.model, input="hello", background=True)
    for _ in range(2):
        cancelled = await openai.responses.cancel(waiting.id)
        assert (cancelled.id, cancelled.status, cancelled.output) == (waiting.id, "cancelled", [])
    begun = await openai.responses.create(model=api.model, input="hello", background=True)
    job = await worker.claim()
    assert begun.id == f"resp_{job.id}"
    await job.say("Half")
    cancelled = await openai.responses.cancel(begun.id)
    assert (cancelled.status, cancelled.output_text, cancelled.error.code) == ("cancelled", "Half", "job_cancelled")
    assert cancelled.output[0].status == "incomplete"
    done = asyncio.create_task(worker.serve("Hi"))
    answer = await openai.responses.create(model=api.model, input="hello")
    await done
    assert (await openai.responses.cancel(answer.id)).to_dict() == answer.to_dict()


async def test_a_failure_is_an_error_a_frame_or_a_status_as_it_was_asked_for(api, worker, openai: AsyncOpenAI):
    async def break_down() -> None:
        job = await worker.claim()
        await job.say("Half")
        await job.fail(message="the model said NaN", code="bad_logits")

    breaking = asyncio.create_task(break_down())
    with pytest.raises(sdk.InternalServerError, match="the model said NaN"):
        await openai.responses.create(model=api.model, input="hello")
    await breaking
    breaking = asyncio.create_task(break_down())
    events = [event async for event in await openai.responses.create(model=api.model, input="hello", stream=True)]
    await breaking
    failed: Any = events[-1]
    assert failed.type == "response.failed"
    assert (failed.response.status, failed.response.output_text) == ("failed", "Half")
    assert (failed.response.error.code, failed.response.error.message) == ("bad_logits", "the model said NaN")
    assert (await openai.responses.retrieve(failed.response.id)).to_dict() == failed.response.to_dict()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_by_the_worker_is_a_bad_request(api, worker, openai: AsyncOpenAI, stream: bool):
    async def refuse() -> None:
        job = await worker.claim()
        await job.fail(type="invalid_request_error", code="context_length_exceeded", message="300 > 256")

    refusing = asyncio.create_task(refuse())
    with pytest.raises(sdk.BadRequestError, match="300 > 256") as refused:
        await openai.responses.create(model=api.model, input="hello", stream=stream)
    await refusing
    assert refused.value.code == "context_length_exceeded"


async def test_a_conversation_goes_on_from_an_earlier_response_without_its_instructions(
    api, worker, openai: AsyncOpenAI
):
    serving = asyncio.create_task(worker.serve("Hi"))
    first = await openai.responses.create(model=api.model, input="hello", instructions="Be brief.")
    await serving
    serving = asyncio.create_task(worker.serve("Well"))
    second = await openai.responses.create(
        model=api.model, input="how are you?", instructions="Be kind.", previous_response_id=first.id
    )
    [job] = await serving
    said = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "how are you?"},
    ]
    assert list(job.spec.messages) == [{"role": "system", "content": "Be kind."}, *said]
    assert (second.previous_response_id, second.instructions) == (first.id, "Be kind.")
    serving = asyncio.create_task(worker.serve("Bye"))
    await openai.responses.create(
        model=api.model, input=[{"role": "user", "content": "bye"}], previous_response_id=second.id
    )
    [job] = await serving
    assert list(job.spec.messages) == [
        *said,
        {"role": "assistant", "content": "Well"},
        {"role": "user", "content": "bye"},
    ]


async def test_an_answer_may_be_handed_back_as_it_came(api, worker, openai: AsyncOpenAI):
    serving = asyncio.create_task(worker.serve("Hi"))
    first = await openai.responses.create(model=api.model, input="hello")
    await serving
    serving = asyncio.create_task(worker.serve("Well"))
    items: Any = [
        {
            "role": "developer",
            "content": [{"type": "input_text", "text": "Be "}, {"type": "input_text", "text": "kind."}],
        },
        {"type": "message", "role": "user", "content": "hello"},
        *[item.to_dict() for item in first.output],
        {"role": "user", "content": [{"type": "input_text", "text": "how are you?"}]},
    ]
    await openai.responses.create(model=api.model, input=items)
    [job] = await serving
    assert list(job.spec.messages) == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "how are you?"},
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_come_when_they_are_included(api, worker, openai: AsyncOpenAI, stream: bool):
    one = {"token_id": 7, "token": "Hé", "logprob": -0.25, "bytes": [72, 195, 169]}

    async def serve() -> None:
        job = await worker.claim()
        assert job.spec.sampling.logprobs == 1
        await job.say("Hé", logprobs=({**one, "top": [one]},))
        await job.finish()

    serving = asyncio.create_task(serve())
    answer: Any = await openai.responses.create(
        model=api.model, input="x", include=["message.output_text.logprobs"], top_logprobs=1, stream=stream
    )
    if stream:
        events = [event async for event in answer]
        [delta] = [event for event in events if event.type == "response.output_text.delta"]
        assert (delta.logprobs[0].token, delta.logprobs[0].top_logprobs[0].logprob) == ("Hé", -0.25)
        answer = events[-1].response
    await serving
    [told] = answer.output[0].content[0].logprobs
    assert (told.token, told.bytes, told.top_logprobs[0].token) == ("Hé", [72, 195, 169], "Hé")


async def test_the_client_that_does_not_wait_for_an_event_loop_gets_the_same(api, worker):
    def all_of_it() -> list[str]:
        with OpenAI(base_url=f"http://127.0.0.1:{api.port}/v1", api_key="none", max_retries=0) as client:
            options: dict[str, Any] = {"model": api.model, "input": "hello"}
            whole = client.responses.create(**options)
            with client.responses.create(**options, stream=True) as stream:
                streamed = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
            with client.responses.stream(**options) as helper:
                helped = helper.get_final_response()
            background = client.responses.create(**options, background=True)
            while background.status in ("queued", "in_progress"):
                background = client.responses.retrieve(background.id)
            with client.responses.retrieve(background.id, stream=True, starting_after=1) as rest:
                numbers = [event.sequence_number for event in rest]
            assert numbers == list(range(2, 11))
            assert client.responses.cancel(background.id).status == "completed"
            return [whole.output_text, streamed, helped.output_text, background.output_text]

    serving = asyncio.create_task(worker.serve("Hi", " there", count=4))
    assert await asyncio.to_thread(all_of_it) == ["Hi there"] * 4
    await serving
