"""Tiny models for the model room's own tests; torch on one thread, because tests share the machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from jitney_worker.model.tiny import make_tiny


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama model. Read it, do not change it: use `make_tiny` for one of your own."""
    return make_tiny(tmp_path_factory.mktemp("tiny") / "llama")
