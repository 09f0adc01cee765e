"""Every test of the contract runs on both servers: the packaged Valkey, and a Redis of the distribution."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from contract_driver import Driver
from contract_servers import SERVERS, running

from jitney.connection import Redis, connect_blocking
from jitney.embedded import EmbeddedServer
from jitney.queue import Queue


@pytest.fixture(scope="session", params=SERVERS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """One of the two servers, for the whole run."""
    with running(request.param, tmp_path_factory.mktemp(f"contract-{request.param}")) as started:
        yield started


@pytest.fixture(scope="session")
def redis_url(server: EmbeddedServer) -> str:
    """Of this folder's server. Without it, another folder's cached address would stand in for both of ours."""
    return server.url


@pytest.fixture
async def redis(redis: Redis, server: EmbeddedServer) -> Redis:
    """The client of every test, which must speak to the server that the test is named after."""
    assert redis.connection_pool.connection_kwargs["port"] == server.port
    return redis


@pytest.fixture
async def blocking(server: EmbeddedServer) -> AsyncIterator[Redis]:
    """A client for one blocking call at a time."""
    client = connect_blocking(server.url, block_s=5.0)
    yield client
    await client.aclose()


@pytest.fixture
def queue(redis: Redis, queue_name: str) -> Queue:
    return Queue(redis, queue_name)


@pytest.fixture
def driver(queue: Queue) -> Driver:
    """Short words for what a client and its workers do."""
    return Driver(queue)
