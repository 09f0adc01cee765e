"""Rotary position embedding (Su et al. 2021), in the half-split layout of Hugging Face checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jitney.errors import ModelError, first_line
from jitney_worker.model.config import ModelConfig
from jitney_worker.model.quiet import quiet


@dataclass(frozen=True, slots=True)
class Rotation:
    """cos and sin of one step's positions, [num_tokens, 1, half], in the model's dtype.

    half: of the dimensions that rotate, which are the first of each head and mostly all of them.
    """

    cos: Tensor
    sin: Tensor

    def __call__(self, heads: Tensor) -> Tensor:
        """Rotate [num_tokens, num_heads, head_dim] into a new tensor."""
        half = self.cos.shape[-1]
        first, second, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
        return torch.cat((first * self.cos - second * self.sin, second * self.cos + first * self.sin, rest), dim=-1)


class Rope:
    """Turns positions into rotations; angles are computed in float32 whatever the model's dtype is."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        turning, self._attention_scale = frequencies(config)
        self._frequencies = turning.to(device)

    def at(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """The rotation of positions [num_tokens]."""
        angles = positions[:, None].float() * self._frequencies
        cos, sin = angles.cos() * self._attention_scale, angles.sin() * self._attention_scale
        return Rotation(cos.to(dtype)[:, None], sin.to(dtype)[:, None])


def frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Inverse frequencies [half of what rotates] and the scale of cos and sin (1 but for YaRN and longrope)."""
    rope = config.rope
    if rope.kind == "default":
        dim = int(config.head_dim * rope.share)
        return 1.0 / (rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float) / dim)), 1.0
    # Imported late: it costs most of a second, and only models with a stretched context need it.
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    numbers = {name: list(one) if isinstance(one, tuple) else one for name, one in rope.scaling}
    _check_lengths(numbers, (int(config.head_dim * rope.share) + 1) // 2)
    said = {"rope_type": rope.kind, "rope_theta": rope.theta, "partial_rotary_factor": rope.share, **numbers}
    try:
        with quiet():
            carrier = LlamaConfig(
                hidden_size=config.num_heads * config.head_dim,
                num_attention_heads=config.num_heads,
                head_dim=config.head_dim,
                max_position_embeddings=config.max_model_len,
                rope_parameters=said,
            )
        # seq_len: longrope has two sets of frequencies. One is taken for the model's whole context: a set that depended
        # on the length of a sequence would turn its neighbours' keys, and its own that are in the cache already.
        turning, scale = ROPE_INIT_FUNCTIONS[rope.kind](carrier, seq_len=config.max_model_len)
    except Exception as error:  # a number that is missing or of another kind, found out by foreign code
        raise ModelError(
            f"rope_parameters of config.json, type {rope.kind!r}, cannot be used ({type(error).__name__}: "
            f"{first_line(error)}): it says {numbers}"
        ) from error
    return turning.float(), float(scale)


def _check_lengths(numbers: Mapping[str, Any], length: int) -> None:
    """One factor too few is an error of torch's, but a single one would be taken for all frequencies."""
    for name in ("short_factor", "long_factor"):
        if name in numbers and not (isinstance(numbers[name], list) and len(numbers[name]) == length):
            raise ModelError(
                f"{name} of config.json's rope_parameters must be {length} numbers, one for each frequency"
            )
