"""n answers to one request, as the official client gets them (B18)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from openai import AsyncOpenAI

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


async def serve_two(worker: Any) -> None:
    """Choice 0 ends while choice 1 is still talking."""
    job = await worker.claim()
    assert job.spec.sampling.n == 2
    await job.say("one")
    await job.say("two", choice=1)
    await job.say(" end", finish_reason="length")
    await job.say(" and", choice=1)
    await job.say(" more", choice=1)
    await job.say(" end", choice=1, finish_reason="stop")
    await job.finish()


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
async def test_a_stream_goes_on_after_the_first_choice_has_ended(api, worker, openai: AsyncOpenAI, endpoint: str):
    serving = asyncio.create_task(serve_two(worker))
    if endpoint == "chat":
        stream = await openai.chat.completions.create(model=api.model, messages=HELLO, n=2, stream=True)
    else:
        stream = await openai.completions.create(model=api.model, prompt="hello", n=2, stream=True)
    texts, reasons = {0: "", 1: ""}, {}
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += (choice.delta.content if endpoint == "chat" else choice.text) or ""
            if choice.finish_reason:
                reasons.setdefault(choice.index, choice.finish_reason)
    await serving
    assert texts == {0: "one end", 1: "two and more end"}
    assert reasons == {0: "length", 1: "stop"}


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
async def test_a_whole_answer_holds_every_choice_and_the_usage_of_all(api, worker, openai: AsyncOpenAI, endpoint: str):
    serving = asyncio.create_task(serve_two(worker))
    if endpoint == "chat":
        answer = await openai.chat.completions.create(model=api.model, messages=HELLO, n=2)
        texts = [choice.message.content for choice in answer.choices]
    else:
        answer = await openai.completions.create(model=api.model, prompt="hello", n=2)
        texts = [choice.text for choice in answer.choices]
    await serving
    assert texts == ["one end", "two and more end"]
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[1].finish_reason == "stop"
    assert answer.usage.completion_tokens == 7
