"""`/v1/embeddings` with the official client: OpenAI's shapes, all of a request's jobs or none, and whose they are."""

from __future__ import annotations

import asyncio
import base64
import math
import re
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai as sdk
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types import embedding_create_params
from tests.api.conftest import Api, ScriptedWorker, StartApi
from tests.api.test_api_disconnect import ending_of, send_and_leave_when
from tests.api.test_api_requests import refused
from tests.runtime.harness import LIVENESS_S, crew

from jitney import AsyncClient
from jitney.apikeys import add_key, make_key, revoke_key
from jitney.connection import Redis
from jitney_api.fields import IGNORED, REFUSED_IN_EMBEDDINGS
from jitney_api.schemas import EmbeddingRequest, Queued
from jitney_worker.build import register
from jitney_worker.model.runner import load_runner
from jitney_worker.model.tiny import make_tiny
from jitney_worker.runtime.worker import Worker
from jitney_worker.settings import load_settings
from jitney_worker.text.tokenizer import Tokenizer

PAGE = Path(__file__).parent.parent.parent / "docs" / "EMBEDDINGS.md"
TEXTS = ["the sea", "a ship on the sea", "é 日本 <|im_end|>"]
WIDTH = 128
TOO_LONG = 2_048


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def stack(
    redis: Redis, redis_url: str, queue_name: str, start_api: StartApi, directory: Path
) -> AsyncIterator[Api]:
    """A real worker with a tiny model that has registered as every worker does, and an API."""
    settings = load_settings(redis_url=redis_url, queue=queue_name)
    runner = load_runner(directory, dtype="float32", device="cpu", num_blocks=256, num_threads=1)
    made = crew(settings, Tokenizer.load(directory), runner, {"max_num_seqs": 8})
    worker, ready = Worker(settings, await register(redis, made)), asyncio.Event()
    run = asyncio.create_task(worker.run(ready.set))
    await asyncio.wait_for(ready.wait(), LIVENESS_S)
    yield await start_api()
    worker.drain()
    assert await asyncio.wait_for(run, LIVENESS_S) == 0


@pytest.fixture
async def openai(stack: Api) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"http://127.0.0.1:{stack.port}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def scripted(write_queue_card: Any, start_api: StartApi) -> Api:
    """An API before a queue whose worker is up to the test."""
    await write_queue_card(hidden_size=4)
    return await start_api()


async def ids_of(api: Api, text: str) -> list[int]:
    answer = await api.post("/tokenize", {"model": api.model, "prompt": text})
    ids: list[int] = (await answer.json())["tokens"]
    return ids


# What comes back


async def test_floats_and_base64_are_the_same_numbers_and_those_of_the_client(
    stack: Api, openai: AsyncOpenAI, redis_url: str
) -> None:
    asked: Any = {"model": stack.model, "input": TEXTS[0]}
    numbers = await openai.embeddings.create(**asked, encoding_format="float")
    (one,) = numbers.data
    assert (numbers.object, numbers.model, one.object, one.index) == ("list", stack.model, "embedding", 0)
    assert len(one.embedding) == WIDTH
    assert math.hypot(*one.embedding) == pytest.approx(1.0, abs=1e-6)
    packed: Any = await openai.embeddings.create(**asked, encoding_format="base64")
    assert struct.unpack(f"<{WIDTH}f", base64.b64decode(packed.data[0].embedding)) == tuple(one.embedding)
    # Without a word of the caller the client asks for base64 and unpacks it.
    assert (await openai.embeddings.create(**asked)).data[0].embedding == one.embedding
    async with AsyncClient(redis_url, queue=stack.model) as client:
        assert (await client.generate(TEXTS[0], pooling="last")).embedding == tuple(one.embedding)


async def test_several_inputs_come_in_their_order_and_each_as_if_it_were_alone(stack: Api, openai: AsyncOpenAI) -> None:
    each = [await openai.embeddings.create(model=stack.model, input=text) for text in TEXTS]
    whole = await openai.embeddings.create(model=stack.model, input=TEXTS)
    assert [one.index for one in whole.data] == [0, 1, 2]
    assert [one.embedding for one in whole.data] == [one.data[0].embedding for one in each]
    ids = [await ids_of(stack, text) for text in TEXTS]
    num_tokens = sum(map(len, ids))
    assert (whole.usage.prompt_tokens, whole.usage.total_tokens) == (num_tokens, num_tokens)
    by_ids = await openai.embeddings.create(model=stack.model, input=ids)
    assert [one.embedding for one in by_ids.data] == [one.embedding for one in whole.data]
    one = await openai.embeddings.create(model=stack.model, input=ids[1])
    assert one.data[0].embedding == whole.data[1].embedding


