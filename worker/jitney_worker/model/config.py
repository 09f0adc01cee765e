"""The shape of a model of the Llama body, read from a Hugging Face `config.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jitney.errors import ModelError
from jitney_worker.model.families import FAMILIES, ROPE_KINDS, Family
from jitney_worker.model.layers import AttentionLayer, Reach

_COUNTS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


class NotNative(ModelError):
    """The native decoder does not compute this; transformers may."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: `kind` is transformers' rope_type; `scaling` are its further numbers, sorted by name.

    share: the part of each head that rotates, from its first dimension on.
    """

    theta: float = 10_000.0
    kind: str = "default"
    scaling: tuple[tuple[str, Any], ...] = ()
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Multipliers:
    """Granite's constants: of embeddings, of what each block adds, of attention scores (None: 1/sqrt(head_dim)), and
    the divisor of logits."""

    embedding: float = 1.0
    residual: float = 1.0
    attention: float | None = None
    logits: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything the native decoder must know.

    Sizes are counts; windows[i] is layer i's sliding window in tokens; rotates[i] is False where it has no rope.
    """

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
    fused: bool
    rope: RopeConfig
    rotates: tuple[bool, ...]
    windows: tuple[int | None, ...]
    multipliers: Multipliers = Multipliers()
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @property
    def source(self) -> str:
        """Who computes it."""
        return "native"

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        """What each layer keeps and how it attends."""
        dim, scale = self.head_dim, self.multipliers.attention
        return tuple(
            AttentionLayer(
                self.num_heads, self.num_kv_heads, dim, dim, dim**-0.5 if scale is None else scale, Reach(window)
            )
            for window in self.windows
        )

    @classmethod
    def of_directory(cls, directory: Path) -> ModelConfig:
        """Read `config.json` and `generation_config.json`. Raises NotNative, or ModelError for what is wrong."""
        return model_config(*read_configs(directory), where=str(directory))


def read_configs(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """`config.json`, and `generation_config.json` or nothing. Raises ModelError."""
    raw = _read_json(directory / "config.json")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise ModelError(
            f"{directory}: weights quantised with {method!r} are not served; use the unquantised checkpoint"
        )
    generation = directory / "generation_config.json"
    return raw, _read_json(generation) if generation.is_file() else {}


def end_token_ids(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """Tokens that end an answer; what `generation_config.json` says goes first."""
    value = generation.get("eos_token_id", raw.get("eos_token_id"))
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)


def model_config(raw: Mapping[str, Any], generation: Mapping[str, Any], *, where: str) -> ModelConfig:
    """The `ModelConfig` of two parsed JSON files; `where` names them in errors."""
    architecture, family = _family(raw, where)
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise NotNative(f"{where}: hidden_act={activation!r} is not native; 'silu' is")
    numbers = {name: _count(raw, name, where) for name in _COUNTS}
    num_heads, hidden, num_layers = (numbers[_COUNTS[i]] for i in (4, 1, 3))
    attention_bias = bool(raw.get("attention_bias", False))
    max_model_len = int(raw.get("max_position_embeddings") or family.max_position_embeddings)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=numbers["vocab_size"],
        hidden_size=hidden,
        intermediate_size=numbers["intermediate_size"],
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or num_heads),
        head_dim=int(raw.get("head_dim") or family.head_dim or hidden // num_heads),
        max_model_len=max_model_len,
        rms_norm_eps=float(raw.get("rms_norm_eps", family.rms_norm_eps)),
        tied_embeddings=bool(raw.get("tie_word_embeddings", family.tied_embeddings)),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.o_bias is None else family.o_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=family.qk_norm,
        fused=family.fused,
        rope=_rope(raw, family, where),
        rotates=_rotates(raw, family, num_layers),
        windows=_windows(raw, family, num_layers, max_model_len, where),
        multipliers=_multipliers(raw) if family.scaled else Multipliers(),
        eos_token_ids=end_token_ids(raw, generation),
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
    """By the architecture, if the model_type agrees: some families are saved under another one's class."""
    names, model_type = raw.get("architectures") or (), raw.get("model_type")
    for name in names:
        if name not in FAMILIES:
            continue
        if model_type in (None, FAMILIES[name].model_type):
            return name, FAMILIES[name]
        raise NotNative(f"{where}: architecture {name} of model_type {model_type!r} is not native")
    found = ", ".join(map(str, names)) or f"none named (model_type {model_type!r})"
    raise NotNative(f"{where}: architecture {found} is not native")


def _count(raw: Mapping[str, Any], name: str, where: str) -> int:
    value = raw.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{where}: config.json says {name}={value!r}; a positive integer is needed")
    return value


def _rope(raw: Mapping[str, Any], family: Family, where: str) -> RopeConfig:
    """transformers 5 writes `rope_parameters`; older files have `rope_theta` and `rope_scaling`."""
    numbers = dict(raw.get("rope_scaling") or {}) | dict(raw.get("rope_parameters") or {})
    kind = numbers.pop("rope_type", None) or numbers.pop("type", None) or "default"
    numbers.pop("type", None)
    theta = float(numbers.pop("rope_theta", None) or raw.get("rope_theta") or family.rope_theta)
    share = float(numbers.pop("partial_rotary_factor", None) or raw.get("partial_rotary_factor") or 1.0)
    if "long_factor" in numbers:  # older files say `su` or `yarn`
        kind = "longrope"
    if kind == "dynamic":
        # Frequencies change beyond max_position_embeddings, and no sequence goes there.
        return RopeConfig(theta, share=share)
    if kind not in ROPE_KINDS:
        raise NotNative(f"{where}: rope type {kind!r} is not native; native are {', '.join(sorted(ROPE_KINDS))}")
    if kind == "longrope":
        trained_on = raw.get("original_max_position_embeddings", raw.get("max_position_embeddings"))
        numbers.setdefault("original_max_position_embeddings", trained_on)
        numbers = {name: tuple(one) if isinstance(one, list) else one for name, one in numbers.items()}
    return RopeConfig(theta, kind, tuple(sorted(numbers.items())), share)


def _rotates(raw: Mapping[str, Any], family: Family, num_layers: int) -> tuple[bool, ...]:
    if not family.skips_rope:
        return (True,) * num_layers
    every = int(raw.get("no_rope_layer_interval") or 4)
    listed = raw.get("no_rope_layers") or [(i + 1) % every != 0 for i in range(num_layers)]
    return tuple(bool(rotates) for rotates in listed)


def _windows(
    raw: Mapping[str, Any], family: Family, num_layers: int, max_len: int, where: str
) -> tuple[int | None, ...]:
    """Sliding windows by layer; one that no sequence can outgrow is none."""
    window = raw.get("sliding_window")
    if not window or window >= max_len or family.window == "never":
        return (None,) * num_layers
    if family.window == "always":
        return (int(window),) * num_layers
    if not raw.get("use_sliding_window", False):
        return (None,) * num_layers
    kinds = raw.get("layer_types")
    if kinds is None and family.skips_rope:
        raise NotNative(f"{where}: a sliding window without layer_types is not native for this architecture")
    if kinds is None:
        first = int(raw.get("max_window_layers", 28))
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)


def _multipliers(raw: Mapping[str, Any]) -> Multipliers:
    return Multipliers(
        embedding=float(raw.get("embedding_multiplier", 1.0)),
        residual=float(raw.get("residual_multiplier", 1.0)),
        attention=float(raw.get("attention_multiplier", 1.0)),
        logits=float(raw.get("logits_scaling", 1.0)),
    )
