"""Embeddings from a client keyword to a real model and back: what is in the log, in company, after a hand-over."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.engine.scripted_model import HashModel
from tests.runtime.harness import LIVENESS_S, MAX_MODEL_LEN, StartWorker, Turnstile

from jitney import AsyncClient, InvalidJob, JobFailed, Result
from jitney.messages import Event
from jitney_worker.model.runner import TorchRunner, load_runner
from jitney_worker.text.tokenizer import Tokenizer

BOTH = ["last", "mean"]
PROMPT = [(7 * n) % 400 + 50 for n in range(200)]
WriteCard = Callable[..., Awaitable[object]]


@pytest.fixture
def runner(tiny_directory: Path) -> TorchRunner:
    return load_runner(tiny_directory, dtype="float32", device="cpu", num_blocks=64, kernels="native")


@pytest.fixture
async def client(
    client: AsyncClient, tokenizer: Tokenizer, start_worker: StartWorker, write_queue_card: WriteCard
) -> Any:
    """Of a queue whose card says that there are embeddings."""
    await write_queue_card(
        max_model_len=MAX_MODEL_LEN,
        vocab_size=tokenizer.vocab_size,
        tokenizer_digest=tokenizer.digest,
        hidden_size=128,
    )
    return client


def engine_of(runner: TorchRunner, **options: Any) -> dict[str, Any]:
    return {"num_blocks": runner.num_blocks, "block_size": runner.block_size, "max_num_seqs": 8, **options}


async def log_of(client: AsyncClient, result: Result) -> list[Event]:
    return [event async for event in client.job(result.id).stream()]


@pytest.mark.parametrize("pooling", BOTH)
async def test_the_log_of_an_embedding_is_its_one_terminal_event(
    start_worker: StartWorker, client: AsyncClient, runner: TorchRunner, pooling: str
) -> None:
    async with start_worker(runner, engine=engine_of(runner)):
        result = await client.generate(PROMPT, pooling=pooling)
        (event,) = await log_of(client, result)
        status = await client.job(result.id).status()
    assert (event.type, event.seq, event.embedding) == ("finished", 1, result.packed_embedding)
    assert result.usage == {"prompt_tokens": 200, "completion_tokens": 0, "cached_tokens": 0}
    assert (result.text, result.token_ids, result.finish_reason) == ("", (), "stop")
    assert result.embedding is not None
    assert len(result.embedding) == runner.hidden_size
    assert math.hypot(*result.embedding) == pytest.approx(1.0, abs=1e-6)
    assert (status.reason, status.num_prompt_tokens, status.num_tokens) == ("finished", 200, 0)


@pytest.mark.parametrize("pooling", BOTH)
async def test_in_company_it_is_the_same_to_the_last_bit_and_so_are_the_answers_beside_it(
    start_worker: StartWorker, client: AsyncClient, runner: TorchRunner, pooling: str
) -> None:
    plain: dict[str, Any] = {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True}
    async with start_worker(runner, engine=engine_of(runner, max_num_batched_tokens=24)):
        alone = await client.generate(PROMPT, pooling=pooling)
        answer = await client.generate(PROMPT[:9], **plain)
        others = [await client.enqueue([n, *PROMPT[:8]], **plain) for n in (7, 8, 9)]
        again = [await client.enqueue(PROMPT, pooling=pooling, cache_salt=salt) for salt in ("", "a", "b")]
        beside = await client.enqueue(PROMPT[:9], **plain)
        assert [(await job.result(LIVENESS_S)).packed_embedding for job in again] == [alone.packed_embedding] * 3
        assert (await beside.result(LIVENESS_S)).token_ids == answer.token_ids
        for other in others:
            assert len((await other.result(LIVENESS_S)).token_ids) == 20


@pytest.mark.parametrize("pooling", BOTH)
async def test_a_peer_that_takes_over_in_the_middle_of_a_prompt_gives_the_same(
    start_worker: StartWorker, client: AsyncClient, runner: TorchRunner, tiny_directory: Path, pooling: str
) -> None:
    options = engine_of(runner, max_num_batched_tokens=16)
    async with start_worker(runner, engine=options):
        undisturbed = await client.generate(PROMPT, pooling=pooling)
    fresh = (load_runner(tiny_directory, dtype="float32", device="cpu", num_blocks=64, kernels="native") for _ in "ab")
    turnstile = Turnstile(next(fresh))
    async with start_worker(turnstile, engine=options, worker={"id": "first"}) as first:
        job = await client.enqueue(PROMPT, pooling=pooling)
        for _ in range(4):
            assert await turnstile.until_step() == [job.id]
            turnstile.pass_one()
        assert await turnstile.until_step() == [job.id]
        async with start_worker(next(fresh), engine=options, worker={"id": "second"}):
            first.drain()
            first.drain()
            result = await job.result(LIVENESS_S)
            turnstile.open()
    assert result.packed_embedding == undisturbed.packed_embedding
    assert [event.type for event in await log_of(client, result)] == ["finished"]


async def test_the_end_of_a_prompt_is_embedded_as_if_it_were_all(
    start_worker: StartWorker, client: AsyncClient, runner: TorchRunner
) -> None:
    async with start_worker(runner, engine=engine_of(runner)):
        cut = await client.generate(PROMPT, pooling="mean", truncate_prompt_tokens=9)
        short = await client.generate(PROMPT[-9:], pooling="mean")
    assert cut.usage["prompt_tokens"] == 9
    assert cut.packed_embedding == short.packed_embedding


async def test_a_chat_is_embedded_in_its_template(
    start_worker: StartWorker, client: AsyncClient, runner: TorchRunner, tokenizer: Tokenizer
) -> None:
    chat = [{"role": "user", "content": "the sea"}]
    async with start_worker(runner, engine=engine_of(runner)):
        embedded = await client.generate(messages=chat, pooling="last")
        by_ids = await client.generate(tokenizer.encode_chat(chat), pooling="last")
    assert embedded.packed_embedding == by_ids.packed_embedding


async def test_a_worker_that_has_no_hidden_states_refuses_by_name(
    start_worker: StartWorker, client: AsyncClient
) -> None:
    async with start_worker(HashModel()):
        with pytest.raises(JobFailed, match="gives no embeddings") as failed:
            await client.generate(PROMPT, pooling="last")
    assert failed.value.error["code"] == "no_embeddings"


async def test_a_queue_whose_card_says_that_there_are_none_takes_no_such_job(
    start_worker: StartWorker, redis_url: str, queue_name: str
) -> None:
    async with AsyncClient(redis_url, queue=queue_name) as plain:
        with pytest.raises(InvalidJob, match="gives no embeddings") as refused:
            await plain.enqueue(PROMPT, pooling="last")
    assert refused.value.param == "model"
