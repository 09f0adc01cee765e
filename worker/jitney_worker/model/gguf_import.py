"""From a GGUF file to a Hugging Face directory: plain weights, configuration, tokenizer.

The result is the model from then on: whoever reads it, in whatever precision, reads the same numbers. Quantised
weights become bfloat16; a file that is not quantised keeps its own precision. Understood are the architectures that
the native decoder computes and whose layout is known here; another one is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file
from torch import Tensor

from jitney.errors import ModelError, first_line
from jitney_worker.model.choice import served_config
from jitney_worker.model.config import ModelConfig
from jitney_worker.model.gguf_tokenizer import Fields, tokenizer_config, tokenizer_of
from jitney_worker.model.weights import load_weights

_WHOLE_MODEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"
_NO_WEIGHT = (_ROPE_FACTORS,)
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
class _Layout:
    """pairs: rotated pairs are neighbours in the file's rows of q and k, and not halves as in Hugging Face's.

    constants: what every file of the kind leaves unsaid. multipliers: our name of a number → the file's.
    """

    architecture: str
    pairs: bool = False
    constants: Mapping[str, Any] = field(default_factory=dict)
    multipliers: Mapping[str, str] = field(default_factory=dict)


_LAYOUTS = {
    "llama": _Layout("LlamaForCausalLM", pairs=True),  # Mistral's files say llama too
    "qwen2": _Layout("Qwen2ForCausalLM"),
    "qwen3": _Layout("Qwen3ForCausalLM"),
    "smollm3": _Layout("SmolLM3ForCausalLM", pairs=True, constants={"no_rope_layer_interval": 4}),
    "granite": _Layout("GraniteForCausalLM", pairs=True, multipliers=_GRANITE),
}


def convert(gguf: Path, directory: Path) -> None:
    """Write weights, configuration and tokenizer of `gguf` into an existing directory, and read them back once.

    Raises ModelError that names the file, and OSError where nothing can be written.
    """
    try:
        reader = GGUFReader(gguf)
    except (OSError, ValueError, IndexError) as error:
        raise ModelError(f"{gguf} cannot be read as GGUF: {error}") from error
    try:
        _write(reader, directory)
        _read_back(directory)
    except ModelError as error:
        raise ModelError(f"{gguf}: {error}") from error
    except KeyError as error:
        raise ModelError(f"{gguf} has no field {error}") from None
    except OSError:
        raise
    except Exception as error:  # a damaged file, found out by whoever takes a part of it for what it says
        raise ModelError(f"{gguf} cannot be converted: {type(error).__name__}: {first_line(error)}") from error


def _write(reader: GGUFReader, directory: Path) -> None:
    fields = {name: field.contents() for name, field in reader.fields.items()}
    kind = fields.get("general.architecture")
    if kind not in _LAYOUTS:
        raise ModelError(f"architecture {kind!r} cannot be converted; {', '.join(_LAYOUTS)} can")
    if fields.get("split.count", 0) > 1:
        raise ModelError(f"it is one of {fields['split.count']} parts: merge them first, with llama-gguf-split --merge")
    config = _config(fields, reader)
    tokenizer = tokenizer_of(fields)
    save_file(
        dict(_weights(reader, config, _LAYOUTS[kind])), directory / "model.safetensors", metadata={"format": "pt"}
    )
    _write_json(directory / "config.json", config)
    special: dict[str, Any] = {
        name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in config
    }
    _write_json(directory / "generation_config.json", {**special, **_further_ends(fields)})
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = tokenizer_config(fields, max_model_len=config["max_position_embeddings"])
    _write_json(directory / "tokenizer_config.json", settings)


def _read_back(directory: Path) -> None:
    """Raises ModelError unless all weights are there, in the shapes that the configuration says."""
    config = served_config(directory)
    assert isinstance(config, ModelConfig), "every layout is one that the native decoder computes"
    load_weights(directory, config, torch.bfloat16, torch.device("cpu"))


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", "utf-8")


def _config(fields: Fields, reader: GGUFReader) -> dict[str, Any]:
    kind = fields["general.architecture"]
    layout = _LAYOUTS[kind]
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
        "dtype": str(_dtype(reader)).removeprefix("torch."),
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "hidden_size": own["embedding_length"],
        "intermediate_size": own["feed_forward_length"],
        "num_hidden_layers": own["block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": own.get("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": own["context_length"],
        "rms_norm_eps": _decimal(own["attention.layer_norm_rms_epsilon"]),
        "rope_parameters": _rope(own, head_dim, tensors.get(_ROPE_FACTORS)),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        **layout.constants,
        **{name: _decimal(own[key]) for name, key in layout.multipliers.items()},
        **_special_ids(fields),
    }


def _refuse_unknown(own: Fields, layout: _Layout) -> None:
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


def _further_ends(fields: Fields) -> dict[str, list[int]]:
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


def _dtype(reader: GGUFReader) -> torch.dtype:
    """That of the matrices if they share one and it is plain; vectors are float32 in every file."""
    kinds = {tensor.tensor_type for tensor in reader.tensors if len(tensor.shape) > 1}
    return _PLAIN.get(kinds.pop(), torch.bfloat16) if len(kinds) == 1 else torch.bfloat16


def _weights(reader: GGUFReader, config: Mapping[str, Any], layout: _Layout) -> Iterator[tuple[str, Tensor]]:
    """Every tensor under its Hugging Face name."""
    dtype = _dtype(reader)
    for tensor in reader.tensors:
        if tensor.name in _NO_WEIGHT:
            continue
        values = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        name, kind = _hugging_face_name(tensor.name)
        if layout.pairs and kind in ("attn_q", "attn_k"):
            heads = config["num_attention_heads" if kind == "attn_q" else "num_key_value_heads"]
            values = _half_split(values, heads)
        yield name, torch.from_numpy(values).to(dtype).contiguous()


def _hugging_face_name(name: str) -> tuple[str, str]:
    """And the tensor's kind, empty for one that belongs to no layer."""
    if name in _WHOLE_MODEL:
        return _WHOLE_MODEL[name], ""
    match name.split("."):
        case ["blk", index, kind, ("weight" | "bias") as suffix] if kind in _IN_LAYER:
            return f"model.layers.{index}.{_IN_LAYER[kind]}.{suffix}", kind
    raise ModelError(f"tensor {name} of the GGUF file has no place in the Llama body")


def _half_split(rows: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Rows of each head from GGUF's order, where rotated pairs are neighbours, to halves (i, i + head_dim / 2)."""
    pairs = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
