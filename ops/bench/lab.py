"""A model loaded once, and as many engines over it as a comparison needs: the same kernels and the same KV memory."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from jitney_worker.engine.engine import LocalEngine
from jitney_worker.engine.protocol import ModelOutput, ModelRunner, SchedulerOutput
from jitney_worker.engine.settings import EngineSettings, Policy
from jitney_worker.model.resolve import resolve
from jitney_worker.model.runner import TorchRunner, load_runner

MAX_NUM_BATCHED_TOKENS = 2_048
"""As a worker has it by default."""


class WatchedRunner:
    """Another runner, with a call before each step: then the engine's blocks are what the step needs of them."""

    def __init__(self, runner: ModelRunner, before_step: Callable[[SchedulerOutput], None]) -> None:
        self._runner, self._before_step = runner, before_step

    def execute(self, scheduled: SchedulerOutput) -> ModelOutput:
        self._before_step(scheduled)
        return self._runner.execute(scheduled)


@dataclass(frozen=True, slots=True)
class Lab:
    """name: what people call the model."""

    name: str
    directory: Path
    runner: TorchRunner
    quantization: str = "none"

    @property
    def num_threads(self) -> int:
        """Threads that multiply."""
        team = self.runner.team
        return torch.get_num_threads() if team is None else team.num_threads

    def engine(
        self,
        seats: int,
        *,
        num_blocks: int | None = None,
        policy: Policy = "continuous",
        admission_reserve: float = 0.15,
        max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS,
        before_step: Callable[[SchedulerOutput], None] | None = None,
    ) -> LocalEngine:
        """A fresh engine; one at a time may be used. num_blocks: how much of the lab's cache it may have.

        Raises SettingsError by name and value.
        """
        settings = EngineSettings(
            max_model_len=self.runner.max_model_len,
            num_blocks=min(num_blocks or self.runner.num_blocks, self.runner.num_blocks),
            block_size=self.runner.block_size,
            max_num_seqs=seats,
            max_num_batched_tokens=max(max_num_batched_tokens, seats),
            admission_reserve=admission_reserve,
            enable_prefix_caching=False,
            policy=policy,
        )
        runner: ModelRunner = self.runner
        return LocalEngine(settings, runner if before_step is None else WatchedRunner(runner, before_step))

    @property
    def setting(self) -> str:
        """For the head of a table."""
        numbers = self.runner.dtype if self.quantization == "none" else self.quantization
        return f"{self.name}, {numbers}, {self.runner.device}, kernels {self.runner.kernels}"


def open_lab(asked: argparse.Namespace, *, num_blocks: int | None = None) -> Lab:
    """The model that `flags.add_engine` tells of, with `num_blocks` blocks, or a cache of the worker's default size.

    Raises ModelError or SettingsError.
    """
    directory = resolve(asked.model)
    runner = load_runner(
        directory,
        dtype=asked.dtype,
        num_blocks=num_blocks,
        num_threads=asked.num_threads,
        kernels=asked.kernels,
        quantization=asked.quantization,
    )
    name = directory.name if Path(asked.model).is_dir() else asked.model
    return Lab(name, directory, runner, asked.quantization)
