"""Structured answers through a whole worker: from the client's keyword to the log, and on from another's log."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tests.runtime.harness import LIVENESS_S, StartWorker, Turnstile
from tests.runtime.test_worker_sampling import begun_elsewhere

from jitney import AsyncClient, JobFailed
from jitney.connection import Redis
from jitney.keys import Keys, new_job_id
from jitney.messages import Event
from jitney.queue import Queue
from jitney.structured import StructuredOutputs
from jitney.submission import entry_of, spec_from
from jitney_worker.model.runner import TorchRunner, load_runner
from jitney_worker.text import structures
from jitney_worker.text.tokenizer import Tokenizer

PROMPT = [70, 71, 72, 73, 74]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["sea", "shore"]},
        "name": {"type": "string", "maxLength": 8},
        "parts": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 4},
    },
    "required": ["kind", "name", "parts"],
    "additionalProperties": False,
}
STRUCTURED: dict[str, Any] = {"structured_outputs": {"json": SCHEMA}, "max_tokens": 200, "temperature": 1.1, "seed": 5}


@pytest.fixture
def runner(tiny_directory: Path) -> TorchRunner:
    return load_runner(tiny_directory, dtype="float32", device="cpu", num_blocks=96)


def engine_of(runner: TorchRunner) -> dict[str, Any]:
    return {"num_blocks": runner.num_blocks, "block_size": runner.block_size, "max_num_seqs": 8}


def check(text: str) -> None:
    jsonschema.validate(json.loads(text), SCHEMA)
    assert list(json.loads(text)) == list(SCHEMA["properties"])


async def test_three_choices_are_json_of_the_schema_and_free_jobs_beside_them_say_what_they_say_alone(
    start_worker: StartWorker, client: AsyncClient, runner: TorchRunner
) -> None:
    plain = {"max_tokens": 30, "ignore_eos": True, "temperature": 0.9, "seed": 1}
    async with start_worker(runner, engine=engine_of(runner)):
        before = await client.generate(PROMPT, **plain)
        beside = await client.enqueue(PROMPT, **plain)
        result = await client.generate(PROMPT, n=3, logprobs=1, **STRUCTURED)
        assert (await beside.result(LIVENESS_S)).token_ids == before.token_ids
    for choice in result.choices:
        check(choice.text)
        assert choice.finish_reason == "stop"
        assert choice.logprobs is not None
        assert len(choice.logprobs) == len(choice.token_ids)
    assert len({choice.text for choice in result.choices}) == 3


async def test_a_structure_is_compiled_neither_on_the_event_loop_nor_on_the_engines_thread(
    start_worker: StartWorker, client: AsyncClient, runner: TorchRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_it, threads = structures.on_deep_stack, []

    def told(compiles: Callable[[], Any], asked: StructuredOutputs) -> Any:
        threads.append(threading.current_thread().name)
        return compile_it(compiles, asked)

    monkeypatch.setattr(structures, "on_deep_stack", told)
    async with start_worker(runner, engine=engine_of(runner)):
        for _ in range(2):
            check((await client.generate(PROMPT, **STRUCTURED)).text)
    assert len(threads) == 1
    assert threads[0].startswith("jitney-structures")


async def test_while_a_suspects_structure_is_compiled_nobody_else_comes_on_board(
    start_worker: StartWorker,
    client: AsyncClient,
    redis: Redis,
    queue_name: str,
    runner: TorchRunner,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compiling may be what ended its last claimer."""
    compile_it, compiling, may_go_on = structures.on_deep_stack, threading.Event(), threading.Event()

    def held(compiles: Callable[[], Any], asked: StructuredOutputs) -> Any:
        compiling.set()
        assert may_go_on.wait(LIVENESS_S)
        return compile_it(compiles, asked)

    monkeypatch.setattr(structures, "on_deep_stack", held)
    queue = Queue(redis, queue_name)
    async with start_worker(runner, engine=engine_of(runner)):
        pass  # its card is there now
    suspect = await client.enqueue(PROMPT, **STRUCTURED)
    (taken,) = (await queue.claim("dead", "d1", credit=1, fingerprint="any", lease_s=60)).deliveries
    assert taken.id == suspect.id
    await redis.zadd(Keys(queue_name).leases("interactive"), {suspect.id: 1})
    other = await client.enqueue(PROMPT, max_tokens=3)
    async with start_worker(runner, engine=engine_of(runner)):
        assert await asyncio.to_thread(compiling.wait, LIVENESS_S)
        assert (await other.status()).state == "waiting"
        may_go_on.set()
        check((await suspect.result(LIVENESS_S)).text)
        assert (await other.result(LIVENESS_S)).choices


async def unchecked(redis: Redis, queue_name: str, structure: dict[str, Any]) -> str:
    """A job as somebody without the library sends it, or somebody with a Redis connection alone."""
    spec = spec_from({"prompt": (1, 2, 3), "structured_outputs": structure, "seed": 1, "max_tokens": 9})
    entry = entry_of(spec, job_id=new_job_id(queue_name), body=spec.encode(), digest="d", num_prompt_tokens=3)
    return (await Queue(redis, queue_name).enqueue(entry)).id


