"""Every test of the contract runs on both servers: the packaged Valkey, and a Redis of the distribution."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from contract_driver import Driver
from contract_servers import SERVERS, running

from jitney.connection import Redis
from jitney.embedded import EmbeddedServer
from jitney.queue import Queue


@pytest.fixture(scope="session", params=SERVERS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """One of the two servers, for the whole run."""
    with running(request.param, tmp_path_factory.mktemp(f"contract-{request.param}")) as started:
        yield started


@pytest.fixture
def queue(redis: Redis, queue_name: str) -> Queue:
    return Queue(redis, queue_name)


@pytest.fixture
def driver(queue: Queue) -> Driver:
    """Short words for what a client and its workers do."""
    return Driver(queue)
