"""Prompts counted before there is a job: exact refusals, true estimates, and what is done without a tokenizer."""

from __future__ import annotations

import asyncio
import math
import secrets
from pathlib import Path
from typing import Any

import orjson
import pytest
from openai import AsyncOpenAI, BadRequestError
from tests.api.api_wire import Answer
from tests.api.conftest import Api, StartApi
from tests.text import small_tokenizers as small

from jitney.cards import QueueCard, write_card
from jitney.connection import Redis
from jitney.keys import TOKENIZERS, Keys
from jitney.published import publish_tokenizer
from jitney_api import tokenizers as tokenizers_module
from jitney_api.service import Service
from jitney_worker.text.tokenizer import Tokenizer

LENGTH = 64
BYTES_PER_TOKEN = 2.0
"""So that an estimate is wrong."""

REFUSING = "{% for m in messages %}{{ m.content }}{% endfor %}{{ raise_exception('only of the sea') }}"
USER: dict[str, Any] = {"role": "user", "content": "the quick brown fox"}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    """Its digest is this test's own: the others' have published theirs in the same server."""
    template = f"{small.CHATML}{{# {secrets.token_hex(8)} #}}"
    return Tokenizer.load(small.byte_bpe(tmp_path / "tokenizer", template=template))


async def serve_with(redis: Redis, queue: str, tokenizer: Tokenizer, *, publish: bool = True) -> QueueCard:
    """The queue's card and its tokenizer, as a worker leaves them."""
    card = QueueCard(
        model=f"model-of-{queue}",
        max_model_len=LENGTH,
        vocab_size=tokenizer.vocab_size,
        bytes_per_token=BYTES_PER_TOKEN,
        tokenizer_digest=tokenizer.digest,
    )
    await write_card(redis, queue, card)
    if publish:
        assert await publish_tokenizer(redis, tokenizer.digest, tokenizer.pack)
    return card


@pytest.fixture
async def counting(redis: Redis, start_api: StartApi, queue_name: str, tokenizer: Tokenizer) -> Api:
    """An API of a queue whose tokenizer is published."""
    await serve_with(redis, queue_name, tokenizer)
    return await start_api(headers_hold_s=0)


async def refused(redis: Redis, answer: Answer, queue: str) -> dict[str, Any]:
    """The error of a refusal, before which nothing was written."""
    error: dict[str, Any] = (await answer.json())["error"]
    assert answer.status == 400, error
    assert [key async for key in redis.scan_iter(f"{Keys(queue).prefix}:*")] == []
    return error


def text_of(tokenizer: Tokenizer, num_tokens: int) -> str:
    text = " sea" * num_tokens
    assert len(tokenizer.encode_prompt(text)) == num_tokens
    return text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_tokens", [LENGTH, 300])
async def test_a_text_longer_than_the_context_is_refused_with_both_numbers(
    counting: Api, redis: Redis, tokenizer: Tokenizer, num_tokens: int, stream: bool
) -> None:
    answer = await counting.complete(text_of(tokenizer, num_tokens), stream=stream)
    error = await refused(redis, answer, counting.model)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert error["message"] == f"the prompt is {num_tokens} tokens, but at most {LENGTH - 1} fit: shorten it"


async def test_a_chat_longer_than_the_context_is_refused_with_both_numbers(
    counting: Api, redis: Redis, tokenizer: Tokenizer
) -> None:
    messages = [{"role": "user", "content": " sea" * 100}]
    number = len(tokenizer.encode_chat(messages))
    error = await refused(redis, await counting.chat(" sea" * 100), counting.model)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert error["message"] == f"the chat is {number} tokens, but at most {LENGTH - 1} fit: shorten it"


@pytest.mark.parametrize("prompt_of", [text_of, lambda _, number: [5] * number], ids=["text", "ids"])
async def test_a_prompt_and_an_answer_that_do_not_fit_together_are_refused_with_all_numbers(
    counting: Api, redis: Redis, tokenizer: Tokenizer, prompt_of: Any
) -> None:
    answer = await counting.complete(prompt_of(tokenizer, 40), max_tokens=25)
    error = await refused(redis, answer, counting.model)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
    assert error["message"] == (
        "the prompt of 40 tokens with max_tokens=25 is 65 tokens, but at most 64 fit: "
        "shorten the prompt or lower max_tokens"
    )


async def test_the_limit_is_named_as_it_was_given(counting: Api, redis: Redis) -> None:
    error = await refused(redis, await counting.chat("sea", max_completion_tokens=60, max_tokens=1), counting.model)
    assert error["param"] == "max_completion_tokens"
    assert "lower max_completion_tokens" in error["message"]