async def test_far_more_inputs_than_seats(stack: Api, openai: AsyncOpenAI) -> None:
    inputs = [[50 + n, 60, 70] for n in range(150)]
    answer = await openai.embeddings.create(model=stack.model, input=inputs)
    assert [one.index for one in answer.data] == list(range(150))
    assert len({tuple(one.embedding) for one in answer.data}) == 150
    assert answer.usage.total_tokens == 450


async def test_the_mean_can_be_asked_for_and_is_another_vector(stack: Api, openai: AsyncOpenAI) -> None:
    last = await openai.embeddings.create(model=stack.model, input=TEXTS[1])
    named = await openai.embeddings.create(model=stack.model, input=TEXTS[1], extra_body={"pooling": "last"})
    mean = await openai.embeddings.create(model=stack.model, input=TEXTS[1], extra_body={"pooling": "mean"})
    assert last.data[0].embedding == named.data[0].embedding != mean.data[0].embedding


async def test_labels_and_what_is_so_anyway_change_nothing(stack: Api, openai: AsyncOpenAI) -> None:
    plain = await openai.embeddings.create(model=stack.model, input="x")
    same = await openai.embeddings.create(
        model=stack.model,
        input=["x"],
        user="u",
        dimensions=WIDTH,
        extra_body={
            "priority": 3,
            "timeout_s": None,
            "idempotency_key": "k",
            "normalize": True,
            "endianness": "little",
        },
    )
    assert same == plain


async def test_the_client_that_does_not_wait_for_an_event_loop_gets_the_same(stack: Api, openai: AsyncOpenAI) -> None:
    def ask() -> Any:
        with OpenAI(base_url=f"http://127.0.0.1:{stack.port}/v1", api_key="none", max_retries=0) as client:
            return client.embeddings.create(model=stack.model, input=TEXTS)

    assert await asyncio.to_thread(ask) == await openai.embeddings.create(model=stack.model, input=TEXTS)


async def test_a_job_can_be_left_and_its_embedding_fetched_later(stack: Api, openai: AsyncOpenAI) -> None:
    job_id = await stack.create_job(prompt=TEXTS[0], pooling="mean")
    await ending_of(stack, job_id)
    found = await (await stack.get(f"/v1/jobs/{job_id}")).json()
    asked = await openai.embeddings.create(model=stack.model, input=TEXTS[0], extra_body={"pooling": "mean"})
    assert found["embedding"] == asked.data[0].embedding


# What is refused


