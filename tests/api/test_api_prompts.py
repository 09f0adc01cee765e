"""`echo` and `prompt_logprobs` over HTTP: what the model was given, as vLLM's clients read it."""

from __future__ import annotations

import asyncio
from typing import Any

import openai as sdk
import pytest
from openai import AsyncOpenAI
from tests.api.api_wire import Answer
from tests.api.conftest import PROMPT_TOKENS, Api, ScriptedJob, ScriptedWorker

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


def entry(token_id: int, token: str, logprob: float, *top: tuple[int, str, float]) -> dict[str, Any]:
    """As a worker spells it into an event."""
    return {**one(token_id, token, logprob), "top": [one(*other) for other in top]}


def one(token_id: int, token: str, logprob: float) -> dict[str, Any]:
    return {"token_id": token_id, "token": token, "logprob": logprob, "bytes": list(token.encode())}


BEST = ((30, " sea", -0.25), (31, " river", -1.5))
LOGGED = (
    None,
    {**entry(31, " river", -1.5, *BEST), "rank": 2},
    {**entry(77, " rose", -9.75, *BEST), "rank": 1_204},
    entry(5, "é", -0.5),
)
"""Of the last one nobody has counted the rank."""
SHOWN = [
    None,
    {
        "31": {"logprob": -1.5, "rank": 2, "decoded_token": " river"},
        "30": {"logprob": -0.25, "rank": 1, "decoded_token": " sea"},
    },
    {
        "77": {"logprob": -9.75, "rank": 1_204, "decoded_token": " rose"},
        "30": {"logprob": -0.25, "rank": 1, "decoded_token": " sea"},
        "31": {"logprob": -1.5, "rank": 2, "decoded_token": " river"},
    },
    {"5": {"logprob": -0.5, "rank": None, "decoded_token": "é"}},
]


async def say_with_prompt(job: ScriptedJob) -> None:
    """Two choices; what the model thinks of the prompt is in `started`."""
    await job.say("Hi", prompt_logprobs=LOGGED)
    await job.say("Ho", choice=1)
    await job.say("", choice=1, finish_reason="stop")
    await job.finish(" you")


async def serve_prompt_logprobs(worker: ScriptedWorker) -> None:
    job = await worker.claim()
    assert (job.spec.sampling.prompt_logprobs, job.spec.sampling.n) == (2, 2)
    await say_with_prompt(job)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
async def test_prompt_logprobs_stand_where_vllm_has_them(api: Api, worker, openai: AsyncOpenAI, endpoint: str):
    serving = asyncio.create_task(serve_prompt_logprobs(worker))
    extra = {"prompt_logprobs": 2}
    if endpoint == "chat":
        chat = await openai.chat.completions.create(model=api.model, messages=HELLO, n=2, extra_body=extra)
        assert chat.model_extra == {"prompt_logprobs": SHOWN}
        assert [choice.message.content for choice in chat.choices] == ["Hi you", "Ho"]
    else:
        answer = await openai.completions.create(model=api.model, prompt="hello", n=2, extra_body=extra)
        assert [choice.model_extra for choice in answer.choices] == [{"prompt_logprobs": SHOWN}] * 2
        assert list(answer.choices[0].model_extra["prompt_logprobs"][2]) == ["77", "30", "31"]
        assert answer.model_extra == {}
    await serving


@pytest.mark.parametrize("include_usage", [False, True])
async def test_a_streamed_completion_brings_prompt_logprobs_once_before_all_text(
    api: Api, worker, openai: AsyncOpenAI, include_usage: bool
):
    serving = asyncio.create_task(serve_prompt_logprobs(worker))
    stream = await openai.completions.create(
        model=api.model,
        prompt="hello",
        n=2,
        stream=True,
        stream_options={"include_usage": include_usage},
        extra_body={"prompt_logprobs": 2},
    )
    choices = [choice async for chunk in stream for choice in chunk.choices]
    await serving
    assert [(choice.index, choice.text) for choice in choices] == [(0, ""), (0, "Hi"), (1, "Ho"), (1, ""), (0, " you")]
    assert [choice.model_extra for choice in choices] == [{"prompt_logprobs": SHOWN}, {}, {}, {}, {}]


@pytest.mark.parametrize("include_usage", [False, True])
async def test_a_streamed_chat_brings_prompt_logprobs_in_a_chunk_of_their_own(
    api: Api, worker, openai: AsyncOpenAI, include_usage: bool
):
    """Through the client's own helper, which adds the chunks up: the role must be there once."""
    serving = asyncio.create_task(serve_prompt_logprobs(worker))
    asked = openai.chat.completions.stream(
        model=api.model,
        messages=HELLO,
        n=2,
        stream_options={"include_usage": include_usage},
        extra_body={"prompt_logprobs": 2},
    )
    async with asked as stream:
        chunks = [event.chunk async for event in stream if event.type == "chunk"]
        final = await stream.get_final_completion()
    await serving
    assert [chunk.model_extra for chunk in chunks] == [{"prompt_logprobs": SHOWN}] + [{}] * (len(chunks) - 1)
    assert chunks[0].choices == []
    assert [(choice.message.role, choice.message.content) for choice in final.choices] == [
        ("assistant", "Hi you"),
        ("assistant", "Ho"),
    ]


