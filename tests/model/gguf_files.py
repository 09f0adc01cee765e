"""A GGUF file of any small model that transformers has made, written with the names and rules of `gguf` itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import orjson
import torch
from tokenizers import Tokenizer

Kind = gguf.GGMLQuantizationType
PAIRED = ("llama", "smollm3", "granite")
"""Those whose rows of q and k llama.cpp's converter reorders."""

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def randomise(model: Any) -> None:
    """Weights that can be said in every kind tested: up to 127 steps of a power of two, so that Q8_0 takes that step.

    Layers outweigh the embedding, or a tied model repeats its last token.
    """
    embedding = model.get_input_embeddings().weight
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            steps = torch.randint(-127, 128, parameter.shape, generator=generator)
            steps.view(-1)[::32] = 127
            fresh = steps / (4_096 if parameter is embedding else 256)
        else:
            fresh = torch.randint(-16, 17, parameter.shape, generator=generator) / 64 + float(not name.endswith("bias"))
        with torch.no_grad():
            parameter.copy_(fresh)


def write(
    path: Path,
    model: Any,
    architecture: str,
    kind: Kind,
    *,
    tokens: Mapping[str, Any],
    fields: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray[Any, Any]] | None = None,
) -> Path:
    """tokens: fields of the tokenizer, without prefix. fields, tensors: further ones, or (None) ones to leave out."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    said = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        **(fields or {}),
    }
    if architecture == "qwen3":
        said.setdefault("attention.key_length", config.head_dim)
    for key, value in said.items():
        _add(writer, f"{architecture}.{key}", value)
    for key, value in tokens.items():
        _add(writer, key if key.startswith("tokenizer.") else f"tokenizer.ggml.{key}", value)
    arch = next(found for found, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        if architecture in PAIRED and ".self_attn.q_proj." in name:
            values = neighbours(values, config.num_attention_heads)
        if architecture in PAIRED and ".self_attn.k_proj." in name:
            values = neighbours(values, config.num_key_value_heads)
        own = kind if values.ndim > 1 else Kind.F32
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), gguf.quants.quantize(values, own), raw_dtype=own)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def neighbours(rows: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Row i and row i + half of each head become neighbours."""
    half = rows.shape[0] // num_heads // 2
    heads = rows.reshape(num_heads, 2 * half, -1)
    order = [index for i in range(half) for index in (i, i + half)]
    return np.ascontiguousarray(heads[:, order].reshape(rows.shape))


def llama3_factors(head_dim: int, theta: float, factor: float) -> np.ndarray[Any, Any]:
    """What llama.cpp's converter stores: by how much the frequency of each pair is divided."""
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        if wavelength < 8_192 / 4.0:
            factors.append(1.0)
        elif wavelength > 8_192 / 1.0:
            factors.append(factor)
        else:
            smooth = (8_192 / wavelength - 1.0) / (4.0 - 1.0)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, dtype=np.float32)


def byte_level_tokens(tokenizer: Tokenizer, pre: str, **more: Any) -> dict[str, Any]:
    """Fields of a byte-level BPE tokenizer."""
    spec = orjson.loads(tokenizer.to_str())
    tokens, kinds = _tokens(spec)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in spec["model"]["merges"]]
    return {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": kinds, "merges": merges, **more}


def sentencepiece_tokens(tokenizer: Tokenizer, **more: Any) -> dict[str, Any]:
    """Fields of a sentencepiece BPE tokenizer: no merges, but scores, the better the earlier a piece was merged."""
    spec = orjson.loads(tokenizer.to_str())
    tokens, kinds = _tokens(spec)
    scores = [-float(number) for number in range(len(tokens))]
    kinds = [BYTE if token.startswith("<0x") else kind for token, kind in zip(tokens, kinds, strict=True)]
    kinds[0] = UNKNOWN
    return {"model": "llama", "pre": "default", "tokens": tokens, "token_type": kinds, "scores": scores, **more}


def _tokens(spec: dict[str, Any]) -> tuple[list[str], list[int]]:
    by_id = {number: token for token, number in spec["model"]["vocab"].items()}
    kinds = dict.fromkeys(by_id, NORMAL)
    for added in spec["added_tokens"]:
        by_id[added["id"]] = added["content"]
        kinds[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    return [by_id[number] for number in range(len(by_id))], [kinds[number] for number in range(len(by_id))]


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
