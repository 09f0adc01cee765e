"""The client for asyncio: what it sends, what it refuses, and what comes back. By Redis and over HTTP alike."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.client.scripted_worker import PATIENCE_S, ScriptedWorker, Turn
from tests.conftest import WriteCard

from jitney import (
    AsyncClient,
    IdempotencyConflict,
    InvalidJob,
    JobCancelled,
    JobExpired,
    JobFailed,
    JobNotFound,
    Overloaded,
    PromptTooLong,
    QueueUnavailable,
    SamplingParams,
    SettingsError,
    StreamLost,
    UnknownQueue,
)
from jitney.cards import write_alias
from jitney.connection import Redis
from jitney.keys import new_job_id, queue_of
from jitney.messages import Event, JobSpec
from jitney.queue import Limits

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
BOTH_ENDS = {"continue_final_message": True, "add_generation_prompt": True}


@pytest.fixture
async def client(either_url: str, queue_name: str, write_queue_card: WriteCard) -> AsyncIterator[AsyncClient]:
    """By either link; `redis_client` stands where only one of them promises it."""
    await write_queue_card()
    async with AsyncClient(either_url, queue=queue_name) as client:
        yield client


@pytest.fixture
async def redis_client(redis_url: str, queue_name: str, write_queue_card: WriteCard) -> AsyncIterator[AsyncClient]:
    await write_queue_card()
    async with AsyncClient(redis_url, queue=queue_name) as client:
        yield client


async def test_a_job_goes_from_enqueue_to_its_result(client: AsyncClient, worker: ScriptedWorker) -> None:
    job = await client.enqueue("Once", max_tokens=8, temperature=0.0, seed=7, band="standard", metadata={"a": "b"})
    turn = await worker.take()
    assert turn.id == job.id
    assert turn.spec.prompt == "Once"
    assert turn.spec.sampling == SamplingParams(max_tokens=8, temperature=0.0, seed=7)
    assert (turn.spec.band, turn.spec.metadata, turn.spec.on_disconnect) == ("standard", {"a": "b"}, "continue")
    await turn.start()
    await turn.say(" upon", " a")
    await turn.finish(" time", finish_reason="length")
    result = await job.result(PATIENCE_S)
    assert (result.text, result.token_ids, result.finish_reason) == (" upon a time", (0, 0, 1), "length")
    assert result.usage == {"prompt_tokens": 3, "completion_tokens": 3, "cached_tokens": 0}
    assert result.id == job.id


async def test_a_chat_travels_as_it_is(redis_client: AsyncClient, worker: ScriptedWorker) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "é"}], "name": "x"}]
    await redis_client.enqueue(messages=messages)
    assert (await worker.take()).spec.messages == tuple(messages)


async def test_a_chat_travels(client: AsyncClient, worker: ScriptedWorker) -> None:
    messages = [{"role": "system", "content": "é"}, {"role": "user", "content": "x", "name": "y"}]
    await client.enqueue(messages=messages, structured_outputs={"choice": ["a", "b"]})
    spec = (await worker.take()).spec
    assert spec.messages == tuple(messages)
    assert spec.sampling.structured_outputs is not None
    assert spec.sampling.structured_outputs.choice == ("a", "b")


async def test_the_stream_yields_every_event_from_started_to_the_last(
    client: AsyncClient, worker: ScriptedWorker
) -> None:
    job = await client.enqueue("x")
    turn = await worker.take()
    await turn.start()
    await turn.finish("a")
    events = [event async for event in job.stream()]
    assert [(event.type, event.seq) for event in events] == [
        ("started", 1),
        ("tokens", 2),
        ("tokens", 3),
        ("finished", 4),
    ]
    assert [event.seq async for event in client.job(job.id).stream(cursor=2)] == [3, 4]


async def test_choices_and_logprobs_are_kept_apart(client: AsyncClient, worker: ScriptedWorker) -> None:
    job = await client.enqueue("x", logprobs=0)
    turn = await worker.take()
    first, second = ({"id": 5, "logprob": -0.5},), ({"id": 6, "logprob": -1.5},)
    payloads = [
        Event("tokens", 1, choice=1, token_ids=(5,), text="b", logprobs=first),
        Event("tokens", 2, choice=0, token_ids=(6,), text="a", logprobs=second),
        Event("tokens", 3, choice=1, index=1, token_ids=(7,), text="B", logprobs=first, finish_reason="length"),
    ]
    await turn._append(payloads)
    await turn.finish("A")
    result = await job.result(PATIENCE_S)
    assert [(one.index, one.text, one.token_ids, one.finish_reason) for one in result.choices] == [
        (0, "aA", (6,), "stop"),
        (1, "bB", (5, 7), "length"),
    ]
    assert [one.logprobs for one in result.choices] == [second, first + first]


async def test_no_logprobs_are_none(client: AsyncClient, worker: ScriptedWorker) -> None:
    job = await client.enqueue("x")
    await (await worker.take()).finish("a")
    assert (await job.result(PATIENCE_S)).choices[0].logprobs is None


async def test_generate_is_enqueue_and_result(client: AsyncClient, worker: ScriptedWorker) -> None:
    answer, _ = await asyncio.gather(client.generate([1, 2, 3]), worker.serve(1, lambda turn: turn.finish("yes")))
    assert answer.text == "yes"


async def test_a_thousand_jobs_at_once_lose_nothing_and_repeat_nothing(
    client: AsyncClient, worker: ScriptedWorker
) -> None:
    async def echo(turn: Turn) -> None:
        await turn.start()
        await turn.say(*(f"{turn.spec.prompt}/{n};" for n in range(5)))
        await turn.finish("end")

    asked = [f"job {n}" for n in range(1_000)]
    results, _ = await asyncio.gather(
        asyncio.gather(*(client.generate(prompt) for prompt in asked)), worker.serve(len(asked), echo)
    )
    assert len({result.id for result in results}) == len(asked)
    for prompt, result in zip(asked, results, strict=True):
        assert result.text == "".join(f"{prompt}/{n};" for n in range(5)) + "end"
        assert result.usage["completion_tokens"] == 6
    assert await worker.queue.counts() == (0, 0)


async def test_an_unseeded_job_gets_a_seed_and_two_get_different_ones(
    client: AsyncClient, worker: ScriptedWorker
) -> None:
    for _ in range(2):
        await client.enqueue("x")
    seeds = {turn.spec.sampling.seed for turn in await worker.claim(credit=2)}
    assert None not in seeds
    assert len(seeds) == 2


async def test_the_same_idempotency_key_is_one_job(client: AsyncClient, worker: ScriptedWorker) -> None:
    """Bug case B27: twice at once, while it runs, and after its end: one generation, one stream."""
    first, second = await asyncio.gather(*(client.enqueue("x", idempotency_key="k", top_k=5) for _ in range(2)))
    turn = await worker.take()
    third = await client.enqueue("x", idempotency_key="k", top_k=5)
    await turn.finish("a")
    fourth = await client.enqueue("x", idempotency_key="k", top_k=5, traceparent="00-ab-cd-01")
    assert {first.id, second.id, third.id, fourth.id} == {turn.id}
    assert await worker.claim() == []
    assert [(await job.result(PATIENCE_S)).text for job in (first, fourth)] == ["a", "a"]


async def test_the_same_idempotency_key_for_another_body_is_a_conflict(client: AsyncClient) -> None:
    await client.enqueue("x", idempotency_key="k")
    with pytest.raises(IdempotencyConflict):
        await client.enqueue("y", idempotency_key="k")


async def test_idempotency_keys_are_a_tenants_own(redis_client: AsyncClient) -> None:
    first, second = [
        await redis_client.enqueue(tenant, idempotency_key="k", tenant=tenant) for tenant in ("one", "other")
    ]
    assert first.id != second.id


@pytest.mark.parametrize("key", ["", "é" * 129])
async def test_an_idempotency_key_has_a_size(client: AsyncClient, key: str) -> None:
    with pytest.raises(InvalidJob, match=rf"{len(key.encode())} bytes; 1 to 256") as raised:
        await client.enqueue("x", idempotency_key=key)
    assert raised.value.param == "idempotency_key"


@pytest.mark.parametrize("key", ["a:b", "*", "../x", "{tag}", "x" * 256, "\r\nX: y", "\0"])
async def test_an_idempotency_key_of_any_characters_names_no_redis_key(
    client: AsyncClient, redis: Redis, queue_name: str, key: str
) -> None:
    """Bug case B66."""
    await client.enqueue("x", idempotency_key=key)
    prefix = f"{{jitney:{queue_name}}}:idem:".encode()
    (name,) = [name for name in await redis.keys(f"*{queue_name}*") if b":idem:" in name]
    assert re.fullmatch(re.escape(prefix) + rb"[0-9a-f]{40}", name)


async def test_half_a_surrogate_pair_is_a_key_by_redis_and_no_json(
    redis_client: AsyncClient, api_url: str, queue_name: str
) -> None:
    await redis_client.enqueue("x", idempotency_key="\ud800")
    async with AsyncClient(api_url, queue=queue_name) as by_http:
        with pytest.raises(InvalidJob, match="idempotency_key"):
            await by_http.enqueue("x", idempotency_key="\ud800")


@pytest.mark.parametrize(
    ("options", "param", "said"),
    [
        ({}, "prompt", "exactly one of prompt and messages"),
        ({"prompt": "x", "messages": [{"role": "user"}]}, "prompt", "exactly one of prompt and messages"),
        ({"prompt": ""}, "prompt", "prompt is empty"),
        ({"prompt": [1, -2]}, "prompt", "token id -2"),
        ({"messages": []}, "messages", "messages is empty"),
        ({"messages": [{"content": "x"}]}, "messages.0.role", "missing or not a string"),
        ({"messages": [{"role": "user", "content": "x"}], "echo": True}, "echo", "echo needs prompt"),
        ({"prompt": "x", "metadata": {"a": "b" * 513}}, "metadata.a", "at most 512 characters"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": [TOOL], "pooling": "mean"}, "tools", "pooling"),
        ({"prompt": "x", "continue_final_message": True}, "continue_final_message", "needs messages"),
        ({"prompt": "x", "add_generation_prompt": False}, "add_generation_prompt", "needs messages"),
        ({"messages": [{"role": "user", "content": "x"}], **BOTH_ENDS}, "continue_final_message", "are both true"),
        ({"prompt": "x", "temperature": float("nan")}, "temperature", "nan"),
        ({"prompt": "x", "temperature": 101}, "temperature", "less than or equal to 100"),
        ({"prompt": "x", "top_p": 0}, "top_p", "greater than 0"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"prompt": "x", "max_token": 5}, "max_token", "unknown field max_token"),
        ({"prompt": "x", "band": "fast"}, "band", "'fast'"),
        ({"prompt": "x", "tenant": "a:b"}, "tenant", "'a:b'"),
        ({"prompt": "x", "sampling": {"top_k": 1}, "top_p": 0.5}, "top_p", "beside sampling"),
        ({"prompt": "x", "sampling": {"top_kk": 1}}, "sampling.top_kk", "unknown field sampling.top_kk"),
        ({"prompt": "\ud800"}, None, "not valid JSON"),
        ({"prompt": [5, 1_000]}, "prompt", "token id 1000; the model's ids end at 999"),
        ({"prompt": "x", "stop_token_ids": [1_000]}, "stop_token_ids", "token id 1000"),
        ({"prompt": "x" * (1 << 20)}, "prompt", "1048576 are allowed"),
    ],
)
async def test_what_can_never_run_is_refused_by_name_value_and_limit(
    client: AsyncClient, worker: ScriptedWorker, options: dict[str, Any], param: str | None, said: str
) -> None:
    with pytest.raises(InvalidJob) as raised:
        await client.enqueue(**options)
    assert said in str(raised.value)
    assert raised.value.param == param
    assert await worker.queue.counts() == (0, 0)


async def test_none_means_absent(client: AsyncClient, worker: ScriptedWorker) -> None:
    await client.enqueue("x", temperature=None, stop=None, band=None, timeout_s=None)
    assert (await worker.take()).spec.sampling.temperature == 1.0


async def test_a_prompt_may_fill_the_context_by_redis(redis_client: AsyncClient) -> None:
    """The API refuses earlier what leaves no room for an answer."""
    await redis_client.enqueue([1] * 2_048)


async def test_token_ids_beyond_the_context_are_too_long(client: AsyncClient) -> None:
    with pytest.raises(PromptTooLong) as raised:
        await client.enqueue([1] * 2_049)
    assert (raised.value.num_tokens, raised.value.max_tokens) == (2_049, 2_048)
    assert (raised.value.code, raised.value.param) == ("context_length_exceeded", "prompt")


async def test_the_estimate_is_exact_for_ids_and_by_size_for_text(
    client: AsyncClient, redis: Redis, write_queue_card: WriteCard, worker: ScriptedWorker
) -> None:
    jobs = [await client.enqueue([1, 2, 3]), await client.enqueue("é" * 10)]
    statuses = [await job.status() for job in jobs]
    assert [status.num_prompt_tokens for status in statuses] == [3, 5]  # 20 bytes at 4 bytes a token


async def test_a_full_queue_says_so(redis_url: str, queue_name: str, write_queue_card: WriteCard) -> None:
    await write_queue_card()
    async with AsyncClient(redis_url, queue=queue_name, limits=Limits(max_waiting_jobs=1)) as client:
        await client.enqueue("x")
        with pytest.raises(Overloaded) as raised:
            await client.enqueue("x")
    assert raised.value.waiting_jobs == 1


async def test_an_unknown_queue_is_refused_with_those_there_are(redis_url: str, redis_client: AsyncClient) -> None:
    async with AsyncClient(redis_url, queue="no-such-queue") as other:
        with pytest.raises(UnknownQueue) as raised:
            await other.enqueue("x")
    assert (await redis_client.card())[0] in raised.value.known


async def test_a_queue_answers_to_its_alias_and_its_model(
    either_url: str, redis: Redis, queue_name: str, write_queue_card: WriteCard
) -> None:
    await write_queue_card(model=f"org/{queue_name}-Model")
    await write_alias(redis, f"{queue_name}-alias", queue_name)
    for model in (f"{queue_name}-alias", f"org/{queue_name}-Model", queue_name):
        async with AsyncClient(either_url, model=model) as client:
            assert queue_of((await client.enqueue("x")).id) == queue_name


async def test_a_model_that_two_queues_serve_has_to_be_named_by_queue(
    either_url: str, queue_name: str, write_queue_card: WriteCard
) -> None:
    for queue in (f"{queue_name}-a", f"{queue_name}-b"):
        await write_queue_card(queue, model=f"{queue_name}/both")
    async with AsyncClient(either_url, model=f"{queue_name}/both") as client:
        with pytest.raises(InvalidJob, match=f"{queue_name}-a, {queue_name}-b"):
            await client.enqueue("x")


@pytest.mark.parametrize("name", ["*", "a:b", "\ud800", "x" * 300, "\0"])
async def test_a_strange_model_name_is_just_unknown(redis_url: str, name: str) -> None:
    async with AsyncClient(redis_url, model=name) as client:
        with pytest.raises(UnknownQueue):
            await client.enqueue("x")


async def test_queue_and_model_exclude_each_other(redis_url: str) -> None:
    with pytest.raises(InvalidJob, match="not both"):
        AsyncClient(redis_url, queue="a", model="b")


async def test_a_ready_made_job_goes_to_the_queue_named(
    client: AsyncClient, queue_name: str, write_queue_card: WriteCard
) -> None:
    await write_queue_card(f"{queue_name}-other", vocab_size=10)
    spec = JobSpec.build({"prompt": [11]})
    assert queue_of((await client.enqueue_spec(spec)).id) == queue_name
    with pytest.raises(InvalidJob, match="ids end at 9"):
        await client.enqueue_spec(spec, queue=f"{queue_name}-other")


async def test_failure_keeps_the_events_own_words(client: AsyncClient, worker: ScriptedWorker) -> None:
    job = await client.enqueue("x")
    turn = await worker.take()
    await turn.say("half an ")
    error = {
        "type": "invalid_request_error",
        "code": "context_length_exceeded",
        "message": "the prompt is 9 tokens, but at most 8 fit",
        "param": "prompt",
    }
    await turn.fail(error)
    with pytest.raises(JobFailed, match="at most 8 fit") as raised:
        await job.result(PATIENCE_S)
    failed = raised.value
    assert (failed.type, failed.code, failed.param) == ("invalid_request_error", "context_length_exceeded", "prompt")
    assert (failed.text, failed.job_id, failed.error) == ("half an ", job.id, error)


async def test_a_cancelled_job_keeps_its_partial_text(client: AsyncClient, worker: ScriptedWorker) -> None:
    job = await client.enqueue("x")
    await (await worker.take()).say("half")
    assert await job.cancel() is True
    assert await job.cancel() is False
    with pytest.raises(JobCancelled) as raised:
        await job.result(PATIENCE_S)
    assert (raised.value.text, raised.value.code) == ("half", "job_cancelled")


async def test_a_job_past_its_deadline_expires(client: AsyncClient, worker: ScriptedWorker) -> None:
    job = await client.enqueue("x", deadline=1.0)
    assert await worker.claim() == []
    with pytest.raises(JobExpired) as raised:
        await job.result(PATIENCE_S)
    assert raised.value.text == ""


async def test_a_result_after_the_log_was_folded(client: AsyncClient, worker: ScriptedWorker) -> None:
    job = await client.enqueue("x")
    turn = await worker.take()
    await turn.say("a", "b")
    await turn.finish("c")
    assert await worker.queue.fold(turn.delivery.id) == "ok"
    assert (await job.result(PATIENCE_S)).text == "abc"


async def test_a_timeout_leaves_the_job_running(client: AsyncClient, worker: ScriptedWorker) -> None:
    job = await client.enqueue("x")
    turn = await worker.take()
    with pytest.raises(TimeoutError):
        await job.result(timeout_s=0.01)
    await turn.finish("a")
    assert (await job.result(PATIENCE_S)).text == "a"


async def test_a_log_that_vanishes_is_told(client: AsyncClient, worker: ScriptedWorker, redis: Redis) -> None:
    job = await client.enqueue("x")
    turn = await worker.take()
    await turn.say("a")
    stream = job.stream()
    assert (await anext(stream)).text == "a"
    await redis.delete(turn.queue.keys.job(job.id), turn.queue.keys.tokens(job.id))
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(StreamLost):
            await anext(stream)


async def test_status_tells_where_a_job_stands(client: AsyncClient, worker: ScriptedWorker) -> None:
    job = await client.enqueue("x")
    assert (await job.status()).state == "waiting"
    turn = await worker.take()
    await turn.say("a")
    status = await job.status()
    assert (status.state, status.seq, status.num_tokens, status.tries) == ("running", 1, 1, 1)
    await turn.finish()
    assert (await job.status()).state == "done"


async def test_an_unknown_job_is_not_found_by_any_method(client: AsyncClient, queue_name: str) -> None:
    job = client.job(new_job_id(queue_name))
    for asked in (job.status(), job.cancel(), job.result(PATIENCE_S)):
        with pytest.raises(JobNotFound):
            await asked


@pytest.mark.parametrize("job_id", ["", "x", "q.short", "q.{jitney:q}:tokens:aaaaaaaaaa", "Q.0123456789012345678901"])
async def test_what_is_no_job_id_is_refused(client: AsyncClient, job_id: str) -> None:
    with pytest.raises(InvalidJob, match="is not a job id"):
        client.job(job_id)


async def test_results_live_an_hour_and_those_of_bulk_a_day(
    client: AsyncClient, worker: ScriptedWorker, redis: Redis
) -> None:
    kept = []
    for options in ({}, {"band": "bulk"}, {"band": "bulk", "result_ttl_s": 60}):
        job = await client.enqueue("x", **options)  # type: ignore[arg-type]
        await (await worker.take()).finish()
        kept.append(await redis.ttl(worker.queue.keys.job(job.id)))
    assert [round(ttl, -1) for ttl in kept] == [3_600, 86_400, 60]


async def test_no_server_is_said_plainly() -> None:
    async with AsyncClient("redis://:secret@127.0.0.1:1/0", queue="q") as client:
        with pytest.raises(QueueUnavailable) as raised:
            await client.enqueue("x")
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("url", ["ftp://localhost", "redis://u:secret@h:port/0", "localhost:6379", "redis://"])
async def test_a_wrong_address_is_refused_without_showing_it(url: str) -> None:
    with pytest.raises(SettingsError, match="not a Redis address") as raised:
        AsyncClient(url)
    assert "secret" not in str(raised.value)
