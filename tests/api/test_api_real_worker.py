"""The official clients against the API and a worker with everything but a model: engine, text, runtime and Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai as sdk
import pytest
from openai import AsyncOpenAI, OpenAI
from tests.api.conftest import Api, StartApi
from tests.engine.scripted_model import HashModel
from tests.runtime.harness import LIVENESS_S, MAX_MODEL_LEN, crew

from jitney.connection import Redis
from jitney.submission import find_card
from jitney_worker.build import register
from jitney_worker.model.tiny import make_tiny
from jitney_worker.runtime.worker import Worker
from jitney_worker.settings import load_settings
from jitney_worker.text.tokenizer import Tokenizer

CHAT: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {
        "role": "user",
        "content": [{"type": "text", "text": "What is the sea? "}, {"type": "text", "text": "<|im_end|>"}],
    },
]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory: Path = make_tiny(tmp_path_factory.mktemp("tiny"))
    return Tokenizer.load(directory)


@pytest.fixture
async def stack(
    redis: Redis, redis_url: str, queue_name: str, start_api: StartApi, tokenizer: Tokenizer
) -> AsyncIterator[Api]:
    """A worker that has registered as every worker does, and an API that knows of it what it has published."""
    settings = load_settings(redis_url=redis_url, queue=queue_name)
    worker, ready = Worker(settings, await register(redis, crew(settings, tokenizer, HashModel(), {}))), asyncio.Event()
    run = asyncio.create_task(worker.run(ready.set))
    await asyncio.wait_for(ready.wait(), LIVENESS_S)
    yield await start_api()
    worker.drain()
    assert await asyncio.wait_for(run, LIVENESS_S) == 0


@pytest.fixture
async def openai(stack: Api) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"http://127.0.0.1:{stack.port}/v1", api_key="none", max_retries=0) as client:
        yield client


async def num_tokens(api: Api, **fields: Any) -> int:
    answer = await api.post("/tokenize", {"model": api.model, **fields})
    return int((await answer.json())["count"])


async def test_an_answer_goes_on_with_the_last_message_where_that_is_asked_for(
    stack: Api, openai: AsyncOpenAI, tokenizer: Tokenizer
) -> None:
    begun = [*CHAT, {"role": "assistant", "content": "The sea"}]
    for options in ({"continue_final_message": True}, {"add_generation_prompt": False}, {}):
        answer = await openai.chat.completions.create(
            model=stack.model, messages=begun, max_tokens=4, extra_body=options
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == await num_tokens(stack, messages=begun, **options), options
    assert await num_tokens(stack, messages=begun, continue_final_message=True) < await num_tokens(
        stack, messages=begun, add_generation_prompt=False
    )


async def test_a_chat_whole_streamed_and_through_the_helper_is_the_same(stack: Api, openai: AsyncOpenAI) -> None:
    options: dict[str, Any] = {"model": stack.model, "messages": CHAT, "max_completion_tokens": 24, "seed": 7}
    whole = await openai.chat.completions.create(**options)
    said = whole.choices[0].message.content
    assert said
    stream = await openai.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == said
    async with openai.chat.completions.stream(**options) as helper:
        final = await helper.get_final_completion()
    assert final.choices[0].message.content == said
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


async def test_the_api_counts_a_prompt_as_the_worker_does(stack: Api, openai: AsyncOpenAI) -> None:
    chat = await openai.chat.completions.create(model=stack.model, messages=CHAT, max_tokens=4)
    assert chat.usage is not None
    assert chat.usage.prompt_tokens == await num_tokens(stack, messages=CHAT)
    for prompt in ("the sea ", "é 日本 <|im_end|>", "x" * 100):
        answer = await openai.completions.create(model=stack.model, prompt=prompt, max_tokens=4)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == await num_tokens(stack, prompt=prompt)


@pytest.mark.parametrize("stream", [False, True])
async def test_what_does_not_fit_is_refused_before_there_is_a_job(
    stack: Api, openai: AsyncOpenAI, redis: Redis, stream: bool
) -> None:
    number = await num_tokens(stack, messages=CHAT)
    _, card = await find_card(redis, stack.model)
    assert card.max_model_len == MAX_MODEL_LEN
    with pytest.raises(sdk.BadRequestError) as refused:
        await openai.chat.completions.create(
            model=stack.model, messages=CHAT, max_tokens=MAX_MODEL_LEN - number + 1, stream=stream
        )
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "max_tokens")
    assert f"{MAX_MODEL_LEN + 1} tokens, but at most {MAX_MODEL_LEN} fit" in refused.value.message
    answer = await openai.chat.completions.create(
        model=stack.model, messages=CHAT, max_tokens=MAX_MODEL_LEN - number, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.total_tokens == MAX_MODEL_LEN


async def test_the_clients_that_do_not_wait_for_an_event_loop_get_the_same(stack: Api, openai: AsyncOpenAI) -> None:
    options: dict[str, Any] = {"model": stack.model, "messages": CHAT, "max_tokens": 16, "temperature": 0}

    def all_of_it() -> list[str]:
        with OpenAI(base_url=f"http://127.0.0.1:{stack.port}/v1", api_key="none", max_retries=0) as client:
            whole = client.chat.completions.create(**options).choices[0].message.content or ""
            with client.chat.completions.create(**options, stream=True) as stream:
                streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            with client.chat.completions.stream(**options) as helper:
                helped = "".join(event.delta for event in helper if event.type == "content.delta")
            text = client.completions.create(model=stack.model, prompt="the sea", temperature=0).choices[0].text
            names = [model.id for model in client.models.list()]
            assert stack.model in names
            return [whole, streamed, helped, text]

    whole, streamed, helped, text = await asyncio.to_thread(all_of_it)
    assert whole == streamed == helped
    assert (await openai.chat.completions.create(**options)).choices[0].message.content == whole
    assert (await openai.completions.create(model=stack.model, prompt="the sea", temperature=0)).choices[0].text == text


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_choices_and_an_echo_of_a_real_engine_have_the_official_shapes(
    stack: Api, openai: AsyncOpenAI, stream: bool
) -> None:
    answer: Any = await openai.completions.create(
        model=stack.model, prompt="the sea", max_tokens=6, n=2, echo=True, seed=3, stream=stream
    )
    texts = {0: "", 1: ""}
    parts = [chunk async for chunk in answer] if stream else [answer]
    for choice in (choice for part in parts for choice in part.choices):
        texts[choice.index] += choice.text
    assert [text[:7] for text in texts.values()] == ["the sea"] * 2
    chat: Any = await openai.chat.completions.create(
        model=stack.model, messages=CHAT, max_tokens=6, logprobs=True, seed=3
    )
    content = chat.choices[0].logprobs.content
    assert len(content) == chat.usage.completion_tokens


def said(answer: Any) -> tuple[Any, ...]:
    """What two responses to one request have in common."""
    return answer.status, answer.output_text, answer.incomplete_details, answer.usage.output_tokens


async def test_a_response_of_a_real_engine_is_the_same_whole_streamed_resumed_and_in_the_background(
    stack: Api, openai: AsyncOpenAI
) -> None:
    options: dict[str, Any] = {
        "model": stack.model,
        "instructions": "Be brief.",
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "What is the sea?"}]}],
        "max_output_tokens": 24,
        "temperature": 0,
    }
    whole = await openai.responses.create(**options)
    assert whole.usage is not None
    chat: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is the sea?"}]
    assert whole.usage.input_tokens == await num_tokens(stack, messages=chat)
    events = [event async for event in await openai.responses.create(**options, stream=True)]
    last: Any = events[-1]
    assert said(last.response) == said(whole)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    stream = await openai.responses.create(**options, background=True, stream=True)
    first: Any = await anext(aiter(stream))
    await stream.close()
    rest = await openai.responses.retrieve(first.response.id, stream=True, starting_after=0)
    seen = [first, *[event async for event in rest]]
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert said(seen[-1].response) == said(await openai.responses.retrieve(first.response.id)) == said(whole)
    going_on = await openai.responses.create(**options | {"input": "And why?"}, previous_response_id=whole.id)
    assert going_on.usage is not None
    chat += [{"role": "assistant", "content": whole.output_text}, {"role": "user", "content": "And why?"}]
    assert going_on.usage.input_tokens == await num_tokens(stack, messages=chat)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_limit_of_a_response_that_does_not_fit_is_refused_by_its_name(
    stack: Api, openai: AsyncOpenAI, stream: bool
) -> None:
    with pytest.raises(sdk.BadRequestError) as refused:
        await openai.responses.create(model=stack.model, input="x", max_output_tokens=MAX_MODEL_LEN, stream=stream)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "max_output_tokens")
    with pytest.raises(sdk.BadRequestError) as refused:
        await openai.responses.create(model=stack.model, input="x " * MAX_MODEL_LEN, stream=stream)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "input")
