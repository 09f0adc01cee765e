"""Upkeep without Celery: every duty, whatever becomes of the others; and the command that runs them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from importlib.metadata import EntryPoint
from typing import Any

import orjson
import pytest
from tests.client.scripted_worker import PATIENCE_S, ScriptedWorker, eventually

from jitney.async_client import AsyncClient
from jitney.history import MAX_SAMPLES, SPAN_S, take_sample
from jitney.keys import Keys
from jitney.logs import listening
from jitney.plugins import SUMMARIES
from jitney.queue import Queue
from jitney.tether import tether
from jitney.upkeeping import GROUP, Upkeep, keep_up


async def count_cards(context: Upkeep) -> dict[str, int]:
    """A duty that another room might bring."""
    return {"pong": int(await context.client.redis.ping())}


async def fall(context: Upkeep) -> dict[str, int]:
    raise RuntimeError("on its face")


def duty(name: str, function: str) -> EntryPoint:
    return EntryPoint(name, f"{__name__}:{function}", GROUP)


@pytest.fixture
async def late(client: AsyncClient) -> str:
    """A job whose deadline has passed while no worker looked."""
    job = await client.enqueue("hello", timeout_s=0.001)
    return job.id


async def test_the_janitor_does_what_workers_do_for_queues_that_have_none(
    client: AsyncClient, queue_name: str, late: str
) -> None:
    await asyncio.sleep(0.01)
    done = await keep_up(client, [])
    assert done["queues"] is not None
    assert done["queues"]["expired"] >= 1
    assert (await client.job(late).status()).reason == "expired"


async def test_one_failing_duty_of_the_janitor_does_not_stop_the_others(client: AsyncClient) -> None:
    heard: list[dict[str, Any]] = []
    with listening(lambda event: heard.append(dict(event))):
        done = await keep_up(
            client, [duty("a_bad", "fall"), duty("b_missing", "no_such_function"), duty("c_good", "count_cards")]
        )
    assert done["c_good"] == {"pong": 1}
    assert {name for name, found in done.items() if found is None} == {"a_bad", "b_missing"}
    failed = {event["duty"]: event["error"] for event in heard if event["event"] == "duty_failed"}
    assert failed == {"a_bad": "RuntimeError", "b_missing": "AttributeError"}


async def test_the_janitor_samples_each_queue_once_in_a_span(
    client: AsyncClient, queue_name: str, worker: ScriptedWorker
) -> None:
    await client.enqueue("held")
    await worker.take()
    await client.enqueue("waits")
    redis, queue = client.redis, Queue(client.redis, queue_name)
    seconds, _ = await redis.time()
    assert await take_sample(redis, queue)
    # Another janitor, in the same span; or, if the span has just ended, in the next one.
    assert not await take_sample(redis, queue) or (await redis.time())[0] // SPAN_S > seconds // SPAN_S
    entry_id, fields = (await redis.xrange(Keys(queue_name).history, count=1))[0]
    assert int(entry_id.split(b"-")[0]) % (SPAN_S * 1_000) == 0
    assert fields[b"waiting"] == b"1"
    assert int(fields[b"waiting_tokens"]) > 0
    assert fields[b"running"] == b"1"
    assert fields[b"workers"] == fields[b"generated_tokens"] == b"0"


async def test_the_samples_of_the_janitor_are_bounded(client: AsyncClient, queue_name: str) -> None:
    redis, key = client.redis, Keys(queue_name).history
    pipeline = redis.pipeline(transaction=False)
    for number in range(MAX_SAMPLES + 500):
        pipeline.xadd(key, {"waiting": 0}, id=f"{number + 1}-0")
    await pipeline.execute()
    await take_sample(redis, Queue(redis, queue_name))
    assert await redis.xlen(key) <= MAX_SAMPLES + 100  # trimmed by whole nodes
    assert await redis.pttl(key) > 0


def start(redis_url: str, *options: str) -> subprocess.Popen[bytes]:
    code = "import typer; from jitney.janitor_cli import janitor; typer.run(janitor)"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JITNEY_")}
    return subprocess.Popen(
        [sys.executable, "-c", code, "--redis-url", redis_url, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        preexec_fn=tether(signal.SIGKILL),
    )


async def test_the_command_janitor_once_prints_what_it_did(redis_url: str, client: AsyncClient, late: str) -> None:
    ran = start(redis_url, "--once")
    said, errors = await asyncio.to_thread(ran.communicate, timeout=PATIENCE_S)
    assert ran.returncode == 0, errors
    assert orjson.loads(said)["queues"]["queues"] >= 1
    assert (await client.job(late).status()).reason == "expired"


async def test_the_command_janitor_once_fails_with_its_duties(unused_tcp_port: int) -> None:
    ran = start(f"redis://127.0.0.1:{unused_tcp_port}/0", "--once")
    said, errors = await asyncio.to_thread(ran.communicate, timeout=PATIENCE_S)
    assert ran.returncode == 1, errors
    assert orjson.loads(said)["queues"] is None


async def test_the_command_janitor_goes_on_until_it_is_told_to_stop(redis_url: str, client: AsyncClient) -> None:
    ran = start(redis_url, "--interval", "1")
    try:
        for _ in range(2):
            job = await client.enqueue("hello", timeout_s=0.001)
            await eventually(lambda job=job: _has_expired(job))
        ran.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(ran.wait, PATIENCE_S) == 0
    finally:
        ran.kill()
        await asyncio.to_thread(ran.communicate)


async def _has_expired(job: Any) -> bool:
    return bool((await job.status()).reason == "expired")


def test_the_janitor_has_its_line_on_the_help_page() -> None:
    assert "janitor" in SUMMARIES
