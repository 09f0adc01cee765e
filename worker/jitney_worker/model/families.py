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
    num_kv_heads: default, or None = one for each query head.
    may_bias_mlp: `mlp_bias` of the config counts.
    fused: the checkpoint keeps q, k, v as one matrix, and gate, up as another.
    scaled: the config has Granite's four multipliers.
    skips_rope: some layers do not rotate: `no_rope_layers` of the config.
    window: whether `sliding_window` counts: never; in all layers; in all but where there are `layer_types`; or only
        with `use_sliding_window`, and where `layer_types` say.
    sliding_window: default, in tokens; None = no window.
    may_rotate_a_part: `partial_rotary_factor` counts.
    trained_on: default of `original_max_position_embeddings`, in tokens; None = `max_position_embeddings`.
    """

    model_type: str
    qkv_bias: bool | None = None
    o_bias: bool | None = None
    qk_norm: bool = False
    head_dim: int | None = None
    num_kv_heads: int | None = None
    may_bias_mlp: bool = False
    tied_embeddings: bool = False
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    max_position_embeddings: int = 2_048
    fused: bool = False
    scaled: bool = False
    skips_rope: bool = False
    window: Literal["never", "always", "where_listed", "where_asked"] = "never"
    sliding_window: int | None = None
    may_rotate_a_part: bool = False
    trained_on: int | None = None


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family("llama", may_bias_mlp=True),
    "MistralForCausalLM": Family(
        "mistral",
        qkv_bias=False,
        o_bias=False,
        num_kv_heads=8,
        max_position_embeddings=131_072,
        window="where_listed",
        sliding_window=4_096,
    ),
    "Qwen2ForCausalLM": Family(
        "qwen2",
        qkv_bias=True,
        o_bias=False,
        num_kv_heads=32,
        max_position_embeddings=32_768,
        window="where_asked",
        sliding_window=4_096,
    ),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        qk_norm=True,
        head_dim=128,
        num_kv_heads=32,
        max_position_embeddings=32_768,
        window="where_asked",
        sliding_window=4_096,
    ),
    "GraniteForCausalLM": Family("granite", may_bias_mlp=True, scaled=True),
    "SmolLM3ForCausalLM": Family(
        "smollm3",
        num_kv_heads=4,
        may_bias_mlp=True,
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
        may_rotate_a_part=True,
        trained_on=4_096,
    ),
}
ROPE_KINDS = frozenset({"default", "linear", "yarn", "llama3", "longrope"})
"""`dynamic` is not among them because it needs no code: within the context of config.json it changes nothing."""
