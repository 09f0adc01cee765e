"""Whether the kernels compute, and why not if they do not."""

from __future__ import annotations

from typing import Literal

import torch

from jitney.errors import SettingsError
from jitney.logs import logger
from jitney_worker.model.native.build import NativeUnavailable
from jitney_worker.model.native.library import KINDS, LANES, Team, kernels

KernelsName = Literal["auto", "native", "torch"]

NUM_CORES = torch.get_num_threads()
"""What torch takes by itself: the cores, or OMP_NUM_THREADS. Asked before anybody changes it."""


def team_for(
    asked: KernelsName, *, device: torch.device, dtype: torch.dtype, block_size: int, num_threads: int | None
) -> Team | None:
    """Threads with the kernels of this CPU; None where plain torch computes.

    `auto` takes the kernels if it can and says so loudly if it cannot. Raises SettingsError where `native` cannot be.
    """
    if asked == "torch" or (asked == "auto" and device.type != "cpu"):
        return None
    try:
        _check(device, dtype, block_size)
        return Team(kernels(), num_threads or NUM_CORES)
    except NativeUnavailable as error:
        if asked == "native":
            raise SettingsError(f"kernels='native' cannot be had: {error}") from None
        logger().warning("kernels_torch", reason=str(error))
        return None


def _check(device: torch.device, dtype: torch.dtype, block_size: int) -> None:
    if device.type != "cpu":
        raise NativeUnavailable(f"they compute on the CPU, not on {device}")
    if dtype not in KINDS:
        raise NativeUnavailable(f"they compute in float32 or bfloat16, not in {str(dtype).removeprefix('torch.')}")
    if block_size % LANES:
        raise NativeUnavailable(f"block_size={block_size} is no multiple of {LANES}")
