"""Models on disk, for programs; and one stack with the real model, for clients of every kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.e2e.programs import program, words

from jitney_worker.model.resolve import resolve
from jitney_worker.model.tiny import make_tiny

REAL = "smollm2-135m-instruct"
REAL_UP = ("--port", "0", "--max-num-seqs", "8", "--num-kv-blocks", "1024", "--num-threads", "1")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny-llama")


@dataclass(frozen=True)
class Stack:
    """Where `jitney up` serves. base_url: as OpenAI's clients want it."""

    api: str
    redis: str
    model: str

    @property
    def base_url(self) -> str:
        return f"{self.api}/v1"


@pytest.fixture(scope="module")
def real_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Redis, API and one worker with SmolLM2, started as a user starts them; in good health to the end."""
    resolve(REAL)  # fetched on a new machine: not within the time that a start may take
    with program("up", "--model", REAL, "--data-dir", str(tmp_path_factory.mktemp("up")), *REAL_UP) as running:
        ready = words(running.until_line("ready "))
        yield Stack(ready["api"], ready["redis"], ready["queue"])
        running.terminate()
        assert running.wait() == 0
