"""Bug reports of other systems, told as tests: the real runtime and API in this loop, real servers and sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from tests.api.conftest import start_api, worker
from tests.cases.kinds import KINDS
from tests.faults.arena import Arena, arena
from tests.runtime.conftest import client, ears, start_worker, tiny_directory, tokenizer

from jitney.embedded import EmbeddedServer, find_server
from jitney.errors import ServerError

__all__ = ["client", "ears", "start_api", "start_worker", "tiny_directory", "tokenizer", "worker"]

StartServer = Callable[..., EmbeddedServer]


@pytest.fixture(scope="session")
def tokenizer_directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint's tokenizer of every kind in `kinds`."""
    return {kind: make(tmp_path_factory.mktemp("tokenizer")) for kind, make in KINDS.items()}


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[StartServer]:
    """`start_server(folder="second", password="secret")`: one that this test may break."""
    made: list[EmbeddedServer] = []

    def start(kind: str = "valkey", folder: str = "data", **options: object) -> EmbeddedServer:
        try:
            options.setdefault("binary", find_server("redis-server") if kind == "redis" else find_server())
        except ServerError as error:
            pytest.skip(f"no second server to test against: {error}")
        server = EmbeddedServer(tmp_path / folder, tethered=True, **options)  # type: ignore[arg-type]
        made.append(server)
        return server.start()

    yield start
    for server in made:
        server.stop()


@pytest.fixture
async def field(tmp_path: Path, tiny_directory: Path, redis_url: str, server: EmbeddedServer) -> AsyncIterator[Arena]:
    """Workers as processes of their own, on this test's server."""
    folder = tmp_path / "run"
    folder.mkdir()
    async with arena(folder, tiny_directory, server) as made:
        yield made
