"""What is read from config.json, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from jitney.errors import ModelError, SettingsError
from jitney_worker.model.config import ModelConfig, Multipliers, NotNative, RopeConfig, model_config
from jitney_worker.model.families import FAMILIES
from jitney_worker.model.runner import load_runner, pick_device, pick_dtype
from jitney_worker.model.tiny import make_tiny


@pytest.fixture
def raw(tiny_llama: Path) -> dict[str, Any]:
    """A valid config.json to spoil."""
    config: dict[str, Any] = json.loads((tiny_llama / "config.json").read_text())
    return config


def read(raw: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    return model_config(raw, generation or {}, where="here")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel is not native"),
        ({"model_type": "internlm3"}, "architecture LlamaForCausalLM of model_type 'internlm3' is not native"),
        ({"architectures": [], "model_type": "bert"}, "none named (model_type 'bert') is not native"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not native"),
        ({"rope_parameters": {"rope_type": "proportional"}}, "rope type 'proportional' is not native"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not native for this architecture"),
    ],
)
def test_what_the_native_decoder_does_not_know_is_left_to_transformers(
    raw: dict[str, Any], change: dict[str, Any], named: str
) -> None:
    with pytest.raises(NotNative) as caught:
        read(raw | change)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": None}, "hidden_size=None"),
        ({"vocab_size": -3}, "vocab_size=-3"),
        ({"num_key_value_heads": 3}, "4 heads do not divide among 3 KV heads"),
    ],
)
def test_what_is_not_served_is_refused_by_name_and_value(
    raw: dict[str, Any], change: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelError) as caught:
        read(raw | change)
    assert named in str(caught.value)
    assert not isinstance(caught.value, NotNative)


SILENT = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
"""What every config.json says; 32 heads besides."""


@pytest.mark.parametrize("asked", [{}, {"use_sliding_window": True, "max_window_layers": 1}], ids=["plain", "window"])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_what_a_file_does_not_say_is_what_transformers_takes_it_for(architecture: str, asked: dict[str, Any]) -> None:
    model_type = FAMILIES[architecture].model_type
    raw = {**SILENT, **asked, "architectures": [architecture], "model_type": model_type, "num_attention_heads": 32}
    found, theirs = read(raw), AutoConfig.for_model(**raw)
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert (found.num_kv_heads, found.head_dim) == (theirs.num_key_value_heads, head_dim)
    assert (found.max_model_len, found.rms_norm_eps) == (theirs.max_position_embeddings, theirs.rms_norm_eps)
    assert found.tied_embeddings == theirs.tie_word_embeddings
    assert found.rope == RopeConfig(theirs.rope_parameters["rope_theta"])
    kinds = getattr(theirs, "layer_types", ["sliding_attention"] * 4)
    window = getattr(theirs, "sliding_window", None)
    assert found.windows == tuple(window if kind == "sliding_attention" else None for kind in kinds)
    assert found.rotates == tuple(map(bool, getattr(theirs, "no_rope_layers", [1] * 4)))


def test_null_is_not_the_same_as_nothing() -> None:
    """Mistral's own files say `"sliding_window": null`; one that says nothing has the window of the first Mistral."""
    mistral = {**SILENT, "architectures": ["MistralForCausalLM"], "num_attention_heads": 32}
    silent = read(mistral)
    said = read(mistral | {"sliding_window": None, "num_key_value_heads": None})
    assert (silent.windows, silent.num_kv_heads) == ((4_096,) * 4, 8)
    assert (said.windows, said.num_kv_heads) == ((None,) * 4, 32)


@pytest.mark.parametrize(
    ("entry", "needed"),
    [
        ({"architectures": 3}, "a list is needed"),
        ({"num_key_value_heads": "2"}, "a positive integer is needed"),
        ({"num_key_value_heads": 1.5}, "a positive integer is needed"),
        ({"head_dim": -1}, "a positive integer is needed"),
        ({"max_position_embeddings": True}, "a positive integer is needed"),
        ({"rms_norm_eps": "1e-5"}, "a number is needed"),
        ({"rms_norm_eps": math.nan}, "a number is needed"),
        ({"attention_bias": "false"}, "true or false is needed"),
        ({"tie_word_embeddings": 0}, "true or false is needed"),
        ({"rope_parameters": "linear"}, "an object is needed"),
        ({"eos_token_id": "</s>"}, "a token id, or a list of them is needed"),
        ({"eos_token_id": [2, None]}, "a token id, or a list of them is needed"),
    ],
    ids=str,
)
def test_an_entry_of_another_kind_is_refused_by_name_and_value(
    raw: dict[str, Any], entry: dict[str, Any], needed: str
) -> None:
    ((name, value),) = entry.items()
    with pytest.raises(ModelError) as caught:
        read(raw | entry)
    assert str(caught.value) == f"here: config.json says {name}={value!r}; {needed}"