async def test_what_nobody_checked_before_fails_by_name_and_its_neighbours_run(
    start_worker: StartWorker, client: AsyncClient, redis: Redis, queue_name: str, runner: TorchRunner
) -> None:
    async with start_worker(runner, engine=engine_of(runner)):
        bad = client.job(await unchecked(redis, queue_name, {"json": {"properties": {"a": {"not": {}}}}}))
        good = await client.enqueue(PROMPT, **STRUCTURED)
        with pytest.raises(JobFailed, match='Unimplemented keys: \\["not"\\]') as failed:
            await bad.result(LIVENESS_S)
        check((await good.result(LIVENESS_S)).text)
    assert (failed.value.type, failed.value.param) == ("invalid_request_error", "structured_outputs.json")
    assert failed.value.code == "unsupported_structure"


async def test_a_worker_without_the_library_says_so(
    start_worker: StartWorker, client: AsyncClient, runner: TorchRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structures, "is_available", lambda: False)
    async with start_worker(runner, engine=engine_of(runner)):
        with pytest.raises(JobFailed, match="pip install jitney\\[guided\\]") as failed:
            await client.generate(PROMPT, **STRUCTURED)
        assert len((await client.generate(PROMPT, max_tokens=3, ignore_eos=True)).token_ids) == 3
    assert (failed.value.type, failed.value.param) == ("invalid_request_error", "structured_outputs")


async def test_a_structure_that_leaves_no_token_ends_its_job_alone(
    start_worker: StartWorker, client: AsyncClient, runner: TorchRunner
) -> None:
    only_a = {"allowed_token_ids": [75], "max_tokens": 100}
    async with start_worker(runner, engine=engine_of(runner)):
        stuck = await client.enqueue(PROMPT, structured_outputs={"json_object": True}, **only_a)
        good = await client.enqueue(PROMPT, **STRUCTURED)
        with pytest.raises(JobFailed, match="structured_outputs, allowed_token_ids") as failed:
            await stuck.result(LIVENESS_S)
        check((await good.result(LIVENESS_S)).text)
    assert (failed.value.type, failed.value.code) == ("invalid_request_error", "no_token_left")


async def test_who_goes_on_in_the_middle_of_json_writes_the_rest_of_the_same_bytes(
    start_worker: StartWorker,
    client: AsyncClient,
    redis: Redis,
    queue_name: str,
    runner: TorchRunner,
    tokenizer: Tokenizer,
) -> None:
    async with start_worker(runner, engine=engine_of(runner)):
        whole = await client.generate(PROMPT, **STRUCTURED)
    half = len(whole.token_ids) // 2
    shown = tokenizer.decode(whole.token_ids[:half])
    assert whole.text.startswith(shown)
    job = await client.enqueue(PROMPT, **STRUCTURED)
    await begun_elsewhere(
        Queue(redis, queue_name), PROMPT, Event("tokens", 2, index=0, token_ids=whole.token_ids[:half], text=shown)
    )
    async with start_worker(runner, engine=engine_of(runner)):
        result = await job.result(LIVENESS_S)
        events = [event async for event in job.stream()]
    assert (result.text, result.token_ids, result.finish_reason) == (whole.text, whole.token_ids, "stop")
    assert [event.resumed_tokens for event in events if event.type == "started"] == [None, half]
    check(result.text)


async def test_tokens_that_do_not_fit_the_structure_end_the_job_and_say_why(
    start_worker: StartWorker, client: AsyncClient, redis: Redis, queue_name: str, runner: TorchRunner
) -> None:
    job = await client.enqueue(PROMPT, **STRUCTURED)
    await begun_elsewhere(Queue(redis, queue_name), PROMPT, Event("tokens", 2, index=0, token_ids=(90, 91), text="no"))
    async with start_worker(runner, engine=engine_of(runner)):
        with pytest.raises(JobFailed, match="another build began it"):
            await job.result(LIVENESS_S)


async def test_a_hand_over_in_the_middle_of_json_changes_nothing(
    start_worker: StartWorker, client: AsyncClient, runner: TorchRunner
) -> None:
    """The first worker gives the job back after some steps; the second goes on from its log."""
    async with start_worker(runner, engine=engine_of(runner)):
        whole = await client.generate(PROMPT, **STRUCTURED)
    turnstile = Turnstile(runner)
    job = None
    async with start_worker(turnstile, engine=engine_of(runner), worker={"drain_timeout_s": 0.0}) as worker:
        job = await client.enqueue(PROMPT, **STRUCTURED)
        for _ in range(12):
            await turnstile.until_step()
            turnstile.pass_one()
        worker.drain()
        turnstile.open()
    async with start_worker(runner, engine=engine_of(runner)):
        result = await job.result(LIVENESS_S)
        events = [event async for event in job.stream()]
    assert (result.text, result.token_ids) == (whole.text, whole.token_ids)
    assert sum(event.type == "started" for event in events) == 2
