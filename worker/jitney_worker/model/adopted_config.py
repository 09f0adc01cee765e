"""The facts of a model that transformers computes, read through transformers' own configuration classes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jitney.errors import ModelError, first_line

_HEADS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_NO_PART_OF_THE_MODEL = frozenset({"transformers_version", "_name_or_path", "dtype", "torch_dtype"})


@dataclass(frozen=True, slots=True)
class AdoptedConfig:
    """What the worker must know of it, and who computes it.

    architecture: transformers' class. source: `transformers` and its version. configuration: config.json, canonical.
    """

    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    source: str
    configuration: str


def adopted_config(directory: Path, raw: Mapping[str, Any], eos_token_ids: tuple[int, ...]) -> AdoptedConfig:
    """Read a directory through transformers. Raises ModelError for what is no decoder of transformers' own."""
    import transformers

    config = read_config(directory)
    architecture = causal_class(config, raw, directory).__name__
    text = config.get_text_config(decoder=True)
    max_model_len = getattr(text, "max_position_embeddings", None)
    if not isinstance(max_model_len, int) or max_model_len < 1:
        raise ModelError(f"{directory}: {architecture} states no length of context (max_position_embeddings)")
    return AdoptedConfig(
        architecture=architecture,
        vocab_size=int(text.vocab_size),
        max_model_len=max_model_len,
        eos_token_ids=eos_token_ids,
        source=f"transformers {transformers.__version__}",
        configuration=json.dumps({key: raw[key] for key in raw if key not in _NO_PART_OF_THE_MODEL}, sort_keys=True),
    )


def read_config(directory: Path) -> Any:
    """transformers' configuration of a directory; code that comes with a model is never run."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever a configuration class finds wrong with a file
        raise ModelError(f"{directory}: transformers cannot read its config.json: {first_line(error)}") from error


def causal_class(config: Any, raw: Mapping[str, Any], directory: Path) -> Any:
    """transformers' causal language model of a configuration. Raises ModelError if it is none, or not of this kind."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    named = raw.get("architectures") or ()
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or not all(str(name).endswith(_HEADS) for name in named):
        found = ", ".join(map(str, named)) or "none named"
        raise ModelError(f"{directory}: architecture {found} (model_type {config.model_type!r}) is no text generator")
    found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return found[0] if isinstance(found, tuple) else found
