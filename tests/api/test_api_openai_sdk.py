"""The official `openai` client against the API: what it expects is what it gets."""

from __future__ import annotations

import asyncio
from typing import Any

import openai as sdk
import pytest
from openai import AsyncOpenAI

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


async def test_a_whole_chat_answer_has_text_reason_usage_and_names(api, worker, openai: AsyncOpenAI):
    serving = asyncio.create_task(worker.serve("Hi", " there"))
    answer = await openai.chat.completions.create(model=api.model, messages=HELLO)
    [job] = await serving
    assert answer.id == f"chatcmpl-{job.id}"
    assert answer.object == "chat.completion"
    assert answer.model == api.model
    [choice] = answer.choices
    assert (choice.index, choice.message.role, choice.message.content) == (0, "assistant", "Hi there")
    assert choice.finish_reason == "stop"
    assert choice.logprobs is None
    assert answer.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


async def test_a_streamed_chat_begins_with_the_role_and_ends_with_the_reason(api, worker, openai: AsyncOpenAI):
    serving = asyncio.create_task(worker.serve("Hi", " there"))
    stream = await openai.chat.completions.create(model=api.model, messages=HELLO, stream=True)
    chunks = [chunk async for chunk in stream]
    await serving
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert [delta.role for delta in deltas] == ["assistant", None, None, None]
    assert [delta.content for delta in deltas] == ["", "Hi", " there", None]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, None, "stop"]
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1


async def test_the_streaming_helper_builds_the_same_answer(api, worker, openai: AsyncOpenAI):
    serving = asyncio.create_task(worker.serve("Hi", " there"))
    async with openai.chat.completions.stream(model=api.model, messages=HELLO) as stream:
        final = await stream.get_final_completion()
    await serving
    assert final.choices[0].message.content == "Hi there"
    assert final.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize(
    ("options", "num_usage_chunks"), [({"include_usage": True}, 1), ({"include_usage": False}, 0), (None, 0)]
)
async def test_usage_is_one_last_chunk_without_choices_and_only_when_asked_for(
    api, worker, openai: AsyncOpenAI, endpoint, options, num_usage_chunks
):
    serving = asyncio.create_task(worker.serve("Hi"))
    given = {"model": api.model, "stream": True, "stream_options": options}
    if endpoint == "chat":
        stream = await openai.chat.completions.create(messages=HELLO, **given)
    else:
        stream = await openai.completions.create(prompt="hello", **given)
    chunks = [chunk async for chunk in stream]
    await serving
    without_choices = [chunk for chunk in chunks if not chunk.choices]
    assert len(without_choices) == num_usage_chunks
    assert [chunk.usage for chunk in chunks if chunk.choices] == [None] * (len(chunks) - num_usage_chunks)
    if num_usage_chunks:
        assert chunks[-1] is without_choices[0]
        assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (7, 2)


async def test_stream_options_without_a_stream_are_refused(api, openai: AsyncOpenAI):
    with pytest.raises(sdk.BadRequestError) as refused:
        await openai.chat.completions.create(
            model=api.model, messages=HELLO, stream_options={"include_usage": True}, stream=False
        )
    assert refused.value.param == "stream_options"


async def test_a_whole_text_completion_has_its_shape(api, worker, openai: AsyncOpenAI):
    serving = asyncio.create_task(worker.serve("Once", " more"))
    answer = await openai.completions.create(model=api.model, prompt="hello")
    [job] = await serving
    assert (answer.id, answer.object) == (f"cmpl-{job.id}", "text_completion")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("Once more", "stop")
    assert answer.usage.total_tokens == 10


async def test_a_streamed_text_completion_gives_the_same_text(api, worker, openai: AsyncOpenAI):
    serving = asyncio.create_task(worker.serve("Once", " more"))
    stream = await openai.completions.create(model=api.model, prompt="hello", stream=True)
    choices = [chunk.choices[0] async for chunk in stream]
    await serving
    assert [choice.text for choice in choices] == ["Once", " more", ""]
    assert [choice.finish_reason for choice in choices] == [None, None, "stop"]


def entry(token: str, logprob: float) -> dict[str, Any]:
    """As a worker spells it into an event."""
    one = {"token_id": 7, "token": token, "logprob": logprob, "bytes": list(token.encode())}
    return {**one, "top": [one, {"token_id": 8, "token": "x", "logprob": -9.5, "bytes": [120]}]}


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_of_a_chat_arrive_token_by_token(api, worker, openai: AsyncOpenAI, stream):
    async def serve() -> None:
        job = await worker.claim()
        assert job.spec.sampling.logprobs == 2
        await job.say("Hé", logprobs=(entry("Hé", -0.25),))
        await job.finish()

    serving = asyncio.create_task(serve())
    answer = await openai.chat.completions.create(
        model=api.model, messages=HELLO, logprobs=True, top_logprobs=2, stream=stream
    )
    if stream:
        content = [entry async for c in answer for entry in (c.choices[0].logprobs or no_logprobs()).content]
    else:
        content = answer.choices[0].logprobs.content
    await serving
    assert [(one.token, one.logprob, one.bytes) for one in content] == [("Hé", -0.25, [72, 195, 169])]
    assert [(one.token, one.logprob) for one in content[0].top_logprobs] == [("Hé", -0.25), ("x", -9.5)]


