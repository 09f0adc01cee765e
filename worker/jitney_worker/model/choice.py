"""Who computes a model: the native decoder where it knows the architecture, transformers otherwise."""

from __future__ import annotations

from pathlib import Path

from jitney_worker.model.adopted_config import AdoptedConfig, adopted_config
from jitney_worker.model.config import ModelConfig, NotNative, model_config
from jitney_worker.model.config_files import end_token_ids, read_configs


def served_config(directory: Path) -> ModelConfig | AdoptedConfig:
    """The facts of a model; their type says who computes it. Raises ModelError for what nobody here can.

    transformers is imported only if it is needed.
    """
    raw, generation = read_configs(directory)
    try:
        return model_config(raw, generation, where=str(directory))
    except NotNative:
        return adopted_config(directory, raw, end_token_ids(raw, generation, where=str(directory)))
