"""Which families are served, by whom, and what they are tested with. Importing this costs nothing: no torch.

Every row that is served has a recipe for a tiny random checkpoint, and the tests make one of each, so that the table
that `jitney model architectures` prints is the list of what was tried, not of what was hoped. Families beyond it are
surveyed and tried when they are loaded (survey.py, trial.py), and refused if they fail.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

NATIVE: Literal["native"] = "native"
TRANSFORMERS: Literal["transformers"] = "transformers"
REFUSED: Literal["refused"] = "refused"


@dataclass(frozen=True, slots=True)
class Architecture:
    """One row. recipe: entries of a tiny config.json beyond `TINY`. says: what the refusal says."""

    model_type: str
    served: Literal["native", "transformers", "refused"]
    recipe: Mapping[str, Any] = field(default_factory=dict)
    says: str = ""


TINY: Mapping[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_WINDOW = {"sliding_window": 12}
_ALTERNATING = {**_WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_HEAD_DIM = {"head_dim": 8}
_EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "head_dim": 4,
}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
    "original_max_position_embeddings": 2,
}
_STATE = "keeps a state besides keys and values"
_OWN_ATTENTION = "does not use the attention interface"
_NO_POSITIONS = "takes no position ids"


def _served(served: Literal["native", "transformers"], **recipes: Mapping[str, Any]) -> tuple[Architecture, ...]:
    return tuple(Architecture(model_type, served, recipe) for model_type, recipe in recipes.items())


def _refused(says: str, **recipes: Mapping[str, Any]) -> tuple[Architecture, ...]:
    return tuple(Architecture(model_type, REFUSED, recipe, says) for model_type, recipe in recipes.items())


ARCHITECTURES: tuple[Architecture, ...] = (
    *_served(
        NATIVE,
        granite={
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.6,
            "attention_multiplier": 0.2,
            "logits_scaling": 2.0,
        },
        llama={},
        mistral={**_HEAD_DIM, **_WINDOW},
        phi3={"sliding_window": 12, "rope_parameters": _LONGROPE, "original_max_position_embeddings": 2},
        qwen2={"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1},
        qwen3=_HEAD_DIM,
        smollm3={"no_rope_layers": [1, 0], "use_sliding_window": True, **_WINDOW},
    ),
    *_served(
        TRANSFORMERS,
        apertus={},
        arcee={},
        aria_text={"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
        biogpt={},
        bitnet={},
        codegen={**_GPT2, "rotary_dim": 4},
        cohere={},
        cohere2={**_ALTERNATING},
        cohere2_moe={**_EXPERTS, **_HEAD_DIM, **_ALTERNATING},
        cwm={**_HEAD_DIM, **_ALTERNATING},
        deepseek_v2={**_EXPERTS, **_LATENT, "first_k_dense_replace": 1, "n_shared_experts": 1},
        deepseek_v3={**_EXPERTS, **_LATENT, "first_k_dense_replace": 1, "n_shared_experts": 1},
        dots1={**_EXPERTS, **_HEAD_DIM, "first_k_dense_replace": 1, "n_shared_experts": 1},
        ernie4_5=_HEAD_DIM,
        ernie4_5_moe={**_EXPERTS, "moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 0},
        exaone4={**_ALTERNATING},
        exaone_moe={**_EXPERTS, **_HEAD_DIM, **_ALTERNATING, "first_k_dense_replace": 1, "num_shared_experts": 1},
        flex_olmo=_EXPERTS,
        gemma=_HEAD_DIM,
        gemma2={**_HEAD_DIM, **_ALTERNATING, "query_pre_attn_scalar": 8},
        gemma3_text={**_HEAD_DIM, **_ALTERNATING, "query_pre_attn_scalar": 8},
        gemma3n_text={
            **_HEAD_DIM,
            **_ALTERNATING,
            "num_kv_shared_layers": 0,
            "laurel_rank": 4,
            "vocab_size_per_layer_input": 128,
            "hidden_size_per_layer_input": 8,
        },
        gemma4_text={
            **_HEAD_DIM,
            **_ALTERNATING,
            "global_head_dim": 16,
            "num_kv_shared_layers": 0,
            "vocab_size_per_layer_input": 128,
            "hidden_size_per_layer_input": 8,
        },
        glm={**_HEAD_DIM, "partial_rotary_factor": 0.5},
        glm4={**_HEAD_DIM, "partial_rotary_factor": 0.5},
        glm4_moe={**_EXPERTS, **_HEAD_DIM, "first_k_dense_replace": 1, "n_shared_experts": 1},
        glm4_moe_lite={**_EXPERTS, **_LATENT, "first_k_dense_replace": 1, "n_shared_experts": 1},
        gpt2={**_GPT2, "scale_attn_by_inverse_layer_idx": True},
        gpt_bigcode=_GPT2,
        gpt_neox={"rotary_pct": 0.5},
        gpt_oss={**_EXPERTS, **_HEAD_DIM, **_ALTERNATING},
        gptj={**_GPT2, "rotary_dim": 4},
        granitemoe=_EXPERTS,
        granitemoeshared={**_EXPERTS, "shared_intermediate_size": 24},
        helium=_HEAD_DIM,
        hunyuan_v1_dense=_HEAD_DIM,
        hunyuan_v1_moe={**_EXPERTS, **_HEAD_DIM, "moe_topk": 2},
        internlm3=_HEAD_DIM,
        jais2=_HEAD_DIM,
        jetmoe={**_EXPERTS, "kv_channels": 8},
        llama4_text={
            **_HEAD_DIM,
            **_EXPERTS,
            "attention_chunk_size": 12,
            "intermediate_size_mlp": 48,
            "no_rope_layers": [1, 0],
            "attn_temperature_tuning": True,
            "floor_scale": 16,
            "layer_types": ["chunked_attention", "full_attention"],
        },
        longcat_flash={**_LATENT, "ffn_hidden_size": 48, "num_layers": 2, "n_routed_experts": 4, "moe_topk": 2},
        mimo_v2_flash={**_EXPERTS, **_HEAD_DIM, "v_head_dim": 6, **_WINDOW},
        minicpm3={**_LATENT},
        ministral={**_HEAD_DIM, **_ALTERNATING},
        ministral3={**_HEAD_DIM},
        minimax_m2={**_EXPERTS, **_HEAD_DIM},
        mixtral={**_EXPERTS, **_WINDOW},
        nanochat={},
        nemotron={},
        olmo={},
        olmo2={},
        olmo3={**_ALTERNATING},
        olmoe=_EXPERTS,
        opt={"ffn_dim": 48, "word_embed_proj_dim": 32},
        persimmon={},
        phi={"partial_rotary_factor": 0.5},
        phimoe={**_EXPERTS, **_WINDOW},
        qwen2_moe={**_EXPERTS, "shared_expert_intermediate_size": 24},
        qwen3_moe={**_EXPERTS, **_HEAD_DIM},
        seed_oss=_HEAD_DIM,
        solar_open={**_EXPERTS, **_HEAD_DIM},
        stablelm={"partial_rotary_factor": 0.5},
        starcoder2=_WINDOW,
        vaultgemma={**_HEAD_DIM, **_ALTERNATING, "query_pre_attn_scalar": 8},
        youtu={**_LATENT},
        **{"modernbert-decoder": {"local_attention": 12, "global_attn_every_n_layers": 2}},
    ),
    *_refused(
        _STATE,
        mamba={},
        mamba2={"num_heads": 8, "head_dim": 8},
        falcon_h1={},
        jamba={},
        qwen3_next={},
        recurrent_gemma={},
        rwkv={},
    ),
    *_refused("keeps a state outside of attention", lfm2={"layer_types": ["conv", "full_attention"]}, minimax={}),
    *_refused(_NO_POSITIONS, bart={}, bloom={}, mpt={}),
    *_refused(
        _OWN_ATTENTION, falcon={}, gpt_neo={"num_layers": 2, "attention_types": [[["global", "local"], 1]]}, xglm={}
    ),
    *_refused("counts positions in its own way", roberta={"is_decoder": True}),
    *_refused("attends twice in one pass", diffllama={}),
    *_refused("attends with indices", deepseek_v32={}),
    *_refused("makes masks of its own", doge=_HEAD_DIM),
)
