"""From a GGUF file to a Hugging Face directory: plain weights, configuration, tokenizer.

The result is the model from then on: whoever reads it, in whatever precision, reads the same numbers. Quantised
weights become bfloat16; a file that is not quantised keeps its own precision. Understood are the architectures that
the native decoder computes and whose layout is known here; another one is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file
from torch import Tensor

from jitney.errors import ModelError, first_line
from jitney.progress import progress
from jitney_worker.model.choice import served_config
from jitney_worker.model.config import ModelConfig
from jitney_worker.model.gguf_config import LAYOUTS, ROPE_FACTORS, Layout, config_of, dtype_of, further_ends
from jitney_worker.model.gguf_tokenizer import tokenizer_config, tokenizer_of
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
    if kind not in LAYOUTS:
        raise ModelError(f"architecture {kind!r} cannot be converted; {', '.join(LAYOUTS)} can")
    if fields.get("split.count", 0) > 1:
        raise ModelError(f"it is one of {fields['split.count']} parts: merge them first, with llama-gguf-split --merge")
    config = config_of(fields, reader)
    tokenizer = tokenizer_of(fields)
    weights = {}
    with progress("converting", len(reader.tensors), "tensors") as tell:
        for name, tensor in _weights(reader, config, LAYOUTS[kind]):
            weights[name] = tensor
            tell(len(weights))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    _write_json(directory / "config.json", config)
    special: dict[str, Any] = {
        name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in config
    }
    _write_json(directory / "generation_config.json", {**special, **further_ends(fields)})
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


def _weights(reader: GGUFReader, config: Mapping[str, Any], layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """Every tensor under its Hugging Face name."""
    dtype = dtype_of(reader)
    for tensor in reader.tensors:
        if tensor.name == ROPE_FACTORS:
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
