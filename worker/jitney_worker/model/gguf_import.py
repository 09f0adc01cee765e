"""From a GGUF file to a Hugging Face directory: dequantised bfloat16 weights, configuration, tokenizer.

The result is the model from then on: whoever reads it, in whatever precision, reads the same numbers.
Only what registered models need is understood: the llama architecture and byte-level BPE.
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

from jitney.errors import ModelError
from jitney_worker.model.chat import tokenizer_config

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
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL_TOKEN = 3


def convert(gguf: Path, directory: Path) -> None:
    """Write weights, configuration and tokenizer of `gguf` into an existing directory. Raises ModelError."""
    try:
        reader = GGUFReader(gguf)
    except (OSError, ValueError, IndexError) as error:
        raise ModelError(f"{gguf} cannot be read as GGUF: {error}") from error
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields.get("general.architecture") != "llama":
        raise ModelError(f"{gguf}: architecture {fields.get('general.architecture')!r} cannot be converted, llama can")
    config = _config(fields, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    weights = dict(_weights(reader, config))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    _write_json(directory / "config.json", config)
    special = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(directory / "generation_config.json", special)
    _tokenizer(fields).save(str(directory / "tokenizer.json"))
    settings = tokenizer_config(
        fields["tokenizer.chat_template"],
        max_model_len=config["max_position_embeddings"],
        bos=fields["tokenizer.ggml.tokens"][config["bos_token_id"]],
    )
    _write_json(directory / "tokenizer_config.json", settings)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", "utf-8")


def _config(fields: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
    num_heads = fields["llama.attention.head_count"]
    hidden = fields["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields.get("llama.rope.dimension_count", hidden // num_heads),
        "max_position_embeddings": fields["llama.context_length"],
        # Stored as float32: 1e-05 comes back as 9.999999747e-06 unless it is read as the shortest decimal.
        "rms_norm_eps": float(str(np.float32(fields["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_parameters": {"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def _weights(reader: GGUFReader, config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor under its Hugging Face name, in bfloat16."""
    for tensor in reader.tensors:
        values = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if tensor.name in _WHOLE_MODEL:
            name = _WHOLE_MODEL[tensor.name]
        else:
            _, index, kind, suffix = tensor.name.split(".")
            if kind not in _IN_LAYER:
                raise ModelError(f"tensor {tensor.name} of the GGUF file has no place in the Llama body")
            name = f"model.layers.{index}.{_IN_LAYER[kind]}.{suffix}"
            if kind in ("attn_q", "attn_k"):
                heads = config["num_attention_heads" if kind == "attn_q" else "num_key_value_heads"]
                values = _half_split(values, heads)
        yield name, torch.from_numpy(values).to(torch.bfloat16).contiguous()


def _half_split(matrix: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Rows of each head from GGUF's order, where rotated pairs are neighbours, to halves (i, i + head_dim / 2)."""
    rows, columns = matrix.shape
    pairs = matrix.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _tokenizer(fields: Mapping[str, Any]) -> Any:
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.decoders import ByteLevel as ByteLevelDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    kind = fields["tokenizer.ggml.model"], fields.get("tokenizer.ggml.pre")
    if kind != ("gpt2", "smollm"):
        raise ModelError(f"tokenizer {kind[0]!r} with pre-tokeniser {kind[1]!r} cannot be converted")
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = ByteLevelDecoder()
    kinds = zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
    control = [token for token, kind_of_token in kinds if kind_of_token == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer
