"""The compiled kernels at every level that this CPU can run, and teams of threads of each."""

from __future__ import annotations

from functools import cache

import torch

from jitney_worker.model.native.build import LEVELS, level
from jitney_worker.model.native.library import Team, kernels

NAMES = tuple(LEVELS)
HERE = NAMES[NAMES.index(level()) :]
"""The best level of this CPU and all below it: what runs elsewhere is tested here too."""


@cache
def team(name: str, num_threads: int = 2) -> Team:
    """Kept for the whole run of the tests: a level is compiled once."""
    return Team(kernels(name), num_threads)


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers that both sides see as `dtype` rounds them."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
