"""The facts of a model that transformers computes, read through transformers' own configuration classes."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jitney.errors import ModelError
from jitney_worker.model.quiet import quiet

_HEADS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_NO_PART_OF_THE_MODEL = frozenset({"transformers_version", "_name_or_path", "dtype", "torch_dtype"})


@dataclass(frozen=True, slots=True)
class AdoptedConfig:
    """What the worker must know of it, and who computes it.

    architecture: transformers' class. source: `transformers` and its version. configuration: config.json, canonical.
    hidden_size: width of the hidden states that its head takes; 0 if its configuration does not say.
    """

    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    source: str
    configuration: str
    hidden_size: int = field(repr=False)  # the fingerprint is made of the rest, which says it too


def adopted_config(directory: Path, raw: Mapping[str, Any], eos_token_ids: tuple[int, ...]) -> AdoptedConfig:
    """Read a directory through transformers. Raises ModelError for what is no decoder of transformers' own."""
    import transformers

    config = _read(directory, raw)
    model_class = causal_class(config, raw, directory)
    refuse_by_declaration(model_class, config, directory)
    text = config.get_text_config(decoder=True)
    max_model_len, vocab_size = getattr(text, "max_position_embeddings", None), getattr(text, "vocab_size", None)
    if not isinstance(max_model_len, int) or max_model_len < 1:
        raise ModelError(f"{directory}: {model_class.__name__} {_why_no_length(config)}")
    if not isinstance(vocab_size, int) or vocab_size < 1:
        raise ModelError(f"{directory}: {model_class.__name__} states no size of its vocabulary (vocab_size)")
    return AdoptedConfig(
        architecture=model_class.__name__,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=eos_token_ids,
        source=f"transformers {transformers.__version__}",
        configuration=json.dumps({key: raw[key] for key in raw if key not in _NO_PART_OF_THE_MODEL}, sort_keys=True),
        hidden_size=_hidden_size(text),
    )


def _hidden_size(text: Any) -> int:
    """OPT's last layer is followed by one that makes its states narrower (or wider) again."""
    found = getattr(text, "word_embed_proj_dim", None) or getattr(text, "hidden_size", None)
    return found if isinstance(found, int) else 0


def _read(directory: Path, raw: Mapping[str, Any]) -> Any:
    try:
        return read_config(directory)
    except ModelError as error:
        if "auto_map" not in raw:
            raise
        raise ModelError(
            f"{directory}: model_type {raw.get('model_type')!r} is unknown to transformers and brings code of its own "
            f"(auto_map), which is never run"
        ) from error


def read_config(directory: Path) -> Any:
    """transformers' configuration of a directory; code that comes with a model is never run."""
    from transformers import AutoConfig

    try:
        with quiet():
            return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever a configuration class finds wrong with a file
        raise ModelError(f"{directory}: transformers cannot read its config.json: {in_one_line(error)}") from error


def causal_class(config: Any, raw: Mapping[str, Any], directory: Path) -> Any:
    """transformers' causal language model of a configuration. Raises ModelError if it is none, or not of this kind."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    named = raw.get("architectures") or ()
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or not all(str(name).endswith(_HEADS) for name in named):
        found = ", ".join(map(str, named)) or "none named"
        raise ModelError(f"{directory}: architecture {found} (model_type {config.model_type!r}) is no text generator")
    found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return found[0] if isinstance(found, tuple) else found


def refuse_by_declaration(model_class: Any, config: Any, directory: Path) -> None:
    """Raise ModelError for what a class says of itself; the rest is found out by survey and trial."""
    name = model_class.__name__
    if config.is_encoder_decoder:
        raise ModelError(f"{directory}: {name} is part of an encoder-decoder, which is not served")
    if model_class._is_stateful:
        raise ModelError(f"{directory}: {name} keeps a state besides keys and values, which is not served")


def _why_no_length(config: Any) -> str:
    """Some have no length because they have no positions: nothing that could be added to a file would help them."""
    from transformers import MODEL_MAPPING

    body = MODEL_MAPPING.get(type(config), None)
    if body is not None and not takes_position_ids(body):
        return "takes no position ids, which is not served"
    return "states no length of context: add max_position_embeddings to its config.json"


def takes_position_ids(body: Any) -> bool:
    """Whether a model without its head, or its class, can be told where its tokens stand."""
    return "position_ids" in inspect.signature(body.forward).parameters


def in_one_line(error: Exception) -> str:
    """What foreign code found wrong, its kind first: some say no more than the name of what they did not find."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
