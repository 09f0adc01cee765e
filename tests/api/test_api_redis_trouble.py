"""What an HTTP client is told while Redis refuses, hangs, or cannot keep what was asked of it; and that it passes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.api.conftest import Api, ScriptedWorker, StartApi
from tests.api.refusing_redis import RefusingRedis
from tests.faults.proxy import Proxy

from jitney.cards import QueueCard, write_card
from jitney.connection import connect
from jitney.embedded import EmbeddedServer

STARTING = "the queue's server is starting and reads its data; try again"
REPLICA = "the queue's server is a replica just now (a failover?); try again"
FULL = "the queue's server has no memory left for new jobs; try again later"
DISK = "the queue's server cannot write to its disk and takes no new jobs; try again later"
LOCKED_OUT = "the queue's server refuses this API: redis_url names no user with the right password and rights"
SILENT = "the queue does not answer just now; try again"

REFUSALS = [
    (b"LOADING Redis is loading the dataset in memory", STARTING, "1"),
    (b"READONLY You can't write against a read only replica.", REPLICA, "1"),
    (b"MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.", REPLICA, "1"),
    (b"OOM command not allowed when used memory > 'maxmemory'.", FULL, "10"),
    (b"MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist to disk.", DISK, "10"),
    (b"NOAUTH Authentication required.", LOCKED_OUT, None),
    (b"NOPERM User app has no permissions to run the 'hget' command", LOCKED_OUT, None),
    (b"CLUSTERDOWN Hash slot not served", REPLICA, "1"),
    (b"BUSY Redis is busy running a script.", SILENT, "1"),
]


@pytest.fixture
async def refusing(server: EmbeddedServer) -> AsyncIterator[RefusingRedis]:
    async with RefusingRedis(server.port) as refusing:
        yield refusing


def through(url: str, server: EmbeddedServer, port: int) -> str:
    return url.replace(f":{server.port}/", f":{port}/")


@pytest.mark.parametrize(
    ("refusal", "message", "retry_after"), REFUSALS, ids=[r.split()[0].decode() for r, *_ in REFUSALS]
)
async def test_a_refusal_is_a_503_that_says_what_is_the_matter_and_it_passes(
    start_api: StartApi,
    server: EmbeddedServer,
    refusing: RefusingRedis,
    worker: ScriptedWorker,
    write_queue_card: Any,
    refusal: bytes,
    message: str,
    retry_after: str | None,
) -> None:
    await write_queue_card()
    api = await start_api(redis_url=through(server.url, server, refusing.port))
    await refusing.refuse(refusal)
    for path in ("/v1/jobs", "/v1/completions"):
        answer = await api.post(path, {"model": api.model, "prompt": "hello"})
        error = (await answer.json())["error"]
        assert (answer.status, error["message"], error["code"]) == (503, message, "queue_unavailable")
        assert error["type"] == "service_unavailable_error"
        assert answer.headers.get("retry-after") == retry_after
        assert ("x-should-retry" in answer.headers) == (retry_after is None)
    assert refusing.num_refused >= 2
    ready = await api.get("/readyz")
    assert (ready.status, (await ready.json())["reason"]) == (503, message)
    await refusing.relent()
    job_id = await api.create_job()
    assert (await worker.claim()).id == job_id


async def test_no_answer_of_redis_is_told_within_about_one_timeout_however_many_ask(
    start_api: StartApi, server: EmbeddedServer, write_queue_card: Any
) -> None:
    """More requests than the API has connections, on a cold card: none waits behind another's silence."""
    await write_queue_card()
    async with Proxy(server.port) as proxy:
        api = await start_api(redis_url=through(server.url, server, proxy.port))
        assert (await api.get("/readyz")).status == 200
        proxy.hang()

        async def seconds_to_503(number: int) -> float:
            began = time.monotonic()
            path = "/v1/jobs" if number % 2 else "/readyz"
            answer = await (api.post(path, {"model": api.model, "prompt": "x"}) if number % 2 else api.get(path))
            body = await answer.json()
            assert answer.status == 503
            if number % 2:
                assert body["error"]["message"] == "the queue did not answer in time; try again"
                assert answer.headers["retry-after"] == "1"
            return time.monotonic() - began

        waits = await asyncio.gather(*(seconds_to_503(number) for number in range(80)))
        assert max(waits) < 9.0
        proxy.reset()
        proxy.heal()
        assert await api.create_job()


async def make_api_of(server: EmbeddedServer, start_api: StartApi, monkeypatch: pytest.MonkeyPatch) -> Api:
    """An API whose jobs must be on disk, over a server of its own."""
    monkeypatch.setenv("JITNEY_DURABILITY", "strict")
    redis = connect(server.url, name="jitney-test")
    api = await start_api(redis_url=server.url)
    await write_card(redis, api.model, QueueCard(model="m", max_model_len=64, vocab_size=10))
    await redis.aclose()
    return api


async def test_a_server_that_cannot_keep_what_was_asked_is_a_503_that_names_what_to_change(
    start_api: StartApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with EmbeddedServer(tmp_path / "server", appendfsync="no") as server:
        api = await make_api_of(server, start_api, monkeypatch)
        for path in ("/v1/jobs", "/v1/completions"):
            answer = await api.post(path, {"model": api.model, "prompt": "hello"})
            error = (await answer.json())["error"]
            assert (answer.status, error["code"]) == (503, "bad_settings")
            assert error["message"] == (
                "durability=strict, but Redis has appendfsync no and never flushes: "
                "set appendonly yes and appendfsync always"
            )
            assert answer.headers["x-should-retry"] == "false"
            assert "retry-after" not in answer.headers


async def test_a_server_that_can_keep_it_takes_the_job(
    start_api: StartApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with EmbeddedServer(tmp_path / "server", appendfsync="always") as server:
        api = await make_api_of(server, start_api, monkeypatch)
        assert await api.create_job()
