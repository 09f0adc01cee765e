"""The official `openai` client, in both its forms, against the whole stack with a real model.

What a scripted worker and a tiny model cannot show: answers that mean something, many of them in one batch, and
everything that hangs on the text being the same whichever way it is asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

import openai as sdk
import pytest
from openai import AsyncOpenAI, LengthFinishReasonError, OpenAI, Stream
from openai.types.chat import ChatCompletionChunk
from pydantic import BaseModel, ConfigDict, Field
from tests.e2e.conftest import Stack

from jitney import Client
from jitney.errors import JobCancelled

LIVENESS_S = 90.0
QUESTION: list[Any] = [
    {"role": "developer", "content": "Be brief."},
    {
        "role": "user",
        "content": [{"type": "text", "text": "What is the capital "}, {"type": "text", "text": "of France?"}],
    },
]
COUNTRIES = ("France", "Italy", "Spain", "Japan", "Egypt", "Peru", "Kenya", "India", "Chile", "Cuba", "Iran", "Mali")


@pytest.fixture
def openai(real_stack: Stack) -> Iterator[OpenAI]:
    with OpenAI(base_url=real_stack.base_url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def async_openai(real_stack: Stack) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=real_stack.base_url, api_key="none", max_retries=0) as client:
        yield client


def capital_of(country: str) -> list[Any]:
    return [{"role": "user", "content": f"What is the capital of {country}?"}]


async def test_one_question_has_one_answer_in_every_form_of_the_client(
    real_stack: Stack, openai: OpenAI, async_openai: AsyncOpenAI
) -> None:
    asked: dict[str, Any] = {
        "model": real_stack.model,
        "messages": QUESTION,
        "temperature": 0,
        "max_completion_tokens": 24,
    }

    def sync() -> list[str | None]:
        raw = openai.chat.completions.with_raw_response.create(**asked, extra_headers={"x-request-id": "mine-1"})
        assert raw.headers["x-request-id"] == "mine-1"
        assert raw.parse().id == f"chatcmpl-{raw.headers['x-jitney-job-id']}"
        with openai.chat.completions.create(**asked, stream=True) as stream:
            streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        with openai.chat.completions.stream(**asked) as helper:
            helped = helper.get_final_completion().choices[0].message.content
        return [raw.parse().choices[0].message.content, streamed, helped]

    answers = await asyncio.to_thread(sync)
    whole = await async_openai.chat.completions.create(**asked)
    async with await async_openai.chat.completions.create(**asked, stream=True) as stream:
        streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    async with async_openai.chat.completions.stream(**asked) as helper:
        helped = (await helper.get_final_completion()).choices[0].message.content
    answers += [whole.choices[0].message.content, streamed, helped]
    assert answers[0] is not None
    assert "Paris" in answers[0]
    assert len(set(answers)) == 1, answers


async def test_twelve_streams_in_one_batch_say_what_each_says_alone(
    real_stack: Stack, async_openai: AsyncOpenAI
) -> None:
    async def streamed(country: str) -> tuple[str, int]:
        stream = await async_openai.chat.completions.create(
            model=real_stack.model,
            messages=capital_of(country),
            temperature=0.7,
            seed=5,
            max_tokens=40,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].usage is not None
        text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
        return text, chunks[-1].usage.completion_tokens

    together = await asyncio.gather(*map(streamed, COUNTRIES))
    alone = [await streamed(country) for country in COUNTRIES]
    assert together == alone
    assert len(set(alone)) == len(COUNTRIES)


def test_the_helpers_events_add_up_to_its_final_answer(real_stack: Stack, openai: OpenAI) -> None:
    with openai.chat.completions.stream(
        model=real_stack.model,
        messages=QUESTION,
        temperature=0,
        max_tokens=24,
        logprobs=True,
        top_logprobs=2,
        stream_options={"include_usage": True},
    ) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    deltas = [event for event in events if event.type == "content.delta"]
    logprobs = [entry for event in events if event.type == "logprobs.content.delta" for entry in event.content]
    (done,) = [event for event in events if event.type == "content.done"]
    assert "".join(event.delta for event in deltas) == deltas[-1].snapshot == done.content
    assert final.choices[0].message.content == done.content
    assert final.choices[0].finish_reason == "stop"
    assert final.usage is not None
    assert len(logprobs) == final.usage.completion_tokens
    assert b"".join(bytes(entry.bytes or ()) for entry in logprobs[:-1]).decode() == done.content
    assert all(entry.logprob == entry.top_logprobs[0].logprob <= 0 for entry in logprobs), "greedy takes the best"


@pytest.mark.parametrize("stream", [False, True])
def test_three_choices_of_one_prompt_differ_and_are_the_same_each_time(
    real_stack: Stack, openai: OpenAI, stream: bool
) -> None:
    def choices(*, stream: bool) -> list[tuple[str, str | None]]:
        answer: Any = openai.completions.create(
            model=real_stack.model, prompt="Once upon a time", n=3, seed=11, max_tokens=20, stop=["\n"], stream=stream
        )
        texts, reasons = [""] * 3, dict[int, str | None]()
        for choice in (choice for part in (answer if stream else [answer]) for choice in part.choices):
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
        return [(text, reasons[index]) for index, text in enumerate(texts)]

    heard = choices(stream=stream)
    assert len(set(heard)) == 3
    assert heard == choices(stream=False)
    assert not any("\n" in text for text, _ in heard)
    assert {reason for _, reason in heard} <= {"stop", "length"}


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid")

    label: Literal["sail", "oar"]
    count: int = Field(ge=0, le=99)


class Boat(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=12)
    parts: list[Part] = Field(min_length=1, max_length=3)


BOAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Describe a boat."}],
    "temperature": 0.9,
    "seed": 3,
    "response_format": Boat,
}


async def test_a_class_goes_in_and_its_object_comes_out_of_both_forms(
    real_stack: Stack, openai: OpenAI, async_openai: AsyncOpenAI
) -> None:
    asked = {"model": real_stack.model, "max_tokens": 300, **BOAT}
    parsed = (await async_openai.chat.completions.parse(**asked)).choices[0].message.parsed
    assert isinstance(parsed, Boat)
    async with async_openai.chat.completions.stream(**asked) as stream:
        partials = [event.parsed async for event in stream if event.type == "content.delta"]
        final = await stream.get_final_completion()
    assert final.choices[0].message.parsed == parsed
    assert len(partials) > 1
    assert partials[-1] == parsed.model_dump()
    synchronous = await asyncio.to_thread(lambda: openai.chat.completions.parse(**asked))
    assert synchronous.choices[0].message.parsed == parsed


def test_an_object_that_was_cut_off_is_said_to_be_and_not_parsed(real_stack: Stack, openai: OpenAI) -> None:
    with pytest.raises(LengthFinishReasonError) as cut:
        openai.chat.completions.parse(model=real_stack.model, max_tokens=5, **BOAT)
    assert cut.value.completion.choices[0].finish_reason == "length"


def test_a_stream_that_is_closed_cancels_its_job(real_stack: Stack, openai: OpenAI) -> None:
    with openai.chat.completions.create(
        model=real_stack.model,
        messages=QUESTION,
        max_tokens=4_000,
        stream=True,
        extra_body={"ignore_eos": True},
    ) as stream:
        job_id = next(iter(stream)).id.removeprefix("chatcmpl-")
    with Client(real_stack.redis) as client, pytest.raises(JobCancelled):
        client.job(job_id).result(timeout_s=LIVENESS_S)


@pytest.mark.parametrize("way", ["header", "query"])
def test_a_stream_that_broke_goes_on_through_the_client_where_it_stopped(
    real_stack: Stack, openai: OpenAI, way: str
) -> None:
    """With no package but `openai`: the rest is a stream of the same chunks."""
    with openai.chat.completions.with_streaming_response.create(
        model=real_stack.model,
        messages=QUESTION,
        temperature=0,
        max_tokens=24,
        stream=True,
        extra_body={"on_disconnect": "continue", "ignore_eos": True},
    ) as broken:
        job_id = broken.headers["x-jitney-job-id"]
        lines = list[str]()
        for line in broken.iter_lines():
            lines.append(line)
            if sum(one.startswith("id: ") for one in lines) == 2 and not line:
                break
    cursor = [line.removeprefix("id: ") for line in lines if line.startswith("id: ")][-1]
    asked: dict[str, Any] = {"format": "chat.completion.chunk"}
    headers = {"Last-Event-ID": cursor} if way == "header" else {}
    if way == "query":
        asked["starting_after"] = cursor

    def heard_after(query: dict[str, Any], headers: dict[str, str]) -> str:
        stream = openai.get(
            f"/jobs/{job_id}/events",
            cast_to=ChatCompletionChunk,
            options={"params": query, "headers": headers},
            stream=True,
            stream_cls=Stream[ChatCompletionChunk],
        )
        with stream:
            return "".join(choice.delta.content or "" for chunk in stream for choice in chunk.choices)

    before = [ChatCompletionChunk.model_validate_json(line[6:]) for line in lines if line.startswith("data: ")]
    text = "".join(choice.delta.content or "" for chunk in before for choice in chunk.choices)
    rest = heard_after(asked, headers)
    assert text
    assert rest
    assert text + rest == heard_after({"format": "chat.completion.chunk"}, {})


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"n": 99}, "n", "16"),
        ({"temperature": -1}, "temperature", "temperature"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            None,
            "image_url",
        ),
        ({"messages": []}, "messages", "messages"),
        ({"max_tokens": 9_000}, "max_tokens", "8192"),
        ({"service_tier": "flex"}, "service_tier", "service_tier"),
    ],
)
def test_a_refusal_is_the_clients_own_error_and_names_the_field(
    real_stack: Stack, openai: OpenAI, fields: dict[str, Any], param: str | None, words: str
) -> None:
    with pytest.raises(sdk.BadRequestError) as refused:
        openai.chat.completions.create(**{"model": real_stack.model, "messages": QUESTION, **fields})
    assert refused.value.type == "invalid_request_error"
    assert words in refused.value.message
    assert refused.value.request_id
    if param is not None:
        assert refused.value.param == param
