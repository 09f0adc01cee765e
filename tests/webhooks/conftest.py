"""A server of their own, emptied after each test: whoever delivers takes what is due in every outbox it finds."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.api.conftest import start_api  # noqa: F401
from tests.webhooks.receiver import Receiver

from jitney.connection import Redis, connect
from jitney.embedded import EmbeddedServer


@pytest.fixture(autouse=True)
def _no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A developer's own `.env` or environment must not steer a test."""
    for name in [name for name in os.environ if name.startswith("JITNEY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(tmp_path_factory.mktemp("webhooks"), tethered=True) as running:
        yield running


@pytest.fixture(scope="session")
def redis_url(server: EmbeddedServer) -> str:
    return server.url


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    client = connect(redis_url, name="jitney-test")
    await client.flushdb()
    yield client
    await client.aclose()


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with Receiver() as listening:
        yield listening
