"""What each architecture of the Llama body fixes, where its `config.json` may stay silent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture that the native decoder computes.

    qkv_bias, o_bias: True, False, or None = `attention_bias` of the config says.
    qk_norm: queries and keys are RMS-normalised per head before the rotary embedding.
    head_dim: default, or None = hidden_size / num_attention_heads.
    fused: the checkpoint keeps q, k, v as one matrix, and gate, up as another.
    scaled: the config has Granite's four multipliers.
    skips_rope: some layers do not rotate: `no_rope_layers` of the config.
    window: whether `sliding_window` counts: never, in all layers, or where `use_sliding_window` and `layer_types` say.
    """

    model_type: str
    qkv_bias: bool | None = None
    o_bias: bool | None = None
    qk_norm: bool = False
    head_dim: int | None = None
    tied_embeddings: bool = False
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    max_position_embeddings: int = 2_048
    fused: bool = False
    scaled: bool = False
    skips_rope: bool = False
    window: Literal["never", "always", "where_asked"] = "never"


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family("llama"),
    "MistralForCausalLM": Family(
        "mistral", qkv_bias=False, o_bias=False, max_position_embeddings=131_072, window="always"
    ),
    "Qwen2ForCausalLM": Family(
        "qwen2", qkv_bias=True, o_bias=False, max_position_embeddings=32_768, window="where_asked"
    ),
    "Qwen3ForCausalLM": Family(
        "qwen3", qk_norm=True, head_dim=128, max_position_embeddings=32_768, window="where_asked"
    ),
    "GraniteForCausalLM": Family("granite", scaled=True),
    "SmolLM3ForCausalLM": Family(
        "smollm3",
        tied_embeddings=True,
        rope_theta=2_000_000.0,
        max_position_embeddings=32_768,
        skips_rope=True,
        window="where_asked",
    ),
    "Phi3ForCausalLM": Family(
        "phi3",
        qkv_bias=False,
        o_bias=False,
        rms_norm_eps=1e-5,
        max_position_embeddings=4_096,
        fused=True,
        window="always",
    ),
}
ROPE_KINDS = frozenset({"default", "linear", "yarn", "llama3", "longrope"})
"""`dynamic` is not among them because it needs no code: within the context of config.json it changes nothing."""
