"""Reading checkpoints: sharded or not, never pickled, and never silently incomplete."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from jitney.errors import ModelError
from jitney.logs import listening
from jitney_worker.model.config import ModelConfig
from jitney_worker.model.tiny import make_tiny
from jitney_worker.model.weights import DecoderWeights, load_weights

CPU = torch.device("cpu")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model of this test's own, to be spoilt."""
    return make_tiny(tmp_path / "model", overrides={"tie_word_embeddings": False, "attention_bias": True})


def load(directory: Path, dtype: torch.dtype = torch.float32) -> DecoderWeights:
    return load_weights(directory, ModelConfig.of_directory(directory), dtype, CPU)


def rewrite(directory: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors of the weight file; None removes one. Dots are written as double underscores."""
    tensors = load_file(directory / "model.safetensors")
    for name, value in changes.items():
        name = name.replace("__", ".")
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    save_file(tensors, directory / "model.safetensors")


def test_queries_keys_and_values_are_stacked_in_that_order(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    layer = load(directory).layers[1]
    at = "model.layers.1.self_attn."
    assert torch.equal(layer.qkv, torch.cat([tensors[f"{at}{which}_proj.weight"] for which in "qkv"]))
    assert layer.qkv_bias is not None
    assert torch.equal(layer.qkv_bias, torch.cat([tensors[f"{at}{which}_proj.bias"] for which in "qkv"]))
    mlp = "model.layers.1.mlp."
    assert torch.equal(layer.gate_up, torch.cat([tensors[f"{mlp}{which}_proj.weight"] for which in ("gate", "up")]))


def test_a_sharded_checkpoint_equals_the_single_file(directory: Path, tmp_path: Path) -> None:
    whole = load(directory)
    tensors = load_file(directory / "model.safetensors")
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, directory / file)
        weight_map |= dict.fromkeys(part, file)
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    sharded = load(directory)
    assert torch.equal(sharded.head, whole.head)
    assert all(torch.equal(a.qkv, b.qkv) for a, b in zip(sharded.layers, whole.layers, strict=True))

    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"weight files are missing: model-00002-of-00002\.safetensors"):
        load(directory)


def test_a_missing_tensor_is_named(directory: Path) -> None:
    rewrite(directory, lm_head__weight=None)
    with pytest.raises(ModelError, match=r"tensor lm_head\.weight is missing"):
        load(directory)


def test_tensors_that_nobody_uses_are_named_and_those_known_to_be_useless_are_not(directory: Path) -> None:
    heard: list[Any] = []
    rewrite(directory, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4))
    with listening(heard.append):
        load(directory)
    assert heard == []
    rewrite(directory, **{f"model__layers__9__extra{i}": torch.ones(1) for i in range(7)})
    with listening(heard.append):
        load(directory)
    (event,) = heard
    assert event["event"] == "weights_unused"
    assert event["tensors"] == ", ".join(f"model.layers.9.extra{i}" for i in range(5)) + " and 2 more"


def test_a_misshapen_tensor_is_named_with_both_shapes(directory: Path) -> None:
    rewrite(directory, model__norm__weight=torch.ones(5))
    with pytest.raises(ModelError, match=r"tensor model\.norm\.weight is \[5\], config\.json implies \[128\]"):
        load(directory)


def test_pickled_weights_are_refused_though_they_are_all_there_is(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="no safetensors weights found"):
        load(directory)
    torch.save({}, directory / "pytorch_model.bin")
    with pytest.raises(ModelError, match="only pickled weights found, and those are never loaded"):
        load(directory)


def test_a_truncated_file_is_refused(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1_000])
    with pytest.raises(ModelError, match="is damaged or not a safetensors file"):
        load(directory)


def test_tied_embeddings_share_their_memory(tiny_llama: Path) -> None:
    weights = load(tiny_llama, torch.bfloat16)
    assert weights.head is weights.embedding
    assert weights.embedding.dtype == torch.bfloat16