async def body_of(answer: Answer) -> bytes:
    assert answer.status == 200
    return await answer.body()


@pytest.mark.parametrize(("stream_format", "endpoint"), [("chat.completion.chunk", "chat"), ("completion", "complete")])
async def test_a_replay_says_them_again_and_a_reader_that_comes_back_is_not_told_twice(
    api: Api, worker, stream_format: str, endpoint: str
):
    serving = asyncio.create_task(serve_prompt_logprobs(worker))
    live = await getattr(api, endpoint)(stream=True, n=2, prompt_logprobs=2)
    said = await body_of(live)
    await serving
    path = f"/v1/jobs/{live.headers['x-jitney-job-id']}/events?format={stream_format}"
    assert await body_of(await api.get(path)) == said
    first, told, rest = said.partition(b"\n\n")
    assert first.startswith(b"id: 1\ndata: ")
    assert b"prompt_logprobs" in first
    assert await body_of(await api.get(path, last_event_id="1")) == rest
    assert told
    assert b"prompt_logprobs" not in rest


async def test_a_detached_job_has_them_as_the_log_does(api: Api, worker):
    job_id = await api.create_job(prompt_logprobs=2, n=2)
    await say_with_prompt(await worker.claim())
    found = await (await api.get(f"/v1/jobs/{job_id}")).json()
    assert found["prompt_logprobs"] == list(LOGGED)


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
async def test_they_are_absent_when_nobody_asked(api: Api, worker, endpoint: str):
    for stream in (False, True):
        serving = asyncio.create_task(worker.serve("Hi"))
        answer = await getattr(api, endpoint)(stream=stream)
        assert b"prompt_logprobs" not in await body_of(answer)
        [job] = await serving
    status = await (await api.get(f"/v1/jobs/{job.id}")).json()
    assert "prompt_logprobs" not in status


@pytest.mark.parametrize("count", [-1, 21, 1.5, True])
async def test_prompt_logprobs_out_of_range_are_refused_by_name(api: Api, count: Any):
    for answer in (await api.chat(prompt_logprobs=count), await api.complete(prompt_logprobs=count)):
        assert (answer.status, (await answer.json())["error"]["param"]) == (400, "prompt_logprobs")


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_puts_the_prompt_before_the_text(api: Api, worker, openai: AsyncOpenAI, stream: bool):
    """The worker writes it into the first text of each choice, so that a replay has it too."""

    async def serve() -> None:
        job = await worker.claim()
        assert (job.spec.prompt, job.spec.sampling.echo) == ("Once", True)
        await job.say("Once upon", " a")
        await job.finish(" time")

    serving = asyncio.create_task(serve())
    answer = await openai.completions.create(model=api.model, prompt="Once", echo=True, stream=stream)
    texts = [c.choices[0].text async for c in answer] if stream else [answer.choices[0].text]
    await serving
    assert texts == (["Once upon", " a", " time"] if stream else ["Once upon a time"])


async def test_an_echo_of_a_chat_is_refused_and_echo_false_is_nothing(api: Api, worker):
    for answer in (
        await api.chat(echo=True),
        await api.post("/v1/jobs", {"model": api.model, "messages": HELLO, "echo": True}),
    ):
        error = (await answer.json())["error"]
        assert (answer.status, error["param"]) == (400, "echo")
        assert "a chat has no one text" in error["message"]
    serving = asyncio.create_task(worker.serve("Hi"))
    assert (await api.chat(echo=False)).status == 200
    [job] = await serving
    assert job.spec.sampling.echo is False


@pytest.mark.parametrize(
    ("fields", "param"), [({"echo": True, "logprobs": 1}, "echo"), ({"echo": True, "max_tokens": 0}, "max_tokens")]
)
async def test_an_echo_with_logprobs_or_without_an_answer_is_refused_by_name(
    api: Api, openai: AsyncOpenAI, fields: dict[str, Any], param: str
):
    with pytest.raises(sdk.BadRequestError) as refused:
        await openai.completions.create(model=api.model, prompt="hello", **fields)
    assert refused.value.param == param


async def test_an_echo_may_have_prompt_logprobs_beside_it(api: Api, worker, openai: AsyncOpenAI):
    async def serve() -> None:
        job = await worker.claim()
        assert (job.spec.sampling.echo, job.spec.sampling.prompt_logprobs) == (True, 2)
        await job.say("the river", prompt_logprobs=LOGGED)
        await job.finish()

    serving = asyncio.create_task(serve())
    answer = await openai.completions.create(
        model=api.model, prompt="the river", echo=True, extra_body={"prompt_logprobs": 2}
    )
    await serving
    [choice] = answer.choices
    assert (choice.text, choice.model_extra) == ("the river", {"prompt_logprobs": SHOWN})
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (PROMPT_TOKENS, 2)
