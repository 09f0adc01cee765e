"""F13: a worker says whether its server keeps what it has accepted, and does not start where it throws jobs away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engine.scripted_model import HashModel
from tests.runtime.harness import LIVENESS_S, Ears, StartWorker, crew, expected

from jitney import AsyncClient
from jitney.connection import Redis, connect
from jitney.embedded import EmbeddedServer
from jitney.errors import SettingsError
from jitney.workers import list_workers
from jitney_worker.runtime.server_watch import ServerWatch
from jitney_worker.runtime.worker import Worker
from jitney_worker.settings import load_settings
from jitney_worker.text.tokenizer import Tokenizer

LIMIT = 1 << 30


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    """A server of this test's own: its settings are changed."""
    with EmbeddedServer(tmp_path) as running:
        yield running


@pytest.fixture
def redis_url(server: EmbeddedServer) -> str:
    return server.url


def lines_of(capsys: pytest.CaptureFixture[str], event: str) -> list[dict[str, str]]:
    """What was written on standard error: warnings and worse."""
    lines = map(json.loads, capsys.readouterr().err.splitlines())
    return [line for line in lines if line["event"] == event]


async def answers(client: AsyncClient) -> bool:
    job = await client.enqueue([1], max_tokens=3, ignore_eos=True)
    return (await job.result(LIVENESS_S)).token_ids == expected([1], 3)


async def test_a_worker_refuses_a_server_that_throws_accepted_jobs_away(
    redis: Redis, redis_url: str, queue_name: str, tokenizer: Tokenizer
) -> None:
    await redis.config_set("maxmemory", LIMIT)
    await redis.config_set("maxmemory-policy", "allkeys-lru")
    settings = load_settings(redis_url=redis_url, queue=queue_name)
    worker = Worker(settings, crew(settings, tokenizer, HashModel(), {}))
    with pytest.raises(SettingsError) as caught:
        await asyncio.wait_for(worker.run(), LIVENESS_S)
    for word in ("allkeys-lru", "set maxmemory-policy noeviction", "worker.allow_evicting_server=true"):
        assert word in str(caught.value)
    assert await list_workers(redis, queue_name) == []


@pytest.mark.parametrize(
    ("policy", "maxmemory", "allow", "level"),
    [
        ("allkeys-lru", LIMIT, True, "error"),
        ("volatile-lru", LIMIT, False, "error"),
        ("allkeys-lru", 0, False, "warning"),
    ],
    ids=["the loss was accepted", "only keys with a time to live", "no limit yet"],
)
async def test_a_worker_warns_and_starts_where_no_running_job_is_thrown_away(
    redis: Redis,
    start_worker: StartWorker,
    client: AsyncClient,
    capsys: pytest.CaptureFixture[str],
    policy: str,
    maxmemory: int,
    allow: bool,
    level: str,
) -> None:
    await redis.config_set("maxmemory", maxmemory)
    await redis.config_set("maxmemory-policy", policy)
    async with start_worker(worker={"allow_evicting_server": allow}):
        assert await answers(client)
    (said,) = lines_of(capsys, "server_may_evict_jobs")
    assert (said["level"], said["advice"]) == (level, "set maxmemory-policy noeviction")
    assert policy in said["found"]


async def test_a_server_that_begins_to_evict_later_is_noticed_by_the_janitor(
    redis: Redis, start_worker: StartWorker, ears: Ears
) -> None:
    async with start_worker(lease={"duration_s": 0.5}):
        assert ears.of("server_may_evict_jobs") == []
        await redis.config_set("maxmemory", LIMIT)
        await redis.config_set("maxmemory-policy", "allkeys-random")
        await ears.until("server_may_evict_jobs")
        await redis.config_set("maxmemory-policy", "noeviction")
        await ears.until("server_setting_mended")


async def test_every_finding_is_said_once_for_each_change(redis: Redis, queue_name: str, ears: Ears) -> None:
    watch = ServerWatch(redis, queue=queue_name)

    async def look_twice() -> list[str]:
        ears.events.clear()
        await watch.look()
        await watch.look()
        await asyncio.sleep(0)
        return [event["event"] for event in ears.events]

    assert await look_twice() == []
    await redis.config_set("appendonly", "no")
    assert await look_twice() == ["server_may_lose_jobs"]
    await redis.config_set("maxmemory", LIMIT)
    await redis.config_set("maxmemory-policy", "allkeys-lru")
    assert await look_twice() == ["server_may_evict_jobs"]
    await redis.config_set("maxmemory-policy", "volatile-ttl")
    assert await look_twice() == ["server_may_evict_jobs"]
    await redis.config_set("maxmemory-policy", "noeviction")
    assert await look_twice() == ["server_setting_mended"]


async def test_a_server_that_does_not_say_is_served_and_said_to_be_unknown_once(
    redis: Redis, server: EmbeddedServer, queue_name: str, ears: Ears, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a managed one that allows no INFO."""
    await redis.execute_command("ACL", "SETUSER", "shy", "on", ">secret", "~*", "&*", "+@all", "-info")
    shy = connect(f"redis://shy:secret@127.0.0.1:{server.port}/0")
    watch = ServerWatch(shy, queue=queue_name)
    await watch.admit(allow_evicting=False)
    await watch.look()
    await asyncio.sleep(0)
    await shy.aclose()
    assert [event["setting"] for event in ears.of("server_hides_setting")] == ["eviction", "persistence"]
    assert len(ears.events) == 2
    assert lines_of(capsys, "server_hides_setting") == []  # no more than information
