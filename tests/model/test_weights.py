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
from jitney_worker.model.adopted import AdoptedDecoder
from jitney_worker.model.choice import served_config
from jitney_worker.model.config import ModelConfig
from jitney_worker.model.runner import load_runner
from jitney_worker.model.tiny import make_tiny
from jitney_worker.model.weights import DecoderWeights, load_weights, weight_files

CPU = torch.device("cpu")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model of this test's own, to be spoilt."""
    return make_tiny(tmp_path / "model", overrides={"tie_word_embeddings": False, "attention_bias": True})


def load(directory: Path, dtype: torch.dtype = torch.float32) -> DecoderWeights:
    config = served_config(directory)
    assert isinstance(config, ModelConfig)
    return load_weights(directory, config, dtype, CPU)


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


def shards_of(directory: Path, **weight_map: Any) -> None:
    """One shard with all tensors, beside an index; weight_map: further entries."""
    file = "model-00001-of-00001.safetensors"
    (directory / "model.safetensors").rename(directory / file)
    names = dict.fromkeys(load_file(directory / file), file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names | weight_map}))


def foreign(directory: Path) -> Path:
    """The same checkpoint as one that transformers computes, and not the native decoder."""
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"hidden_act": "gelu"}))
    return directory


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/hostname", "part/model.safetensors", "..", "a\0b", 7])
@pytest.mark.parametrize("served", ["native", "transformers"])
def test_an_index_that_names_files_elsewhere_is_refused(directory: Path, name: Any, served: str) -> None:
    shards_of(directory, **{"model.norm.weight": name})
    if served == "transformers":
        foreign(directory)
    with pytest.raises(ModelError) as caught:
        load_runner(directory, dtype="float32", device="cpu", num_blocks=2)
    assert f"names {name!r}: weight files must lie beside their index" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", r"index\.json cannot be read"),
        ("[]", r"index\.json does not hold a JSON object"),
        ("{}", r"index\.json names no weight files"),
        ('{"weight_map": 3}', r"index\.json says weight_map=3; an object is needed"),
    ],
)
def test_an_index_that_is_none_is_refused(directory: Path, content: str, complaint: str) -> None:
    shards_of(directory)
    (directory / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelError, match=complaint):
        weight_files(directory)


def test_of_a_whole_file_and_shards_beside_it_the_whole_file_counts_whoever_computes(directory: Path) -> None:
    whole = load_file(directory / "model.safetensors")
    shards_of(directory)
    save_file({**whole, "model.embed_tokens.weight": whole["model.embed_tokens.weight"] + 1}, directory / "whole")
    (directory / "whole").rename(directory / "model.safetensors")
    native = load(directory).embedding
    runner = load_runner(foreign(directory), dtype="float32", device="cpu", num_blocks=2)
    assert isinstance(runner.decoder, AdoptedDecoder)
    assert torch.equal(native, whole["model.embed_tokens.weight"] + 1)
    assert torch.equal(runner.decoder.model.model.embed_tokens.weight, native)
    assert [file.name for file in weight_files(directory)] == ["model.safetensors"], "the fingerprint is of the same"


@pytest.mark.parametrize("served", ["native", "transformers"])
def test_weights_whose_scales_would_be_lost_are_refused(directory: Path, served: str) -> None:
    packed = load_file(directory / "model.safetensors")["model.layers.0.mlp.up_proj.weight"].to(torch.float8_e4m3fn)
    rewrite(directory, model__layers__0__mlp__up_proj__weight=packed)
    if served == "transformers":
        foreign(directory)
    with pytest.raises(ModelError, match=r"tensor model\.layers\.0\.mlp\.up_proj\.weight is .*quantised"):
        load_runner(directory, dtype="float32", device="cpu", num_blocks=2)


def test_integers_are_no_weights(directory: Path) -> None:
    rewrite(directory, model__norm__weight=torch.ones(128, dtype=torch.int8))
    with pytest.raises(ModelError, match=r"model\.norm\.weight is torch\.int8: quantised weights are not served"):
        load(directory)


def test_a_truncated_shard_is_named_whoever_computes(directory: Path) -> None:
    shards_of(foreign(directory))
    file = directory / "model-00001-of-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1_000])
    with pytest.raises(ModelError, match=r"model-00001-of-00001\.safetensors is damaged"):
        load_runner(directory, dtype="float32", device="cpu", num_blocks=2)
