"""Rotary embeddings that look at the longest sequence in the batch are made to look at the model's context instead.

Phi-3's `longrope` has two sets of frequencies, and transformers takes the one that the farthest position of the call
asks for. In a batch of strangers that would let one sequence turn the others' keys. Here the set is chosen once: the
long one if the model's context is longer than the one it was first trained for. `dynamic` needs nothing: it changes
frequencies only beyond the context that config.json states, and nothing goes beyond that here.
"""

from __future__ import annotations

from typing import Any

import torch

PINNED = "pinned"


def pin(model: Any, max_model_len: int) -> None:
    """Choose the frequencies of every `longrope` module of a model, for good."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if kinds == "longrope":
            _choose(module, None, "inv_freq", max_model_len)
            module.rope_type = PINNED
        elif isinstance(kinds, dict):
            for layer_type in [one for one, kind in kinds.items() if kind == "longrope"]:
                _choose(module, layer_type, f"{layer_type}_inv_freq", max_model_len)
                module.rope_type = {**module.rope_type, layer_type: PINNED}


def _choose(module: Any, layer_type: str | None, name: str, max_model_len: int) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies: torch.Tensor = getattr(module, name)
    chosen, _ = ROPE_INIT_FUNCTIONS["longrope"](
        module.config, frequencies.device, seq_len=max_model_len, layer_type=layer_type
    )
    frequencies.copy_(chosen)
