"""The shape of a model, read from a Hugging Face `config.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jitney.errors import ModelError


@dataclass(frozen=True, slots=True)
class Family:
    """What an architecture of the Llama body fixes, where its `config.json` may stay silent.

    qkv_bias, o_bias: True, False, or None = `attention_bias` of the config says.
    qk_norm: queries and keys are RMS-normalised per head before the rotary embedding.
    """

    qkv_bias: bool | None
    o_bias: bool | None
    qk_norm: bool
    max_position_embeddings: int


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(qkv_bias=None, o_bias=None, qk_norm=False, max_position_embeddings=2_048),
    "MistralForCausalLM": Family(qkv_bias=False, o_bias=False, qk_norm=False, max_position_embeddings=131_072),
    "Qwen2ForCausalLM": Family(qkv_bias=True, o_bias=False, qk_norm=False, max_position_embeddings=32_768),
    "Qwen3ForCausalLM": Family(qkv_bias=None, o_bias=None, qk_norm=True, max_position_embeddings=32_768),
}
ROPE_KINDS = frozenset({"default", "linear", "yarn", "llama3"})
_COUNTS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: `kind` is transformers' rope_type; `scaling` are its further numbers, sorted by name."""

    theta: float = 10_000.0
    kind: str = "default"
    scaling: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything the decoder must know. Sizes are counts; windows[i] is layer i's sliding window in tokens."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    rms_norm_eps: float
    tied_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeConfig
    windows: tuple[int | None, ...]
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @classmethod
    def of_directory(cls, directory: Path) -> ModelConfig:
        """Read `config.json` and `generation_config.json`. Raises ModelError for what is not served."""
        raw = _read_json(directory / "config.json")
        generation = directory / "generation_config.json"
        return model_config(raw, _read_json(generation) if generation.is_file() else {}, where=str(directory))


def model_config(raw: Mapping[str, Any], generation: Mapping[str, Any], *, where: str) -> ModelConfig:
    """The `ModelConfig` of two parsed JSON files; `where` names them in errors."""
    architecture, family = _family(raw, where)
    _refuse_what_is_not_served(raw, where)
    numbers = {name: _count(raw, name, where) for name in _COUNTS}
    num_heads, hidden = numbers["num_attention_heads"], numbers["hidden_size"]
    attention_bias = bool(raw.get("attention_bias", False))
    max_model_len = int(raw.get("max_position_embeddings") or family.max_position_embeddings)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=numbers["vocab_size"],
        hidden_size=hidden,
        intermediate_size=numbers["intermediate_size"],
        num_layers=numbers["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or num_heads),
        head_dim=int(raw.get("head_dim") or (128 if family.qk_norm else hidden // num_heads)),
        max_model_len=max_model_len,
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.o_bias is None else family.o_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=family.qk_norm,
        rope=_rope(raw, where),
        windows=_windows(raw, architecture, numbers["num_hidden_layers"], max_model_len),
        eos_token_ids=_token_ids(generation.get("eos_token_id", raw.get("eos_token_id"))),
        bos_token_id=raw.get("bos_token_id"),
    )
    if config.num_heads % config.num_kv_heads:
        raise ModelError(f"{where}: {config.num_heads} heads do not divide among {config.num_kv_heads} KV heads")
    return config


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing: not a Hugging Face model directory") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return value


def _family(raw: Mapping[str, Any], where: str) -> tuple[str, Family]:
    names = raw.get("architectures") or ()
    for name in names:
        if name in FAMILIES:
            return name, FAMILIES[name]
    found = ", ".join(map(str, names)) or f"none named (model_type {raw.get('model_type')!r})"
    raise ModelError(f"{where}: architecture {found} is not served; served are {', '.join(sorted(FAMILIES))}")


def _refuse_what_is_not_served(raw: Mapping[str, Any], where: str) -> None:
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"{where}: hidden_act={activation!r} is not served; served is 'silu'")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise ModelError(f"{where}: weights quantised with {method!r} are not served; use the unquantised checkpoint")


def _count(raw: Mapping[str, Any], name: str, where: str) -> int:
    value = raw.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{where}: config.json says {name}={value!r}; a positive integer is needed")
    return value


def _token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)


def _rope(raw: Mapping[str, Any], where: str) -> RopeConfig:
    """transformers 5 writes `rope_parameters`; older files have `rope_theta` and `rope_scaling`."""
    numbers = dict(raw.get("rope_scaling") or {}) | dict(raw.get("rope_parameters") or {})
    kind = numbers.pop("rope_type", None) or numbers.pop("type", None) or "default"
    numbers.pop("type", None)
    theta = float(numbers.pop("rope_theta", None) or raw.get("rope_theta") or 10_000.0)
    rotated = numbers.pop("partial_rotary_factor", None) or raw.get("partial_rotary_factor") or 1.0
    if kind not in ROPE_KINDS:
        raise ModelError(f"{where}: rope type {kind!r} is not served; served are {', '.join(sorted(ROPE_KINDS))}")
    if rotated != 1.0:
        raise ModelError(f"{where}: partial_rotary_factor={rotated} is not served; only 1.0 is")
    return RopeConfig(theta, kind, tuple(sorted(numbers.items())))


def _windows(raw: Mapping[str, Any], architecture: str, num_layers: int, max_len: int) -> tuple[int | None, ...]:
    """Sliding windows by layer; one that no sequence can outgrow is none."""
    window = raw.get("sliding_window")
    if not window or window >= max_len or architecture == "LlamaForCausalLM":
        return (None,) * num_layers
    if architecture == "MistralForCausalLM":
        return (int(window),) * num_layers
    if not raw.get("use_sliding_window", False):
        return (None,) * num_layers
    kinds = raw.get("layer_types")
    if kinds is None:
        first = int(raw.get("max_window_layers", 28))
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)
