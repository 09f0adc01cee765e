"""The table of families: as text for a terminal, as Markdown for documents. Importing this costs nothing: no torch."""

from __future__ import annotations

from collections.abc import Iterable

from jitney_worker.model.architectures import ARCHITECTURES, NATIVE, REFUSED, TRANSFORMERS, Architecture

_TRAITS = {
    "num_experts": "experts",
    "moe_num_experts": "experts",
    "n_routed_experts": "experts",
    "kv_lora_rank": "latent keys and values",
    "sliding_window": "sliding window",
    "local_attention": "sliding window",
    "attention_chunk_size": "chunked attention",
    "v_head_dim": "values of another width",
    "partial_rotary_factor": "partial rotary",
    "rotary_dim": "partial rotary",
    "rotary_pct": "partial rotary",
    "rope_parameters": "scaled rotary",
    "embedding_multiplier": "multipliers",
    "no_rope_layers": "layers without rotary",
}
"""Entry of a recipe → what the checkpoint that is made of it has."""

_ALWAYS = {"gemma2": "soft-capped scores", "gpt_oss": "attention sinks", "vaultgemma": "soft-capped scores"}
"""What no recipe needs to ask for."""


def table() -> str:
    """One line per family: its model_type, and who serves it, or why nobody does."""
    width = max(len(row.model_type) for row in ARCHITECTURES)
    lines = [f"{'family':<{width}}  served by     tested"]
    for row in _in_order():
        served = f"not served: {row.says}" if row.served == REFUSED else f"{row.served:<12}  yes"
        lines.append(f"{row.model_type:<{width}}  {served}")
    return "\n".join(lines)


def markdown() -> str:
    """A row per family: who serves it, and what its tiny checkpoint has beyond plain attention; or why nobody does."""
    lines = ["| `model_type` | served by | tested with, or why not |", "|---|---|---|"]
    for row in _in_order():
        if row.served == REFUSED:
            lines.append(f"| `{row.model_type}` | nobody | {row.says} |")
        else:
            lines.append(f"| `{row.model_type}` | {row.served} | {_traits(row)} |")
    return "\n".join(lines)


def summary() -> str:
    """A Markdown table of three rows: native, through transformers, refused."""
    rows = {NATIVE: "native decoder", TRANSFORMERS: "through transformers", REFUSED: "refused by name"}
    lines = ["| | families (`model_type`) |", "|---|---|"]
    for served, title in rows.items():
        names = _named(row for row in _in_order() if row.served == served)
        lines.append(f"| {title} | {names} |")
    return "\n".join(lines)


def _in_order() -> list[Architecture]:
    return sorted(ARCHITECTURES, key=lambda row: (row.served == REFUSED, row.model_type))


def _named(rows: Iterable[Architecture]) -> str:
    return ", ".join(row.model_type for row in rows)


def _traits(row: Architecture) -> str:
    traits = [trait for key, trait in _TRAITS.items() if key in row.recipe]
    return ", ".join(dict.fromkeys([*traits, *filter(None, [_ALWAYS.get(row.model_type)])]))
