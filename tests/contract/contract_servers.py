"""The two servers of the contract's tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from jitney.embedded import EmbeddedServer, find_server
from jitney.errors import ServerError

SERVERS = ("valkey", "redis")


@contextmanager
def running(kind: str, folder: Path) -> Iterator[EmbeddedServer]:
    try:
        binary = find_server("redis-server") if kind == "redis" else find_server()
    except ServerError as error:
        pytest.skip(f"no second server to test against: {error}")
    with EmbeddedServer(folder, binary=binary, tethered=True) as server:
        yield server
