"""Models of transformers: what is learnt of their layers, what is refused when they are loaded, and in which words."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from jitney.errors import ModelError
from jitney.logs import listening
from jitney_worker.model import adopted, trial
from jitney_worker.model.adopted_config import AdoptedConfig
from jitney_worker.model.architectures import ARCHITECTURES, TINY
from jitney_worker.model.choice import served_config
from jitney_worker.model.fingerprint import fingerprint
from jitney_worker.model.layers import EVERYTHING, Reach
from jitney_worker.model.runner import TorchRunner, load_runner
from jitney_worker.model.survey import reach_of, rule_mask
from jitney_worker.model.tiny import make_tiny


def save(directory: Path, model_type: str, **entries: Any) -> Path:
    """A random tiny model of a family, as transformers writes it."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **{**TINY, **entries})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    return save(tmp_path / "gpt2", "gpt2", n_embd=32, n_layer=2, n_head=4, n_positions=256)


def load(directory: Path, **options: Any) -> TorchRunner:
    return load_runner(directory, **{"dtype": "float32", "device": "cpu", "num_blocks": 4, **options})


def rewrite_config(directory: Path, **entries: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def test_facts_come_from_the_families_own_names(gpt2: Path) -> None:
    """gpt2 says n_positions where others say max_position_embeddings."""
    runner = load(gpt2)
    assert (runner.vocab_size, runner.max_model_len, runner.eos_token_ids) == (128, 256, (2,))
    assert runner.config.architecture == "GPT2LMHeadModel"


@pytest.mark.parametrize("length", [16, 100, 131_072])
def test_a_reach_is_read_from_a_rule_whatever_the_length_of_the_context(length: int) -> None:
    def causal(_b: int, _h: int, query: Tensor, key: Tensor) -> Tensor:
        return key <= query

    def window(_b: int, _h: int, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key > query - 6)

    def chunks(_b: int, _h: int, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key // 6 == query // 6)

    found = [reach_of(rule, length, "here") for rule in (causal, window, chunks)]
    assert found == [EVERYTHING, Reach(window=6), Reach(chunk=6)]


@pytest.mark.parametrize(
    "rule",
    [
        lambda b, h, query, key: key <= query + 1,
        lambda b, h, query, key: query >= 0,
        lambda b, h, query, key: (key <= query) & ((key > query - 6) | (key < 2)),
        lambda b, h, query, key: (key <= query) & (key % 2 == query % 2),
    ],
    ids=["future", "both ways", "window and beginning", "every other"],
)
def test_any_other_rule_is_refused(rule: Any) -> None:
    with pytest.raises(ModelError, match="here: a mask that is neither causal nor a sliding window nor chunks"):
        reach_of(rule, 100, "here")


def test_a_model_that_takes_positions_from_the_length_of_a_cache_is_refused_if_it_is_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Llama 4 scales queries beyond `floor_scale` tokens, counted from transformers' cache, which is not there."""
    recipe = next(row.recipe for row in ARCHITECTURES if row.model_type == "llama4_text")
    directory = save(tmp_path / "llama4", "llama4_text", **{**recipe, "floor_scale": 100})
    assert load(directory).max_model_len == 256
    monkeypatch.setattr(adopted, "pretended_cache", lambda body, length: {"use_cache": False})
    with pytest.raises(ModelError, match="counts positions in its own way, which shows late in its context"):
        load(directory)


def test_a_mask_keeps_its_rule_while_it_is_cut_and_cast_and_loses_it_when_it_is_computed_with() -> None:
    def causal(_b: int, _h: int, query: Tensor, key: Tensor) -> Tensor:
        return key <= query

    mask: Any = rule_mask(mask_function=causal)
    for same in (mask[:, :, :, :1], mask.to(torch.bool), mask.expand(2, 1, 1, 1).contiguous()):
        assert same.sees is causal
    for other in (mask + 1.0, torch.ones(1, 1, 1, 1) * mask, mask.masked_fill(mask == 0, 3.0), torch.cat((mask, mask))):
        assert getattr(other, "sees", None) is None


def test_a_cache_has_one_pool_for_each_shape_of_keys_and_values(tmp_path: Path) -> None:
    """Two layers of one head width and one of another; a block's price is the sum over its layers."""
    directory = save(
        tmp_path / "gemma",
        "gemma4_text",
        num_hidden_layers=3,
        head_dim=8,
        global_head_dim=16,
        sliding_window=12,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        num_kv_shared_layers=0,
        vocab_size_per_layer_input=128,
        hidden_size_per_layer_input=8,
    )
    cache = load(directory, block_size=4).cache
    heads = cache.layers[0].num_kv_heads
    assert [(layer.key_dim, layer.value_dim) for layer in cache.layers] == [(8, 8), (8, 8), (16, 16)]
    assert {shape: tuple(pool.shape) for shape, pool in cache.pools.items()} == {
        (heads, 8): (4, 5, 4, heads, 8),
        (heads, 16): (2, 5, 4, heads, 16),
    }
    assert cache.num_bytes == 5 * 4 * sum(layer.width for layer in cache.layers) * 4


def test_a_model_whose_keys_depend_on_its_neighbours_positions_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Phi-3's long rope as transformers has it; what `pin` takes out of it lets it serve."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [8.0] * 4,
        "original_max_position_embeddings": 64,
    }
    directory = save(
        tmp_path / "phi3",
        "phi3",
        hidden_act="gelu",
        rope_parameters=rope,
        original_max_position_embeddings=64,
    )
    assert load(directory).max_model_len == 256
    monkeypatch.setattr(adopted, "pin", lambda model, max_model_len: None)
    with pytest.raises(ModelError, match="computes a token's keys from the positions of other sequences too"):
        load(directory)


def test_weights_that_are_no_numbers_do_not_pass_the_trial(gpt2: Path) -> None:
    tensors = load_file(gpt2 / "model.safetensors")
    tensors["transformer.wpe.weight"][9:] = math.nan
    save_file(tensors, gpt2 / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"does not answer in chunks .* \(relative error nan\)"):
        load(gpt2)


def test_a_window_that_only_the_mask_knows_is_found(tmp_path: Path) -> None:
    layers = load(save(tmp_path / "m", "mixtral", sliding_window=12, num_local_experts=2)).cache.layers
    assert [layer.reach for layer in layers] == [Reach(window=12)] * 2


def test_an_encoder_decoder_and_what_generates_no_text_are_refused(tmp_path: Path, gpt2: Path) -> None:
    bart = save(tmp_path / "bart", "bart", decoder_layers=1, encoder_layers=1, decoder_ffn_dim=32, encoder_ffn_dim=32)
    rewrite_config(bart, is_encoder_decoder=True)
    with pytest.raises(ModelError, match="BartForCausalLM is part of an encoder-decoder"):
        load(bart)
    rewrite_config(gpt2, architectures=["GPT2ForSequenceClassification"])
    with pytest.raises(ModelError, match=r"architecture GPT2ForSequenceClassification .* is no text generator"):
        load(gpt2)
    rewrite_config(gpt2, architectures=["T5ForConditionalGeneration"], model_type="t5")
    with pytest.raises(ModelError, match=r"T5ForConditionalGeneration \(model_type 't5'\) is no text generator"):
        load(gpt2)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ({"model_type": "bloom", "n_embed": 64}, "BloomForCausalLM takes no position ids, which is not served"),
        ({"model_type": "mpt", "max_seq_len": 2_048}, "MptForCausalLM takes no position ids, which is not served"),
        ({"model_type": "mamba"}, "MambaForCausalLM keeps a state besides keys and values"),
        ({"model_type": "whisper"}, "WhisperForCausalLM is part of an encoder-decoder"),
        ({"model_type": "gpt2", "n_positions": None}, "transformers cannot read its config.json"),
        (
            {"model_type": "chatglm", "auto_map": {"AutoConfig": "configuration_chatglm.ChatGLMConfig"}},
            r"'chatglm' is unknown to transformers and brings code of its own .*never run",
        ),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else None,
)
def test_files_as_families_write_them_are_refused_for_the_reason_that_cannot_be_mended(
    tmp_path: Path, raw: dict[str, Any], reason: str
) -> None:
    """They name no `max_position_embeddings`; to add one would only lead to the next refusal."""
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelError, match=reason):
        served_config(tmp_path)


