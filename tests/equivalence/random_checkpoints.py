"""Tiny random checkpoints of any family that transformers knows, by the recipes of the architecture table."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from jitney_worker.model.architectures import TINY, Architecture

GAIN = 2.0
EMBEDDING_SPREAD = 0.03
"""Layers must outweigh the embedding they start from, or a tied model repeats its last token."""

LOGIT_SPREAD = 2.5


def make_checkpoint(row: Architecture, directory: Path) -> Path:
    """Write a random model of a family; the same row gives the same weights."""
    torch.manual_seed(1)
    config = AutoConfig.for_model(row.model_type, **{**TINY, **row.recipe})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomise(model)
    model.save_pretrained(directory)
    return directory


def randomise(model: Any) -> None:
    """Matrices that keep about unit variance, vectors near what they were; no zeros, which would hide mistakes."""
    generator = torch.Generator().manual_seed(7)
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() < 2:
            fresh = 0.1 * noise + (parameter if parameter.abs().max() <= 2 else 0)
        elif parameter is head.weight and parameter is not embedding.weight:
            fresh = noise * (LOGIT_SPREAD / math.sqrt(parameter.shape[-1]))
        elif parameter is embedding.weight:
            fresh = noise * EMBEDDING_SPREAD
        else:
            fresh = noise * (GAIN / math.sqrt(parameter.shape[-1]))
        with torch.no_grad():
            parameter.copy_(fresh)
