"""Every test of the contract runs on the packaged Valkey and the distribution's Redis, each alone and as a cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from contract_driver import Driver
from contract_servers import CLUSTERS, SERVERS, running

from jitney.connection import Redis, connect_blocking
from jitney.embedded import EmbeddedServer
from jitney.queue import Queue


@pytest.fixture(scope="session", params=(*SERVERS, *CLUSTERS))
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """One of them, for the whole run. A cluster refuses one thing more: a script that leaves its queue's slot."""
    with running(request.param, tmp_path_factory.mktemp(f"contract-{request.param}")) as started:
        yield started


@pytest.fixture(scope="session")
def redis_url(server: EmbeddedServer) -> str:
    """Of this folder's server. Without it, another folder's cached address would stand in for all of ours."""
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