def test_a_pass_that_never_comes_to_the_attention_interface_is_an_error_of_the_trial(
    gpt2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial that left the model with attention of its own would pass all later comparisons with nothing."""
    monkeypatch.setattr(trial, "SERVING", "eager")
    with pytest.raises(ModelError, match="GPT2LMHeadModel does not send every pass through the attention interface"):
        load(gpt2)


def test_a_model_of_an_unknown_type_is_refused_and_its_code_is_not_run(gpt2: Path, tmp_path: Path) -> None:
    rewrite_config(gpt2, model_type="brand_new", architectures=["BrandNewForCausalLM"])
    with pytest.raises(ModelError, match="transformers cannot read its config"):
        load(gpt2)
    (gpt2 / "modeling.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    rewrite_config(gpt2, auto_map={"AutoConfig": "modeling.Config", "AutoModelForCausalLM": "modeling.Model"})
    with pytest.raises(ModelError, match=r"brings code of its own .* which is never run"):
        load(gpt2)
    assert not (tmp_path / "ran").exists()


def test_missing_weights_are_an_error_and_unused_ones_a_warning(gpt2: Path) -> None:
    heard: list[dict[str, Any]] = []
    tensors = load_file(gpt2 / "model.safetensors")
    tensors["transformer.h.0.extra"] = torch.ones(3)
    save_file(tensors, gpt2 / "model.safetensors", metadata={"format": "pt"})
    with listening(lambda event: heard.append(dict(event))):
        load(gpt2)
    assert [one["tensors"] for one in heard if one["event"] == "weights_unused"] == ["transformer.h.0.extra"]
    del tensors["transformer.h.1.attn.c_attn.weight"]
    save_file(tensors, gpt2 / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"missing from the weights: transformer\.h\.1\.attn\.c_attn\.weight"):
        load(gpt2)


def test_misshapen_and_pickled_weights_are_refused(gpt2: Path) -> None:
    tensors = load_file(gpt2 / "model.safetensors")
    tensors["transformer.ln_f.weight"] = torch.ones(5)
    save_file(tensors, gpt2 / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"tensor transformer\.ln_f\.weight is \[5\], config\.json implies \[32\]"):
        load(gpt2)
    (gpt2 / "model.safetensors").rename(gpt2 / "pytorch_model.bin")
    with pytest.raises(ModelError, match="only pickled weights found"):
        load(gpt2)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"n_embd": "x"}, r"transformers cannot read its config\.json: .* expected int, got str \(value: 'x'\)"),
        ({"n_head": 3}, "weights cannot be loaded: ValueError: .* divisible by num_heads"),
        ({"activation_function": "nope"}, "weights cannot be loaded: KeyError: 'nope'"),
    ],
    ids=["kind", "shape", "name"],
)
def test_what_transformers_finds_wrong_is_said_whole_and_in_one_line(
    gpt2: Path, entries: dict[str, Any], words: str
) -> None:
    rewrite_config(gpt2, **entries)
    with pytest.raises(ModelError, match=words) as caught:
        load(gpt2)
    assert "\n" not in str(caught.value)


def test_shards_equal_the_single_file(tmp_path: Path) -> None:
    whole = load(save(tmp_path / "whole", "gemma2", head_dim=8))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32)
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    shards = load(tmp_path / "shards")
    hidden = torch.randn(3, 32)
    assert torch.equal(shards.decoder.logits(hidden), whole.decoder.logits(hidden))


def test_the_version_of_transformers_is_in_the_fingerprint_of_what_it_computes(
    gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = make_tiny(tmp_path / "native")
    before = [fingerprint(directory, "float32", "t") for directory in (gpt2, native)]
    monkeypatch.setattr("transformers.__version__", "5.99.0")
    after = [fingerprint(directory, "float32", "t") for directory in (gpt2, native)]
    assert [one != other for one, other in zip(before, after, strict=True)] == [True, False]


def test_the_fingerprint_follows_the_configuration_but_not_who_wrote_it(gpt2: Path) -> None:
    before = fingerprint(gpt2, "float32", "t")
    rewrite_config(gpt2, transformers_version="4.0.0", torch_dtype="bfloat16")
    assert fingerprint(gpt2, "float32", "t") == before
    rewrite_config(gpt2, layer_norm_epsilon=1e-3)
    assert fingerprint(gpt2, "float32", "t") != before


def test_a_native_model_is_loaded_without_transformers(tiny_llama: Path, gpt2: Path) -> None:
    program = (
        "import sys\nfrom pathlib import Path\nfrom jitney_worker.model.runner import load_runner\n"
        "load_runner(sys.argv[1], dtype='float32', device='cpu', num_blocks=2)\n"
        "print('transformers' in sys.modules)"
    )
    for directory, imported in ((tiny_llama, "False\n"), (gpt2, "True\n")):
        command = [sys.executable, "-c", program, str(directory)]
        finished = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
        assert (finished.stdout, finished.stderr) == (imported, "")


def test_the_facts_of_a_foreign_model_need_no_weights(gpt2: Path) -> None:
    (gpt2 / "model.safetensors").unlink()
    found = served_config(gpt2)
    assert isinstance(found, AdoptedConfig)
    assert (found.source, found.max_model_len) == (f"transformers {transformers.__version__}", 256)
