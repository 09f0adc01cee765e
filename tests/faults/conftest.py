"""The nemesis suite: each row of the fault matrix on real processes. `make test-faults`, `make test-faults-long`.

JITNEY_FAULT_SEEDS: how many seeds a row runs with. Without it only the checker's own tests are collected here,
so that `make test` stays quick. JITNEY_FAULT_REPORT: where the table of all rows is written at the end.

No row measures speed. A bound on time is there to find what hangs, and is long; what may take how long on which
machine is reported, beside the lease. Leases grow with the load of the machine (`pace`).
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from tests.api import api_wire
from tests.faults.arena import Arena, arena
from tests.faults.children import PATIENCE_S
from tests.faults.report import Figures, table

from jitney.embedded import EmbeddedServer, find_server
from jitney.errors import ServerError
from jitney_worker.model.tiny import make_tiny

NUM_SEEDS = int(os.environ.get("JITNEY_FAULT_SEEDS", "0"))
collect_ignore_glob = [] if NUM_SEEDS else ["test_f[0-9]*.py"]

ServerMaker = Callable[..., EmbeddedServer]
MakeArena = Callable[..., AbstractAsyncContextManager[Arena]]
Report = Callable[[Figures], Figures]

_FIGURES: list[Figures] = []


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(1, NUM_SEEDS + 1))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _FIGURES:
        return
    text = table(_FIGURES)
    terminalreporter.section("faults")
    terminalreporter.write_line(text)
    if path := os.environ.get("JITNEY_FAULT_REPORT"):
        Path(path).write_text(text + "\n")


@pytest.fixture(autouse=True)
def _patient_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests of the API may call an answer late; here everything else may be running too."""
    monkeypatch.setattr(api_wire, "PATIENCE_S", PATIENCE_S)


@pytest.fixture(scope="session")
def tokenizer_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def report() -> Report:
    """`report(figures)`: one row of the table."""

    def add(figures: Figures) -> Figures:
        _FIGURES.append(figures)
        return figures

    return add


def binary_of(kind: str) -> Path:
    try:
        return find_server("redis-server") if kind == "redis" else find_server()
    except ServerError as error:
        pytest.skip(f"no second server to test against: {error}")


@pytest.fixture
def make_server(tmp_path: Path) -> Iterator[ServerMaker]:
    """`make_server(kind="redis", appendfsync="always")`: one that this test may kill."""
    made: list[EmbeddedServer] = []

    def make(
        kind: str = "valkey", folder: str = "data", binary: Path | None = None, **options: object
    ) -> EmbeddedServer:
        server = EmbeddedServer(tmp_path / folder, binary=binary or binary_of(kind), **options)  # type: ignore[arg-type]
        made.append(server)
        return server.start()

    yield make
    for server in made:
        server.stop()


@pytest.fixture
def make_arena(tmp_path: Path, tokenizer_directory: Path) -> MakeArena:
    def make(server: EmbeddedServer, **options: float) -> AbstractAsyncContextManager[Arena]:
        folder = tmp_path / "run"
        folder.mkdir(exist_ok=True)
        return arena(folder, tokenizer_directory, server, **options)

    return make


@pytest.fixture
async def field(make_arena: MakeArena, make_server: ServerMaker) -> AsyncIterator[Arena]:
    """An arena on a Valkey of its own, with one API."""
    async with make_arena(make_server()) as made:
        await made.start_api(keep_alive_s=0.5)
        yield made
