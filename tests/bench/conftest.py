"""A tiny model and a file of tiny workloads, for commands that are to run from end to end."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from jitney_worker.model.tiny import VOCAB_SIZE, make_tiny


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("bench-models") / "tiny-llama")


@pytest.fixture(scope="session")
def tiny_workload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every workload that the project's own file has, of a few short jobs."""
    chance = random.Random(3)

    def ids(count: int) -> list[int]:
        return [chance.randrange(3, VOCAB_SIZE) for _ in range(count)]

    contents = {
        "model": "smollm2-135m-instruct",
        "warm": [ids(40), ids(40)],
        "prompts": [ids(8) for _ in range(6)],
        "w1_out": [3, 9, 3, 3, 9, 3],
        "w2_out": [5] * 6,
        "w3": {"prompt": ids(8), "out": 12},
        "w4": {"prompt": ids(64)},
        "w5": [{"prompt": ids(4 + n % 5 * 4), "out": 10 + n % 7 * 8} for n in range(20)],
        "w6_gaps": [chance.expovariate(1.0) for _ in range(20)],
        "w7": {"n": 5, "temperature": 0.8, "top_p": 0.95, "seeds": [1, 2, 3, 4, 5]},
        "w8": {"prefix": ids(32), "suffixes": [ids(4) for _ in range(5)], "out": 4, "seats": 4},
        "w9": {"prompts": [ids(100), ids(100)], "out": 4, "seats": 2},
    }
    path = tmp_path_factory.mktemp("bench-workloads") / "workload.json"
    path.write_text(json.dumps(contents))
    return path


@pytest.fixture(autouse=True)
def _single_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that a command starts itself need not lay out gigabytes for a tiny model."""
    monkeypatch.setenv("JITNEY_ENGINE__NUM_KV_BLOCKS", "400")
