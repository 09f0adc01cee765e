"""Kinds of tiny models: every family, and every option that changes the arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 1_024}
_LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}

_ODD_WIDTHS = {
    "hidden_size": 70,
    "intermediate_size": 41,
    "head_dim": 22,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "vocab_size": 531,
    "attention_bias": True,
    "tie_word_embeddings": False,
}
"""No multiple of anything that kernels like."""

VARIANTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biased": ("llama", {"attention_bias": True}),
    "llama-multi-head": ("llama", {"num_key_value_heads": 4}),
    "llama-multi-query": ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": False}),
    "llama-llama3-rope": ("llama", {"rope_parameters": _LLAMA3_ROPE}),
    "llama-yarn-rope": ("llama", {"rope_parameters": _YARN_ROPE}),
    "llama-linear-rope": ("llama", {"rope_parameters": _LINEAR_ROPE}),
    "llama-odd-widths": ("llama", _ODD_WIDTHS),
    "mistral": ("mistral", {}),
    "mistral-window": ("mistral", {"sliding_window": 24}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
}