def test_the_page_has_every_field_of_the_official_package_and_of_the_code() -> None:
    rows = re.findall(r"^\| (`.*?) \|", PAGE.read_text(), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    official = set(embedding_create_params.EmbeddingCreateParams.__annotations__)
    own = EmbeddingRequest.model_fields.keys() - Queued.model_fields.keys()
    assert (official | own | REFUSED_IN_EMBEDDINGS.keys()) - named == set()
    assert official <= EmbeddingRequest.model_fields.keys() | IGNORED


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"input": ""}, "input", "number 0 must hold at least one"),
        ({"input": []}, "input", "must be a string, a list of token ids, or a list with at least one"),
        ({"input": ["a", ""]}, "input", "number 1 must hold at least one"),
        ({"input": [[5], []]}, "input", "number 1 must hold at least one"),
        ({"input": [5, -1]}, "input", "token id -1 is negative"),
        ({"input": [5, "a"]}, "input", "must be a string, a list of token ids"),
        ({"input": [["a"]]}, "input", "number 0 must be a string or a list of token ids"),
        ({"input": [True]}, "input", "number 0 must be"),
        ({"input": {"a": 1}}, "input", "must be a string"),
        ({"input": ["x"] * 2_049}, "input", "holds 2049 texts; at most 2048"),
        ({"input": [5, 100_000]}, "input", "prompt holds token id 100000"),
        ({"input": ["a", [60] * TOO_LONG]}, "input", f"the prompt is {TOO_LONG} tokens, but at most {TOO_LONG - 1}"),
        ({"input": "x", "dimensions": 64}, "dimensions", "dimensions=64 is not supported"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format", "'float' or 'base64'"),
        ({"input": "x", "pooling": "cls"}, "pooling", "'last' or 'mean'"),
        ({"input": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
        ({"input": "x", "tools": [{}]}, "tools", "not supported"),
        ({"input": "x", "normalize": False}, "normalize", "not supported yet; only True is"),
        ({"input": "x", "embed_dtype": "float16"}, "embed_dtype", "not supported"),
        ({"input": "x", "endianness": "big"}, "endianness", "not supported"),
        ({"input": "x", "messages": []}, "messages", "not supported"),
        ({}, "input", "input is required"),
    ],
)
async def test_what_cannot_be_embedded_is_a_400_that_names_the_field_and_no_job(
    scripted: Api, redis: Redis, fields: dict[str, Any], param: str, says: str
) -> None:
    answer = await scripted.post("/v1/embeddings", {"model": scripted.model, **fields})
    error = await refused(redis, scripted.model, answer)
    assert error["param"] == param
    assert says in error["message"]


async def test_a_model_that_gives_none_is_refused_by_name(api: Api, redis: Redis) -> None:
    error = await refused(redis, api.model, await api.post("/v1/embeddings", {"model": api.model, "input": "x"}))
    assert (error["param"], error["code"]) == ("model", "no_embeddings")


async def test_a_model_that_is_not_there_is_a_404(stack: Api, openai: AsyncOpenAI) -> None:
    with pytest.raises(sdk.NotFoundError):
        await openai.embeddings.create(model="nobody", input="x")


# All or none


async def standing(worker: ScriptedWorker, ids: list[str]) -> list[tuple[str, str]]:
    found = [await worker.queue.status(job_id) for job_id in ids]  # type: ignore[arg-type]
    return [(one.state, one.reason) for one in found if one is not None]


async def test_inputs_that_the_queue_has_no_room_for_leave_nothing_behind(
    write_queue_card: Any, start_api: StartApi, worker: ScriptedWorker
) -> None:
    await write_queue_card(hidden_size=4)
    api = await start_api(max_waiting_jobs=3)
    answer = await api.post("/v1/embeddings", {"model": api.model, "input": [[n] for n in range(1, 30)]})
    assert answer.status == 429
    assert "retry-after" in answer.headers
    assert await worker.queue.counts() == (0, 0)


async def test_one_that_fails_is_the_answer_and_the_others_are_cancelled(scripted: Api, worker: ScriptedWorker) -> None:
    asking = asyncio.create_task(scripted.post("/v1/embeddings", {"model": scripted.model, "input": [[1], [2], [3]]}))
    jobs = [await worker.claim() for _ in range(3)]
    await jobs[1].fail(type="invalid_request_error", code="poison", message="it will not do")
    answer = await asking
    error = (await answer.json())["error"]
    assert (answer.status, error["code"], error["message"]) == (400, "poison", "it will not do")
    assert await standing(worker, [jobs[0].id, jobs[2].id]) == [("done", "cancelled")] * 2


async def test_a_worker_that_finishes_without_an_embedding_is_told_of(scripted: Api, worker: ScriptedWorker) -> None:
    asking = asyncio.create_task(scripted.post("/v1/embeddings", {"model": scripted.model, "input": "x"}))
    await (await worker.claim()).finish("words")
    answer = await asking
    assert answer.status == 500
    assert "gave no embedding" in (await answer.json())["error"]["message"]


async def leave(api: Api, worker: ScriptedWorker, **fields: Any) -> list[Any]:
    """Send three inputs, wait until all are claimed, hang up."""
    jobs = []

    async def claim_all() -> Any:
        jobs.extend([await worker.claim() for _ in range(3)])

    await send_and_leave_when(api, claim_all, "/v1/embeddings", {"input": [[1], [2], [3]], **fields})
    return jobs


async def test_a_client_that_leaves_cancels_all_of_its_jobs(scripted: Api, worker: ScriptedWorker) -> None:
    jobs = await leave(scripted, worker)
    assert [await ending_of(scripted, job.id) for job in jobs] == ["cancelled"] * 3


async def test_or_lets_them_go_on(scripted: Api, worker: ScriptedWorker, redis: Redis) -> None:
    jobs = await leave(scripted, worker, on_disconnect="continue")
    for job in jobs:
        await job.finish()
    assert [await ending_of(scripted, job.id) for job in jobs] == ["finished"] * 3


# Whose they are


async def test_the_jobs_are_of_the_keys_tenant_and_the_key_must_be_one_that_generates(
    redis: Redis, write_queue_card: Any, start_api: StartApi, worker: ScriptedWorker
) -> None:
    await write_queue_card(hidden_size=4)
    api = await start_api(access="keys", key_cache_s=0)
    made = [make_key(f"embeds-{scope}", tenant="acme", scopes=(scope,)) for scope in ("generate", "read")]
    try:
        for _, key in made:
            await add_key(redis, key)
        (may, _), (may_not, _) = made
        body = {"model": api.model, "input": [[1], [2]], "tenant": "other"}
        answer = await api.post("/v1/embeddings", body, authorization=f"Bearer {may_not}")
        assert answer.status == 403
        asking = asyncio.create_task(api.post("/v1/embeddings", body, authorization=f"Bearer {may}"))
        jobs = [await worker.claim() for _ in range(2)]
        assert [job.delivery.tenant for job in jobs] == ["acme"] * 2
        assert {job.spec.sampling.pooling for job in jobs} == {"last"}
        assert [job.spec.on_disconnect for job in jobs] == ["cancel"] * 2
        asking.cancel()
    finally:
        for _, key in made:
            await revoke_key(redis, key.name)
