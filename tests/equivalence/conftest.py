"""Models of the equivalence tests, each loaded once. Everything here is float32 on the CPU, where results are exact."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from variants import VARIANTS

from jitney.errors import ModelError
from jitney_worker.model.native.choice import KernelsName
from jitney_worker.model.registry import DEFAULT_MODEL
from jitney_worker.model.resolve import resolve
from jitney_worker.model.runner import TorchRunner, load_runner
from jitney_worker.model.tiny import make_tiny


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`tiny_directory(variant)`: a random model of that kind, made once."""
    root = tmp_path_factory.mktemp("variants")

    def directory(variant: str) -> Path:
        made = root / variant
        family, overrides = VARIANTS[variant]
        return made if made.exists() else make_tiny(made, family=family, overrides=overrides)

    return directory


@pytest.fixture(scope="session", params=["native", "torch"])
def kernels(request: pytest.FixtureRequest) -> KernelsName:
    """What multiplies: whoever asks for it, or for a model, is tested with both."""
    chosen: KernelsName = request.param
    return chosen


@pytest.fixture(scope="session")
def tiny(tiny_directory: Callable[[str], Path], kernels: KernelsName) -> TorchRunner:
    """The plain tiny Llama with room for everybody."""
    return load_runner(tiny_directory("llama"), dtype="float32", device="cpu", num_blocks=400, kernels=kernels)


@pytest.fixture(scope="session")
def smollm2_directory() -> Path:
    """The registered model, pulled into the user's cache if it is not there yet; without a network, a skip."""
    try:
        return resolve(DEFAULT_MODEL)
    except ModelError as error:
        if str(error).startswith("downloading"):
            pytest.skip(f"SmolLM2 is neither here nor to be had: {error}")
        raise


@pytest.fixture(scope="session")
def smollm2(smollm2_directory: Path, kernels: KernelsName) -> TorchRunner:
    return load_runner(smollm2_directory, dtype="float32", device="cpu", num_blocks=256, kernels=kernels)