async def test_a_detached_job_is_refused_as_well(counting: Api, redis: Redis, tokenizer: Tokenizer) -> None:
    body = {"model": counting.model, "prompt": text_of(tokenizer, 40), "max_tokens": 25}
    error = await refused(redis, await counting.post("/v1/jobs", body), counting.model)
    assert error["param"] == "max_tokens"


async def test_what_just_fits_is_taken(counting: Api, worker, tokenizer: Tokenizer) -> None:
    answers = [
        await counting.complete(text_of(tokenizer, 40), max_tokens=24, stream=True),
        await counting.complete(text_of(tokenizer, 63), max_tokens=1, stream=True),
        await counting.complete(text_of(tokenizer, 60), stream=True),  # OpenAI's 16 are no wish of the caller
        await counting.complete(text_of(tokenizer, 300), max_tokens=24, truncate_prompt_tokens=40, stream=True),
        await counting.complete(text_of(tokenizer, 300), max_tokens=24, truncate_prompt_tokens=-1, stream=True),
    ]
    assert [answer.status for answer in answers] == [200] * 5
    await worker.serve("ok", count=5)


async def test_a_chat_with_a_model_that_has_no_template_is_refused(
    redis: Redis, start_api: StartApi, queue_name: str, tmp_path: Path
) -> None:
    await serve_with(redis, queue_name, Tokenizer.load(small.byte_bpe(tmp_path, template=None)))
    api = await start_api()
    error = await refused(redis, await api.chat(), queue_name)
    assert (error["code"], error["param"]) == ("no_chat_template", "messages")


async def test_what_a_template_refuses_is_told_in_its_own_words(
    redis: Redis, start_api: StartApi, queue_name: str, tmp_path: Path
) -> None:
    await serve_with(redis, queue_name, Tokenizer.load(small.byte_bpe(tmp_path, template=REFUSING)))
    api = await start_api()
    error = await refused(redis, await api.chat(), queue_name)
    assert (error["code"], error["param"]) == ("template_error", "messages")
    assert error["message"] == "the model's chat template does not take these messages: only of the sea"


async def test_the_official_client_is_told_the_numbers(counting: Api) -> None:
    async with AsyncOpenAI(base_url=f"http://127.0.0.1:{counting.port}/v1", api_key="none") as client:
        with pytest.raises(BadRequestError) as refused:
            await client.chat.completions.create(model=counting.model, messages=[USER], max_tokens=64)  # type: ignore[list-item]
    assert refused.value.code == "context_length_exceeded"


async def estimate_of(worker: Any, asking: Any) -> int:
    """What the queue took the next job's prompt for."""
    answer = await asking
    assert answer.status in (200, 202)
    _, tokens = await worker.queue.counts()
    await worker.serve("ok")
    return int(tokens)


async def test_a_job_waits_for_as_many_tokens_as_its_prompt_has(counting: Api, worker, tokenizer: Tokenizer) -> None:
    text = text_of(tokenizer, 40)
    assert math.ceil(len(text) / BYTES_PER_TOKEN) != 40, "the estimate would do"
    assert await estimate_of(worker, counting.complete(text, stream=True)) == 40
    number = len(tokenizer.encode_chat([USER]))
    assert await estimate_of(worker, counting.chat(USER["content"], stream=True)) == number
    body = {"model": counting.model, "prompt": text, "truncate_prompt_tokens": 7}
    assert await estimate_of(worker, counting.post("/v1/jobs", body)) == 7


async def test_without_a_published_tokenizer_it_is_estimated_and_the_worker_decides(
    redis: Redis, start_api: StartApi, queue_name: str, tokenizer: Tokenizer, worker
) -> None:
    await serve_with(redis, queue_name, tokenizer, publish=False)
    api = await start_api(headers_hold_s=0)
    text = text_of(tokenizer, 300)
    assert await estimate_of(worker, api.complete(text, stream=True)) == math.ceil(len(text) / BYTES_PER_TOKEN)
    estimated = math.ceil(len(orjson.dumps([USER])) / BYTES_PER_TOKEN)
    assert await estimate_of(worker, api.chat(USER["content"], stream=True)) == estimated


async def test_a_card_of_before_names_no_tokenizer_and_asks_for_none(api: Api, worker) -> None:
    assert await estimate_of(worker, api.post("/v1/jobs", {"model": api.model, "prompt": "x" * 400})) == 100


