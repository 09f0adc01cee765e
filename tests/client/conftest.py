"""A client, a card and a scripted worker on one queue."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tests.client.scripted_worker import ScriptedWorker

from jitney.async_client import AsyncClient
from jitney.connection import Redis


@pytest.fixture(autouse=True)
def _no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    """A developer's own `.env` or environment must not steer a test."""
    for name in ("JITNEY_REDIS_URL", "JITNEY_QUEUE", "JITNEY_MODEL", "JITNEY_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.chdir(str(tmp_path))


@pytest.fixture
async def client(redis_url: str, queue_name: str, write_queue_card: object) -> AsyncIterator[AsyncClient]:
    await write_queue_card()  # type: ignore[operator]
    async with AsyncClient(redis_url, queue=queue_name) as client:
        yield client


@pytest.fixture
def worker(redis: Redis, queue_name: str) -> ScriptedWorker:
    return ScriptedWorker(redis, queue_name)
