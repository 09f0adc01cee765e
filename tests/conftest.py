"""What every test may use: a real server, an empty queue of its own, and a card for it."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

from jitney.cards import QueueCard, write_card
from jitney.connection import Redis, connect
from jitney.embedded import EmbeddedServer


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """One embedded server for the whole run. Stop or break another one, not this."""
    with EmbeddedServer(tmp_path_factory.mktemp("valkey"), tethered=True) as running:
        yield running


@pytest.fixture(scope="session")
def redis_url(server: EmbeddedServer) -> str:
    return server.url


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    """A client of the session's server, in this test's event loop."""
    client = connect(redis_url, name="jitney-test")
    yield client
    await client.aclose()


@pytest.fixture
def queue_name() -> str:
    """A queue that no other test knows."""
    return f"q{secrets.token_hex(6)}"


WriteCard = Callable[..., Awaitable[QueueCard]]


@pytest.fixture
def write_queue_card(redis: Redis, queue_name: str) -> WriteCard:
    """`await write_queue_card(max_model_len=64)`: the card of this test's queue, with the fields given."""

    async def write(queue: str = queue_name, **fields: Any) -> QueueCard:
        defaults: dict[str, Any] = {"model": f"model-of-{queue}", "max_model_len": 2_048, "vocab_size": 1_000}
        return await write_card(redis, queue, QueueCard(**(defaults | fields)))

    return write