@pytest.mark.parametrize("content", [b"damaged", "another"], ids=["damaged", "another"])
async def test_what_cannot_be_used_is_as_if_it_were_not_there(
    redis: Redis, start_api: StartApi, queue_name: str, tokenizer: Tokenizer, tmp_path: Path, worker, content: Any
) -> None:
    await serve_with(redis, queue_name, tokenizer, publish=False)
    if content == "another":
        content = Tokenizer.load(small.spm_bpe(tmp_path / "other")).pack()
    await redis.hset(TOKENIZERS, tokenizer.digest, content)
    api = await start_api(headers_hold_s=0)
    assert await estimate_of(worker, api.complete(text_of(tokenizer, 300), stream=True)) == 600
    answer = await api.post("/tokenize", {"model": queue_name, "prompt": "x"})
    assert (answer.status, (await answer.json())["error"]["code"]) == (503, "tokenizer_unavailable")


async def test_a_tokenizer_is_loaded_once_however_many_ask(
    counting: Api, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = []
    fetch = tokenizers_module.fetch_tokenizer

    async def counted(redis: Redis, digest: str) -> bytes | None:
        fetched.append(digest)
        return await fetch(redis, digest)

    monkeypatch.setattr(tokenizers_module, "fetch_tokenizer", counted)
    service: Service = counting.service
    found = await asyncio.gather(*(service.tokenizers.find(tokenizer.digest) for _ in range(20)))
    found.append(await service.tokenizers.find(tokenizer.digest))
    assert fetched == [tokenizer.digest]
    assert {id(one) for one in found} == {id(found[0])}
    assert found[0] is not None


async def test_one_that_is_not_there_is_not_asked_for_with_every_request(
    redis: Redis, start_api: StartApi, queue_name: str, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await serve_with(redis, queue_name, tokenizer, publish=False)
    api = await start_api()
    tokenizers = api.service.tokenizers
    monkeypatch.setattr(tokenizers_module, "MISSING_FOR_S", 3_600.0)
    assert await tokenizers.find(tokenizer.digest) is None
    await publish_tokenizer(redis, tokenizer.digest, tokenizer.pack)
    assert await tokenizers.find(tokenizer.digest) is None
    monkeypatch.setattr(tokenizers_module, "MISSING_FOR_S", 0.0)
    tokenizers._missing.clear()
    await redis.hdel(TOKENIZERS, tokenizer.digest)
    assert await tokenizers.find(tokenizer.digest) is None
    await publish_tokenizer(redis, tokenizer.digest, tokenizer.pack)
    assert await tokenizers.find(tokenizer.digest) is not None


async def test_no_more_are_kept_than_the_setting_says(
    redis: Redis, start_api: StartApi, queue_name: str, tmp_path: Path
) -> None:
    made = []
    for number in range(3):
        loaded = Tokenizer.load(small.byte_bpe(tmp_path / str(number), template=f"{small.CHATML}{number}"))
        await serve_with(redis, f"{queue_name}.{number}", loaded)
        made.append(loaded.digest)
    api = await start_api(max_tokenizers=2)
    tokenizers = api.service.tokenizers
    for digest in (made[0], made[1], made[0], made[2]):  # the second is the one that was not used for longest
        assert await tokenizers.find(digest) is not None
    assert list(tokenizers._loaded) == [made[0], made[2]]


async def test_when_too_much_waits_to_be_encoded_a_job_goes_on_with_the_estimate(
    counting: Api, worker, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await counting.service.tokenizers.find(tokenizer.digest) is not None
    monkeypatch.setattr(tokenizers_module, "MAX_WAITING", 0)
    assert await estimate_of(worker, counting.complete(text_of(tokenizer, 40), stream=True)) == 80
    answer = await counting.post("/tokenize", {"model": counting.model, "prompt": "x"})
    assert (answer.status, (await answer.json())["error"]["code"]) == (503, "tokenizer_busy")


async def test_a_chat_template_of_the_caller_is_refused_on_every_door(counting: Api, redis: Redis) -> None:
    """Rendering one is a known way to stop a server."""
    evil = {"chat_template": "{% for a in range(10**9) %}{% endfor %}"}
    body = {"model": counting.model, "messages": [USER], **evil}
    for path in ("/v1/chat/completions", "/v1/jobs", "/tokenize"):
        error = await refused(redis, await counting.post(path, body), counting.model)
        assert (error["param"], error["code"]) == ("chat_template", "unsupported_parameter")
