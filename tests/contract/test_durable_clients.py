"""`durability="strict"` as a client asks for it, on both servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from contract_servers import SERVERS, running

from jitney import AsyncClient, Client, NotDurable, SettingsError, durability
from jitney.cards import QueueCard, write_card
from jitney.connection import Redis, connect
from jitney.embedded import EmbeddedServer
from jitney.queue import Queue


@pytest.fixture(params=SERVERS)
def own_server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EmbeddedServer]:
    """A server whose settings the test may change; flushes once a second at first."""
    with running(request.param, tmp_path) as server:
        yield server


@pytest.fixture
async def own_redis(own_server: EmbeddedServer, queue_name: str) -> AsyncIterator[Redis]:
    client = connect(own_server.url)
    await write_card(client, queue_name, QueueCard(model="m", max_model_len=99, vocab_size=99))
    yield client
    await client.aclose()


@pytest.fixture(autouse=True)
def _no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("JITNEY_DURABILITY", raising=False)
    monkeypatch.chdir(tmp_path)


async def num_waiting(redis: Redis, queue: str) -> int:
    return (await Queue(redis, queue).counts())[0]


async def test_a_strict_client_enqueues_where_the_disk_answers_first(
    own_server: EmbeddedServer, own_redis: Redis, queue_name: str
) -> None:
    await own_redis.config_set("appendfsync", "always")
    async with AsyncClient(own_server.url, queue=queue_name, durability="strict") as client:
        jobs = await asyncio.gather(*(client.enqueue("x") for _ in range(20)))
        again = [await client.enqueue("x", seed=1, idempotency_key="k") for _ in range(2)]
    assert len({job.id for job in jobs}) == 20
    assert again[0].id == again[1].id
    assert await num_waiting(own_redis, queue_name) == 21


async def test_a_strict_client_refuses_a_server_that_cannot_confirm_and_writes_no_job(
    own_server: EmbeddedServer, own_redis: Redis, queue_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a second is not enough without a WAITAOF that waits; the error says what to change."""
    monkeypatch.setattr(durability, "HONEST_S", 60.0)
    async with AsyncClient(own_server.url, queue=queue_name, durability="strict") as client:
        for _ in range(2):
            with pytest.raises(SettingsError, match=r"durability=strict.*set appendonly yes and appendfsync always"):
                await client.enqueue("x")
        assert await num_waiting(own_redis, queue_name) == 0
        await own_redis.config_set("appendfsync", "always")
        await client.enqueue("x")
    assert await num_waiting(own_redis, queue_name) == 1, "what was refused before is looked at anew"


async def test_a_default_client_does_not_care(own_server: EmbeddedServer, own_redis: Redis, queue_name: str) -> None:
    await own_redis.config_set("appendonly", "no")
    for options in ({}, {"durability": "default"}):
        async with AsyncClient(own_server.url, queue=queue_name, **options) as client:  # type: ignore[arg-type]
            await client.enqueue("x")
    assert await num_waiting(own_redis, queue_name) == 2


async def test_the_environment_can_make_every_client_strict(
    own_server: EmbeddedServer, own_redis: Redis, queue_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JITNEY_DURABILITY", "strict")
    await own_redis.config_set("appendonly", "no")
    async with AsyncClient(own_server.url, queue=queue_name) as client:
        with pytest.raises(SettingsError, match="keeps no append-only file"):
            await client.enqueue("x")
    async with AsyncClient(own_server.url, queue=queue_name, durability="default") as client:
        await client.enqueue("x")


async def test_a_setting_that_is_changed_under_a_client_is_noticed_with_the_next_job(
    own_server: EmbeddedServer, own_redis: Redis, queue_name: str
) -> None:
    await own_redis.config_set("appendfsync", "always")
    async with AsyncClient(own_server.url, queue=queue_name, durability="strict") as client:
        await client.enqueue("x")
        await own_redis.config_set("appendfsync", "no")
        with pytest.raises(NotDurable) as caught:
            await client.enqueue("x")
        assert (await client.job(caught.value.job_id).status()).state == "waiting", "it is there, and may run"
        with pytest.raises(SettingsError):
            await client.enqueue("x")
    assert await num_waiting(own_redis, queue_name) == 2, "the server is looked at again before a third is written"


def test_the_client_for_threads_is_as_strict(own_server: EmbeddedServer, queue_name: str) -> None:
    async def prepare() -> None:
        redis = connect(own_server.url)
        await write_card(redis, queue_name, QueueCard(model="m", max_model_len=99, vocab_size=99))
        await redis.config_set("appendfsync", "always")
        await redis.aclose()

    asyncio.run(prepare())
    with Client(own_server.url, queue=queue_name, durability="strict") as client:
        assert client.enqueue("x").status().state == "waiting"


def test_an_unknown_durability_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match=r"durability='total' must be one of default, strict"):
        Client("redis://127.0.0.1:1/0", queue="q", durability="total")  # type: ignore[arg-type]
    monkeypatch.setenv("JITNEY_DURABILITY", "total")
    with pytest.raises(SettingsError, match="JITNEY_DURABILITY"):
        Client("redis://127.0.0.1:1/0", queue="q")