def test_a_list_with_too_few_layers_is_refused_and_one_with_more_is_cut(raw: dict[str, Any]) -> None:
    smollm3 = raw | {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3"}
    assert read(smollm3 | {"no_rope_layers": [0, 1, 1]}).rotates == (False, True)
    with pytest.raises(ModelError, match=r"no_rope_layers=\[1\]; a list of 2 entries, one for each layer, is needed"):
        read(smollm3 | {"no_rope_layers": [1]})


def test_end_tokens_of_another_kind_are_refused_with_the_file_they_stand_in(raw: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"here: generation_config\.json says eos_token_id='x'"):
        read(raw, {"eos_token_id": "x"})


@pytest.mark.parametrize(
    ("numbers", "complaint"),
    [
        ({"rope_type": "linear"}, r"type 'linear', cannot be used \(.*factor"),
        ({"rope_type": "linear", "factor": "2"}, r"type 'linear', cannot be used"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}, "short_factor .* must be 16 numbers"),
    ],
    ids=["missing", "text", "too few"],
)
def test_numbers_of_a_rope_that_cannot_be_used_are_refused_when_the_model_is_loaded(
    tmp_path: Path, numbers: dict[str, Any], complaint: str
) -> None:
    directory = make_tiny(tmp_path, overrides={"rope_parameters": numbers})
    with pytest.raises(ModelError, match=complaint):
        load_runner(directory, num_blocks=2)


def test_the_first_context_beside_the_ropes_numbers_counts_more_than_the_one_among_them(raw: dict[str, Any]) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    name = "original_max_position_embeddings"
    assert dict(read(raw | {"rope_parameters": yarn}).rope.scaling)[name] == 64
    assert dict(read(raw | {"rope_parameters": yarn, name: 32}).rope.scaling)[name] == 32
    del yarn[name]
    assert dict(read(raw | {"rope_parameters": yarn}).rope.scaling)[name] == raw["max_position_embeddings"]
    longrope = {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
    phi3 = raw | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "max_position_embeddings": 131_072}
    assert dict(read(phi3 | {"rope_parameters": longrope}).rope.scaling)[name] == 4_096, "what every Phi-3 began with"


def test_heads_need_not_share_out_the_hidden_size_to_have_a_stretched_rope(tmp_path: Path) -> None:
    """transformers refuses such a Llama; Mistral and Qwen3 with a `head_dim` of their own are served."""
    yarn = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    shape = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32, "rope_parameters": yarn}
    directory = make_tiny(tmp_path, family="mistral", overrides=shape)
    assert load_runner(directory, dtype="float32", device="cpu", num_blocks=2).config.source == "native"


def test_quantised_weights_are_refused_by_their_method(tmp_path: Path) -> None:
    directory = make_tiny(tmp_path, overrides={"quantization_config": {"quant_method": "awq"}})
    with pytest.raises(ModelError, match="weights quantised with 'awq' are not served"):
        load_runner(directory)


def test_dynamic_rope_is_plain_rope_because_nothing_outgrows_the_context(raw: dict[str, Any]) -> None:
    found = read(raw | {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 5e5}})
    assert found.rope == RopeConfig(5e5)


def test_longrope_remembers_the_context_it_was_trained_for(raw: dict[str, Any]) -> None:
    factors = {"short_factor": [1.0, 2.0], "long_factor": [3.0, 4.0]}
    del raw["rope_parameters"]
    found, older = (
        read(raw | {"rope_scaling": {"type": kind, **factors}, "original_max_position_embeddings": 77})
        for kind in ("longrope", "su")
    )
    assert found.rope.kind == older.rope.kind == "longrope"
    assert dict(found.rope.scaling)["original_max_position_embeddings"] == 77
    assert dict(found.rope.scaling)["long_factor"] == (3.0, 4.0)


