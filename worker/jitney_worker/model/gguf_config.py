"""What a GGUF file says of its model, as the `config.json` that Hugging Face would have written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader

from jitney.errors import ModelError
from jitney_worker.model.gguf_tokenizer import Fields

ROPE_FACTORS = "rope_freqs.weight"
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8_192}
"""What every model with such frequencies was trained with. The file holds the outcome alone, which is compared."""

_UNDERSTOOD = frozenset(
    {
        "attention.head_count",
        "attention.head_count_kv",
        "attention.layer_norm_rms_epsilon",
        "attention.key_length",  # as the rows of the weights say, or they are refused
        "attention.value_length",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.finetuned",  # who made the model, not how it computes
    }
)
"""Fields of attention and rotary embedding that are followed, or change nothing."""

_USUAL = {"attention.causal": True, "rope.scale_linear": 1.0, "rope.scaling.attn_factor": 1.0}
"""Fields that are followed as long as they say this."""

_GRANITE = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
}


@dataclass(frozen=True, slots=True)
class Layout:
    """pairs: rotated pairs are neighbours in the file's rows of q and k, and not halves as in Hugging Face's.

    constants: what every file of the kind leaves unsaid. multipliers: our name of a number → the file's.
    """

    architecture: str
    pairs: bool = False
    constants: Mapping[str, Any] = field(default_factory=dict)
    multipliers: Mapping[str, str] = field(default_factory=dict)


LAYOUTS = {
    "llama": Layout("LlamaForCausalLM", pairs=True),  # Mistral's files say llama too
    "qwen2": Layout("Qwen2ForCausalLM"),
    "qwen3": Layout("Qwen3ForCausalLM"),
    "smollm3": Layout("SmolLM3ForCausalLM", pairs=True, constants={"no_rope_layer_interval": 4}),
    "granite": Layout("GraniteForCausalLM", pairs=True, multipliers=_GRANITE),
}


def config_of(fields: Fields, reader: GGUFReader) -> dict[str, Any]:
    """Content of `config.json`. Raises ModelError for what cannot be said there, KeyError for what the file lacks."""
    kind = fields["general.architecture"]
    layout = LAYOUTS[kind]
    own = {key.removeprefix(f"{kind}."): value for key, value in fields.items() if key.startswith(f"{kind}.")}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if own.get("expert_count"):
        raise ModelError(f"a mixture of {own['expert_count']} experts cannot be converted from GGUF")
    _refuse_unknown(own, layout)
    num_heads = own["attention.head_count"]
    head_dim = int(tensors["blk.0.attn_q.weight"].shape[1]) // num_heads  # rows, which GGUF writes last
    return {
        "architectures": [layout.architecture],
        "model_type": kind,
        "dtype": str(dtype_of(reader)).removeprefix("torch."),
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "hidden_size": own["embedding_length"],
        "intermediate_size": own["feed_forward_length"],
        "num_hidden_layers": own["block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": own.get("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": own["context_length"],
        "rms_norm_eps": _decimal(own["attention.layer_norm_rms_epsilon"]),
        "rope_parameters": _rope(own, head_dim, tensors.get(ROPE_FACTORS)),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        **layout.constants,
        **{name: _decimal(own[key]) for name, key in layout.multipliers.items()},
        **_special_ids(fields),
    }


def _refuse_unknown(own: Fields, layout: Layout) -> None:
    """What says how to compute, and is not followed here, would show as wrong answers and nothing else."""
    followed = _UNDERSTOOD | set(layout.multipliers.values())
    for key, value in own.items():
        says_how = key.startswith(("attention.", "rope.")) or key in _GRANITE.values()
        if says_how and key not in followed and value != _USUAL.get(key):
            raise ModelError(f"its field {key}={value} is not understood: it cannot be converted")


def _decimal(number: float) -> float:
    """Stored as float32: 1e-05 comes back as 9.999999747e-06 unless it is read as the shortest decimal."""
    return float(str(np.float32(number)))


def _special_ids(fields: Fields) -> dict[str, int]:
    named = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    keys = {name: f"tokenizer.ggml.{short}_token_id" for name, short in named.items()}
    return {name: int(fields[key]) for name, key in keys.items() if key in fields}


def further_ends(fields: Fields) -> dict[str, list[int]]:
    """Llama 3 ends turns and messages with tokens of their own."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    ends = list(dict.fromkeys(int(fields[key]) for key in keys if key in fields))
    return {"eos_token_id": ends} if len(ends) > 1 else {}


def _rope(own: Fields, head_dim: int, factors: Any) -> dict[str, Any]:
    """Rotary embedding: how frequencies are scaled, as Hugging Face says it."""
    rotated = own.get("rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise ModelError(f"a rotary embedding of {rotated} of {head_dim} dimensions cannot be converted from GGUF")
    theta = float(own.get("rope.freq_base", 10_000.0))
    if factors is not None:
        return _llama3_rope(theta, head_dim, np.asarray(factors.data, dtype=np.float32))
    kind = own.get("rope.scaling.type", "none")
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind not in ("linear", "yarn"):
        raise ModelError(f"rope scaling {kind!r} cannot be converted from GGUF; linear and yarn can")
    scaling: dict[str, Any] = {"rope_type": kind, "rope_theta": theta, "factor": float(own["rope.scaling.factor"])}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = own["rope.scaling.original_context_length"]
    return scaling


def _llama3_rope(theta: float, head_dim: int, factors: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Llama 3's scaling from the factor of each frequency: the largest one is the factor of them all.

    Raises ModelError if other constants than Llama 3's have made them.
    """
    factor, numbers = float(factors.max()), _LLAMA3_ROPE
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    share = numbers["original_max_position_embeddings"] / wavelengths
    smooth = (share - numbers["low_freq_factor"]) / (numbers["high_freq_factor"] - numbers["low_freq_factor"])
    expected = 1 / ((1 - smooth.clip(0, 1)) / factor + smooth.clip(0, 1))
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise ModelError("the file scales rope frequencies in a way that is not Llama 3's: it cannot be converted")
    return {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **numbers}


_PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}


def dtype_of(reader: GGUFReader) -> torch.dtype:
    """That of the matrices if they share one and it is plain; vectors are float32 in every file."""
    kinds = {tensor.tensor_type for tensor in reader.tensors if len(tensor.shape) > 1}
    return _PLAIN.get(kinds.pop(), torch.bfloat16) if len(kinds) == 1 else torch.bfloat16
