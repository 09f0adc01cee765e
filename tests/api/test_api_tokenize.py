"""`/tokenize` and `/detokenize`: vLLM's shapes, and the ids that a job of the same text has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.api.conftest import Api, StartApi
from tests.api.test_api_tokenizers import LENGTH, USER, serve_with
from tests.text import small_tokenizers as small
from tests.text.tool_templates import CONVERSATION, HERMES, TOOLS, UNKNOWN

from jitney.connection import Redis
from jitney.tools import ToolUse
from jitney_worker.text.tokenizer import Tokenizer

BOTH_ENDS = {"continue_final_message": True, "add_generation_prompt": True}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer.load(small.byte_bpe(tmp_path / "tokenizer", bos=True))


@pytest.fixture
async def served(redis: Redis, start_api: StartApi, queue_name: str, tokenizer: Tokenizer) -> Api:
    await serve_with(redis, queue_name, tokenizer)
    return await start_api()


async def tokens_of(api: Api, **fields: Any) -> dict[str, Any]:
    answer = await api.post("/tokenize", {"model": api.model, **fields})
    found: dict[str, Any] = await answer.json()
    assert answer.status == 200, found
    return found


async def test_a_prompt_is_given_as_the_worker_encodes_it(served: Api, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_prompt("the sea <|im_end|>")
    assert ids[0] == 0, "no BOS: the test proves nothing"
    assert await tokens_of(served, prompt="the sea <|im_end|>") == {
        "count": len(ids),
        "max_model_len": LENGTH,
        "tokens": ids,
        "token_strs": None,
    }


async def test_special_tokens_can_be_left_out(served: Api, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_prompt("the sea")
    assert (await tokens_of(served, prompt="the sea", add_special_tokens=False))["tokens"] == ids[1:]
    assert (await tokens_of(served, prompt="", add_special_tokens=False))["count"] == 0


async def test_a_chat_is_given_in_the_models_template(served: Api, tokenizer: Tokenizer) -> None:
    assert (await tokens_of(served, messages=[USER]))["tokens"] == tokenizer.encode_chat([USER])
    bare = tokenizer.encode_chat([USER], add_generation_prompt=False)
    assert (await tokens_of(served, messages=[USER], add_generation_prompt=False))["tokens"] == bare
    goes_on = tokenizer.encode_chat([USER], add_generation_prompt=False, continue_final_message=True)
    assert (await tokens_of(served, messages=[USER], continue_final_message=True))["tokens"] == goes_on != bare
    with_bos = tokenizer.encode_chat([USER], add_special_tokens=True)
    assert (await tokens_of(served, messages=[USER], add_special_tokens=True))["tokens"] == with_bos
    parts = [{**USER, "content": [{"type": "text", "text": USER["content"]}]}]
    assert (await tokens_of(served, messages=parts))["tokens"] == tokenizer.encode_chat([USER])


async def test_tokens_can_be_had_as_they_stand_in_the_vocabulary(served: Api) -> None:
    found = await tokens_of(served, prompt=" sea é", return_token_strs=True)
    assert found["token_strs"][:2] == ["<|endoftext|>", "Ġsea"]
    assert len(found["token_strs"]) == found["count"]


@pytest.mark.parametrize("text", ["the sea", "", "two  spaces", "é 日本 👍🏽", "<|im_start|>user"])
async def test_what_was_tokenized_is_detokenized(served: Api, text: str) -> None:
    tokens = (await tokens_of(served, prompt=text, add_special_tokens=False))["tokens"]
    answer = await served.post("/detokenize", {"model": served.model, "tokens": tokens})
    assert (answer.status, await answer.json()) == (200, {"prompt": text})


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": [USER]}, "prompt"),
        ("/tokenize", {"prompt": ["x"]}, "prompt"),
        ("/tokenize", {"prompt": "x", "add_special_tokens": 1}, "add_special_tokens"),
        ("/tokenize", {"prompt": "x", "return_token_strs": "yes"}, "return_token_strs"),
        ("/tokenize", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
        ("/tokenize", {"messages": [USER], **BOTH_ENDS}, "continue_final_message"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens.0"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, "tokens.0"),
        ("/detokenize", {"tokens": [100_000]}, "tokens"),
    ],
)
async def test_a_wrong_field_is_named(served: Api, path: str, fields: dict[str, Any], param: str) -> None:
    answer = await served.post(path, {"model": served.model, **fields})
    error = (await answer.json())["error"]
    assert (answer.status, error["param"]) == (400, param), error


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_a_queue_without_a_published_tokenizer_says_so(api: Api, path: str) -> None:
    answer = await api.post(path, {"model": api.model, "prompt": "x", "tokens": [1]})
    error = (await answer.json())["error"]
    assert (answer.status, error["code"], error["type"]) == (
        503,
        "tokenizer_unavailable",
        "service_unavailable_error",
    )
    assert api.model in error["message"]


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_an_unknown_model_is_not_found(api: Api, path: str) -> None:
    answer = await api.post(path, {"model": "no-such-model", "prompt": "x", "tokens": [1]})
    assert (answer.status, (await answer.json())["error"]["code"]) == (404, "model_not_found")


async def test_both_are_in_the_document(api: Api) -> None:
    document = await (await api.get("/openapi.json")).json()
    for path, schema in (("/tokenize", "TokenizeRequest"), ("/detokenize", "DetokenizeRequest")):
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert body == {"$ref": f"#/components/schemas/{schema}"}
        assert schema in document["components"]["schemas"]


async def test_tools_are_counted_as_the_worker_shows_them(
    redis: Redis, start_api: StartApi, queue_name: str, tmp_path: Path
) -> None:
    tokenizer = Tokenizer.load(small.byte_bpe(tmp_path / "tools", template=HERMES))
    await serve_with(redis, queue_name, tokenizer)
    served = await start_api()
    found = await tokens_of(served, messages=CONVERSATION, tools=TOOLS)
    assert found["tokens"] == tokenizer.encode_chat(CONVERSATION, ToolUse(tuple(TOOLS), False, None))
    assert found["count"] > (await tokens_of(served, messages=CONVERSATION))["count"] + 50
    answer = await served.post("/tokenize", {"prompt": "x", "tools": TOOLS})
    assert (answer.status, (await answer.json())["error"]["param"]) == (400, "tools")


@pytest.mark.parametrize(
    ("template", "fields", "param", "code"),
    [
        (small.CHATML, {}, "tools", "tools_not_supported"),
        (UNKNOWN, {}, "tool_choice", "unknown_call_format"),
        (UNKNOWN, {"messages": CONVERSATION, "tools": TOOLS[:1]}, "tool_choice", "unknown_call_format"),
        (small.CHATML, {"tools": None, "messages": CONVERSATION}, "messages.1.tool_calls", "tools_not_supported"),
        (HERMES, {"tools": TOOLS}, "messages", "context_length_exceeded"),
    ],
)
async def test_a_chat_with_tools_that_a_worker_would_refuse_is_a_400_before_there_is_a_job(
    redis: Redis,
    start_api: StartApi,
    queue_name: str,
    tmp_path: Path,
    template: str,
    fields: dict[str, Any],
    param: str,
    code: str,
) -> None:
    tokenizer = Tokenizer.load(small.byte_bpe(tmp_path / "tools", template=template))
    await serve_with(redis, queue_name, tokenizer)
    api = await start_api()
    answer = await api.chat("x", **({"tools": TOOLS[1:]} | fields))
    error = (await answer.json())["error"]
    assert (answer.status, error["param"], error["code"]) == (400, param, code)
    assert await redis.exists(f"jitney:{{jitney:{queue_name}}}:counts") == 0
