"""A client, a card and a scripted worker on one queue, by Redis and by the API; readers of its channels."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.api.conftest import make_server
from tests.client.reading import NEVER_S
from tests.client.scripted_worker import PATIENCE_S, ScriptedWorker, Turn
from tests.conftest import WriteCard

from jitney.async_client import AsyncClient
from jitney.channel import ChannelReader
from jitney.connection import Redis


@pytest.fixture(autouse=True)
def _no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A developer's own `.env` or environment must not steer a test."""
    for name in [name for name in os.environ if name.startswith("JITNEY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def api_url(redis_url: str) -> Iterator[str]:
    """The address of an API that asks nobody for a key, in a thread of its own, for the whole run."""
    server, listening = make_server(redis_url=redis_url, headers_hold_s=0.5)
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    server.should_exit = True
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


@pytest.fixture(params=["redis_url", "api_url"])
def either_url(request: pytest.FixtureRequest) -> str:
    """Both links to the same jobs, one after the other."""
    url: str = request.getfixturevalue(request.param)
    return url


@pytest.fixture
async def client(redis_url: str, queue_name: str, write_queue_card: WriteCard) -> AsyncIterator[AsyncClient]:
    await write_queue_card()
    async with AsyncClient(redis_url, queue=queue_name) as client:
        yield client


@pytest.fixture
def worker(redis: Redis, queue_name: str) -> ScriptedWorker:
    return ScriptedWorker(redis, queue_name)


@pytest.fixture
async def turn(client: AsyncClient, worker: ScriptedWorker) -> Turn:
    """One claimed job that has said nothing yet."""
    await client.enqueue("hello")
    return await worker.take()


@pytest.fixture
async def alert(redis_url: str) -> AsyncIterator[ChannelReader]:
    """A reader that looks into the log again after a tenth of a second of silence."""
    async with ChannelReader(redis_url, quiet_s=0.1) as reader:
        yield reader


@pytest.fixture
async def trusting(redis_url: str) -> AsyncIterator[ChannelReader]:
    """A reader that never looks by itself: what it finds, the channel or a subscription told it."""
    async with ChannelReader(redis_url, quiet_s=NEVER_S) as reader:
        yield reader