class no_logprobs:
    content: tuple[()] = ()


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_of_a_completion_carry_offsets_from_its_first_character(
    api, worker, openai: AsyncOpenAI, stream
):
    async def serve() -> None:
        job = await worker.claim()
        assert job.spec.sampling.logprobs == 1
        await job.say("Once", logprobs=(entry("Once", -0.25),))
        await job.say(" more", logprobs=(entry(" more", -0.5),))
        await job.say("!", logprobs=({**entry("!", -12.5), "top": [entry("x", -9.5)]},))
        await job.finish()

    serving = asyncio.create_task(serve())
    answer = await openai.completions.create(model=api.model, prompt="hello", logprobs=1, stream=stream)
    parts = [c.choices[0].logprobs async for c in answer] if stream else [answer.choices[0].logprobs]
    await serving
    parts = [part for part in parts if part is not None]
    assert [token for part in parts for token in part.tokens] == ["Once", " more", "!"]
    assert [value for part in parts for value in part.token_logprobs] == [-0.25, -0.5, -12.5]
    assert [offset for part in parts for offset in part.text_offset] == [0, 4, 9]
    tops = [top for part in parts for top in part.top_logprobs]
    assert tops[0] == {"Once": -0.25, "x": -9.5}
    assert tops[2] == {"x": -9.5, "!": -12.5}, "the chosen token too, though it is none of the best"


async def test_an_unknown_model_is_not_found_and_the_message_names_the_known_ones(
    api, openai: AsyncOpenAI, write_queue_card
):
    known = f"0{api.model}"  # among the first, however many queues other tests have left: long messages are cut
    await write_queue_card(known)
    with pytest.raises(sdk.NotFoundError) as refused:
        await openai.chat.completions.create(model="no-such-model", messages=HELLO)
    assert (refused.value.code, refused.value.param) == ("model_not_found", "model")
    assert known in refused.value.message


async def test_a_refusal_by_the_worker_is_a_bad_request_whole_and_streamed(api, worker, openai: AsyncOpenAI):
    async def refuse() -> None:
        job = await worker.claim()
        await job.fail(
            type="invalid_request_error", code="context_length_exceeded", message="300 > 256", param="messages"
        )

    for stream in (False, True):
        refusing = asyncio.create_task(refuse())
        with pytest.raises(sdk.BadRequestError) as refused:
            await openai.chat.completions.create(model=api.model, messages=HELLO, stream=stream)
        await refusing
        assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "messages")
        assert "300 > 256" in refused.value.message


async def test_a_failure_in_the_middle_of_a_stream_raises_in_the_client(api, worker, openai: AsyncOpenAI):
    async def break_down() -> None:
        job = await worker.claim()
        await job.say("Half")
        await job.fail(message="the model said NaN", code="bad_logits")

    breaking = asyncio.create_task(break_down())
    stream = await openai.chat.completions.create(model=api.model, messages=HELLO, stream=True)
    heard = []

    async def listen() -> None:
        async for chunk in stream:
            heard.append(chunk.choices[0].delta.content)

    with pytest.raises(sdk.APIError, match="the model said NaN"):
        await listen()
    await breaking
    assert heard == ["", "Half"]


async def test_a_failure_in_the_middle_of_a_whole_answer_is_a_server_error_that_is_not_repeated(
    api, worker, openai: AsyncOpenAI
):
    async def break_down() -> None:
        job = await worker.claim()
        await job.say("Half")
        await job.fail(message="the model said NaN", code="bad_logits")

    breaking = asyncio.create_task(break_down())
    patient = openai.with_options(max_retries=2)
    with pytest.raises(sdk.InternalServerError, match="the model said NaN"):
        await patient.chat.completions.create(model=api.model, messages=HELLO)
    await breaking
    assert await worker.queue.counts() == (0, 0)


async def test_models_are_the_queues_and_aliases(api, openai: AsyncOpenAI, redis):
    from jitney.cards import write_alias

    await write_alias(redis, f"alias-of-{api.model}", api.model)
    names = [model.id async for model in openai.models.list()]
    assert api.model in names
    assert f"alias-of-{api.model}" in names
    one = await openai.models.retrieve(api.model)
    assert (one.id, one.object, one.owned_by) == (api.model, "model", "jitney")
    with pytest.raises(sdk.NotFoundError):
        await openai.models.retrieve("no/such")
