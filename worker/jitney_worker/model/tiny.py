"""A random, seeded model of about 1.5 MB with a real tokenizer: for tests and for trying things without a download.

It speaks nonsense, but it has everything a real checkpoint has: weights, byte-level BPE, a chat template and end
tokens, in the files that transformers reads too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from jitney.errors import ModelError
from jitney_worker.model.chat import BASE_TOKENS, CHAT_TEMPLATE, tokenizer_config

VOCAB_SIZE = 512
LOGIT_SPREAD = 2.5
"""Standard deviation of the logits, as of a trained model: with a usual initialisation they would nearly tie."""

RESIDUAL_GAIN = 3.0
"""Layers must drown the embedding they start from, or a model with tied embeddings repeats its last token."""

_SHAPE: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4_096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
_FAMILY: Mapping[str, Mapping[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True},
    "mistral": {"architectures": ["MistralForCausalLM"], "tie_word_embeddings": False, "sliding_window": None},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True, "use_sliding_window": False},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": False, "use_sliding_window": False},
}
FAMILY_NAMES = tuple(_FAMILY)


def make_tiny(
    directory: Path, *, family: str = "llama", seed: int = 0, overrides: Mapping[str, Any] | None = None
) -> Path:
    """Write a random model of one family; the same arguments give the same bytes. Returns the directory.

    overrides: further entries of config.json, such as {"sliding_window": 24}. Raises ModelError for an unknown family,
    and where no directory can be made.
    """
    if family not in _FAMILY:
        raise ModelError(f"family={family!r} is unknown: use one of {', '.join(FAMILY_NAMES)}")
    config = {"model_type": family, "dtype": "float32", **_SHAPE, **_FAMILY[family], **(overrides or {})}
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(f"{directory} cannot be made a directory: {error.strerror}") from error
    save_file(_random_weights(config, seed), directory / "model.safetensors", metadata={"format": "pt"})
    _write_json(directory / "config.json", config)
    special = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(directory / "generation_config.json", special)
    _train_tokenizer(config["vocab_size"]).save(str(directory / "tokenizer.json"))
    settings = tokenizer_config(CHAT_TEMPLATE, max_model_len=config["max_position_embeddings"])
    _write_json(directory / "tokenizer_config.json", settings)
    return directory


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", "utf-8")


def _random_weights(config: Mapping[str, Any], seed: int) -> dict[str, Tensor]:
    """Weights whose activations keep about unit variance from layer to layer."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, spread: float = 1.0) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * (spread / math.sqrt(columns))

    def vector(size: int, around: float) -> Tensor:
        return around + 0.1 * torch.randn(size, generator=generator)

    hidden, vocab = config["hidden_size"], config["vocab_size"]
    weights = {
        "model.embed_tokens.weight": matrix(vocab, hidden, LOGIT_SPREAD),
        "model.norm.weight": vector(hidden, 1.0),
    }
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = matrix(vocab, hidden, LOGIT_SPREAD)
    for index in range(config["num_hidden_layers"]):
        at = f"model.layers.{index}."
        for name, (rows, columns) in _matrices(config).items():
            writes_back = name in ("self_attn.o_proj", "mlp.down_proj")
            weights[f"{at}{name}.weight"] = matrix(rows, columns, RESIDUAL_GAIN if writes_back else 1.0)
        for name, rows in _biases(config).items():
            weights[f"{at}{name}.bias"] = vector(rows, 0.0)
        weights[at + "input_layernorm.weight"] = vector(hidden, 1.0)
        weights[at + "post_attention_layernorm.weight"] = vector(hidden, 1.0)
        if config["model_type"] == "qwen3":
            weights[at + "self_attn.q_norm.weight"] = vector(config["head_dim"], 1.0)
            weights[at + "self_attn.k_norm.weight"] = vector(config["head_dim"], 1.0)
    return weights


def _matrices(config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    return {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }


def _biases(config: Mapping[str, Any]) -> dict[str, int]:
    """Attention projections that have a bias, and their sizes."""
    family = config["model_type"]
    has_output_bias = family in ("llama", "qwen3") and bool(config.get("attention_bias"))
    biased = "qkv" if family == "qwen2" else "qkvo" if has_output_bias else ""
    return {f"self_attn.{which}_proj": _matrices(config)[f"self_attn.{which}_proj"][0] for which in biased}


def _train_tokenizer(vocab_size: int) -> Any:
    """Byte-level BPE: any bytes can be spelled, and frequent ones of `_TEXT` are merged."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel as ByteLevelDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer

    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(BASE_TOKENS),
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT.splitlines(), trainer)
    return tokenizer


_TEXT = """\
A jitney is a small bus that follows a fixed route without a timetable. You wave, it stops, and you get on wherever
there is a free seat. Nobody waits for the bus to be full, and nobody has to ride to the end of the line. When one
passenger gets off, the next one takes the seat, and the others hardly notice that anything has changed at all.
That is how many answers can be written at the same time by one model. Each answer is a passenger, each step of the
model is a stop, and a seat that becomes free is taken at the very next stop. Short answers leave early. Long answers
stay, and they are not slowed down much by those who come and go. The model reads the question first, then it writes
one token after another until the answer is complete or the limit is reached.
The queue remembers every job that has not been answered yet. If a worker is lost in the middle of an answer, another
worker reads what was already written and continues with the next word. The person who asked sees one whole answer,
without a gap and without a word that appears twice. Here are some numbers: 0 1 2 3 4 5 6 7 8 9, 10, 12, 100, 2026.
What is the capital of France? The capital of France is Paris. How many legs does a spider have? A spider has eight
legs, and an insect has six. Write a short story about the sea. Once upon a time there was a small town by the sea,
where the houses were white and the windows were blue, and in the evening the boats came back with the tide.
def add(a, b): return a + b. for i in range(10): print(i, "hello, world"). {"name": "value", "list": [1, 2, 3]}
Thank you for your question! Please tell me more about it; I would be happy to help. Yes, no, maybe, of course.
"""
