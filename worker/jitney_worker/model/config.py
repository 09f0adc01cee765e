"""The shape of a model of the Llama body, read from a Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jitney.errors import ModelError
from jitney_worker.model.config_files import Entries, end_token_ids
from jitney_worker.model.families import FAMILIES, ROPE_KINDS, Family
from jitney_worker.model.layers import AttentionLayer, Reach

_COUNTS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_STRETCHED = frozenset({"yarn", "llama3", "longrope"})
"""Kinds of rope that know for which context a model was trained first."""


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


def model_config(raw: Mapping[str, Any], generation: Mapping[str, Any], *, where: str) -> ModelConfig:
    """The `ModelConfig` of two parsed JSON files; `where` names them in errors.

    Where an entry is absent, transformers' own default for that architecture counts. Raises NotNative, or ModelError
    for what is wrong.
    """
    entries = Entries(raw, where)
    architecture, family = _family(entries)
    activation = raw.get("hidden_act") or "silu"
    if activation != "silu":
        raise NotNative(f"{where}: hidden_act={activation!r} is not native; 'silu' is")
    vocab_size, hidden, inner, num_layers, num_heads = map(entries.count, _COUNTS)
    attention_bias = entries.flag("attention_bias", False)
    max_model_len = entries.count("max_position_embeddings", family.max_position_embeddings)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(entries, family, num_heads),
        head_dim=entries.count("head_dim", family.head_dim or hidden // num_heads),
        max_model_len=max_model_len,
        rms_norm_eps=entries.number("rms_norm_eps", family.rms_norm_eps),
        tied_embeddings=entries.flag("tie_word_embeddings", family.tied_embeddings),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.o_bias is None else family.o_bias,
        mlp_bias=family.may_bias_mlp and entries.flag("mlp_bias", False),
        qk_norm=family.qk_norm,
        fused=family.fused,
        rope=_rope(entries, family, max_model_len),
        rotates=_rotates(entries, family, num_layers),
        windows=_windows(entries, family, num_layers, max_model_len),
        multipliers=_multipliers(entries) if family.scaled else Multipliers(),
        eos_token_ids=end_token_ids(raw, generation, where=where),
        bos_token_id=raw.get("bos_token_id"),
    )
    if config.num_heads % config.num_kv_heads:
        raise ModelError(f"{where}: {config.num_heads} heads do not divide among {config.num_kv_heads} KV heads")
    return config


def _family(entries: Entries) -> tuple[str, Family]:
    """By the architecture, if the model_type agrees: some families are saved under another one's class."""
    names, model_type = entries.row("architectures") or (), entries.raw.get("model_type")
    for name in names:
        if name not in FAMILIES:
            continue
        if model_type in (None, FAMILIES[name].model_type):
            return name, FAMILIES[name]
        raise NotNative(f"{entries.where}: architecture {name} of model_type {model_type!r} is not native")
    found = ", ".join(map(str, names)) or f"none named (model_type {model_type!r})"
    raise NotNative(f"{entries.where}: architecture {found} is not native")


def _num_kv_heads(entries: Entries, family: Family, num_heads: int) -> int:
    """Null means one for each query head; if nothing is said, it is what the family has."""
    unsaid = num_heads if "num_key_value_heads" in entries.raw else family.num_kv_heads or num_heads
    return entries.count("num_key_value_heads", unsaid)


def _rope(entries: Entries, family: Family, max_model_len: int) -> RopeConfig:
    """transformers 5 writes `rope_parameters`; older files have `rope_theta` and `rope_scaling`."""
    numbers = dict(entries.part("rope_scaling") or entries.part("rope_parameters"))
    older = numbers.pop("type", None)
    kind = numbers.pop("rope_type", None) or older or "default"
    for name in ("rope_theta", "partial_rotary_factor"):
        if numbers.get(name) is None:
            numbers[name] = entries.raw.get(name)
    says = Entries(numbers, entries.where)
    theta, share = says.number("rope_theta", family.rope_theta), says.number("partial_rotary_factor", 1.0)
    del numbers["rope_theta"], numbers["partial_rotary_factor"]
    if share != 1.0 and not family.may_rotate_a_part:
        raise NotNative(f"{entries.where}: partial_rotary_factor={share} is not native for this architecture")
    if "long_factor" in numbers:  # older files say `su` or `yarn`
        kind = "longrope"
    if kind == "dynamic":
        # Frequencies change beyond max_position_embeddings, and no sequence goes there.
        return RopeConfig(theta, share=share)
    if kind not in ROPE_KINDS:
        raise NotNative(
            f"{entries.where}: rope type {kind!r} is not native; native are {', '.join(sorted(ROPE_KINDS))}"
        )
    if kind in _STRETCHED:
        _set_trained_on(numbers, entries, family.trained_on or max_model_len)
    frozen = {name: tuple(one) if isinstance(one, list) else one for name, one in numbers.items()}
    return RopeConfig(theta, kind, tuple(sorted(frozen.items())), share)


def _set_trained_on(numbers: dict[str, Any], entries: Entries, default: int) -> None:
    """The context before the stretch. Beside the rope's numbers it counts more than among them, as in transformers."""
    name = "original_max_position_embeddings"
    numbers[name] = entries.count(name, numbers.get(name) or default)


def _rotates(entries: Entries, family: Family, num_layers: int) -> tuple[bool, ...]:
    if not family.skips_rope:
        return (True,) * num_layers
    every = entries.count("no_rope_layer_interval", 4)
    listed = entries.row("no_rope_layers", num_layers) or [(i + 1) % every != 0 for i in range(num_layers)]
    return tuple(bool(rotates) for rotates in listed)


def _windows(entries: Entries, family: Family, num_layers: int, max_len: int) -> tuple[int | None, ...]:
    """Sliding windows by layer; one that no sequence can outgrow is none."""
    nowhere = (None,) * num_layers
    says_null = "sliding_window" in entries.raw and entries.raw["sliding_window"] is None
    if family.window == "never" or says_null or (family.sliding_window is None and "sliding_window" not in entries.raw):
        return nowhere
    if family.window == "where_asked" and not entries.flag("use_sliding_window", False):
        return nowhere
    window = entries.count("sliding_window", family.sliding_window)
    if window >= max_len:
        return nowhere
    kinds = _kinds(entries, family, num_layers)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _kinds(entries: Entries, family: Family, num_layers: int) -> list[Any]:
    """Of each layer: does it slide?"""
    everywhere = ["sliding_attention"] * num_layers
    if family.window == "always":
        return everywhere
    kinds = entries.row("layer_types", num_layers)
    if kinds is None and family.window == "where_listed":
        return everywhere
    if kinds is None and family.skips_rope:
        raise NotNative(f"{entries.where}: a sliding window without layer_types is not native for this architecture")
    if kinds is None:
        first = entries.number("max_window_layers", 28)
        return ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    unknown = sorted({str(kind) for kind in kinds} - {"sliding_attention", "full_attention"})
    if unknown:
        raise NotNative(f"{entries.where}: layers of type {', '.join(unknown)} are not native")
    return kinds


def _multipliers(entries: Entries) -> Multipliers:
    return Multipliers(
        embedding=entries.number("embedding_multiplier", 1.0),
        residual=entries.number("residual_multiplier", 1.0),
        attention=entries.number("attention_multiplier", 1.0),
        logits=entries.number("logits_scaling", 1.0),
    )