def test_what_only_one_architecture_has_is_read_for_that_one_alone(raw: dict[str, Any]) -> None:
    odd = {"residual_multiplier": 0.5, "attention_multiplier": 0.1, "no_rope_layers": [1, 0]}
    plain, granite, smollm3 = (
        read(raw | odd | {"architectures": [name + "ForCausalLM"], "model_type": name.lower()})
        for name in ("Llama", "Granite", "SmolLM3")
    )
    assert (plain.multipliers, plain.rotates) == (Multipliers(), (True, True))
    assert granite.multipliers == Multipliers(residual=0.5, attention=0.1)
    assert {layer.scale for layer in granite.attention_layers} == {0.1}
    assert {layer.scale for layer in plain.attention_layers} == {32**-0.5}
    assert smollm3.rotates == (True, False)


def test_rope_is_read_from_new_and_old_files_alike(raw: dict[str, Any]) -> None:
    del raw["rope_parameters"]
    numbers = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    new = read(raw | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **numbers}})
    old = read(raw | {"rope_theta": 500_000, "rope_scaling": {"type": "llama3", **numbers}})
    assert new.rope == old.rope == RopeConfig(5e5, "llama3", tuple(sorted(numbers.items())))
    assert read(raw).rope == RopeConfig(10_000.0, "default", ())


def test_end_tokens_come_from_the_generation_config_first(raw: dict[str, Any]) -> None:
    assert read(raw | {"eos_token_id": 7}).eos_token_ids == (7,)
    assert read(raw | {"eos_token_id": 7}, {"eos_token_id": [3, 4]}).eos_token_ids == (3, 4)
    assert read(raw | {"eos_token_id": None}).eos_token_ids == ()


def test_a_sliding_window_counts_only_where_a_sequence_can_outgrow_it(raw: dict[str, Any]) -> None:
    mistral = raw | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "max_position_embeddings": 100}
    assert read(mistral | {"sliding_window": 24}).windows == (24, 24)
    assert read(mistral | {"sliding_window": 100}).windows == (None, None)
    alternating = {"layer_types": ["full_attention", "sliding_attention"]}
    assert read(mistral | {"sliding_window": 24, **alternating}).windows == (None, 24)
    with pytest.raises(NotNative, match="layers of type chunked_attention are not native"):
        read(mistral | {"sliding_window": 24, "layer_types": ["chunked_attention"] * 2})
    assert read(raw | {"sliding_window": 24}).windows == (None, None)
    qwen = raw | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "sliding_window": 24,
        "max_window_layers": 1,
    }
    assert read(qwen | {"use_sliding_window": True}).windows == (None, 24)
    assert read(qwen | {"use_sliding_window": False}).windows == (None, None)


def test_a_directory_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        load_runner(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        load_runner(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="does not hold a JSON object"):
        load_runner(tmp_path)


def test_auto_picks_what_the_machine_has() -> None:
    device = pick_device("auto")
    assert device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    fast_bfloat16 = any(torch.cpu.get_capabilities().get(name) for name in ("avx512_bf16", "amx_bf16"))
    assert pick_dtype("auto", torch.device("cpu")) is (torch.bfloat16 if fast_bfloat16 else torch.float32)


def test_an_unknown_dtype_or_device_is_refused_by_value() -> None:
    with pytest.raises(SettingsError, match="dtype='int3' is unknown"):
        pick_dtype("int3", torch.device("cpu"))
    with pytest.raises(SettingsError, match="device='abacus' is unknown"):
        pick_device("abacus")


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(SettingsError, match="torch sees no GPU"):
        pick_device("cuda")


def test_facts_of_a_runner_are_those_of_its_files(tmp_path: Path) -> None:
    directory = make_tiny(tmp_path, family="qwen3", overrides={"max_position_embeddings": 77, "eos_token_id": [2, 0]})
    runner = load_runner(directory, dtype="float32", device="cpu", num_blocks=3)
    assert (runner.vocab_size, runner.max_model_len, runner.eos_token_ids) == (512, 77, (2, 0))
    assert (runner.dtype, runner.device, runner.num_blocks, runner.block_size) == ("float32", "cpu", 3, 16)
