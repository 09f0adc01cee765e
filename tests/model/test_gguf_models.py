"""Models written as GGUF and converted back: the same weights, the same tokens, the same greedy answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf_files as files
import numpy as np
import pytest
import torch
from gguf_files import Kind
from safetensors.torch import load_file
from tests.equivalence.engine_driver import Ask, engine_for, prompt, tokens
from tests.text import small_tokenizers as small
from tokenizers import Tokenizer as Original
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from jitney.errors import ModelError
from jitney_worker.model.choice import served_config
from jitney_worker.model.cli import model as command
from jitney_worker.model.gguf_import import convert
from jitney_worker.model.registry import MANIFEST
from jitney_worker.model.resolve import resolve
from jitney_worker.model.runner import load_runner
from jitney_worker.text.spelling import Speller
from jitney_worker.text.tokenizer import Tokenizer

SIZES = {
    "vocab_size": 448,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8_192,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}


@dataclass(frozen=True)
class Row:
    """A model, and what its file says besides the usual. architecture: the file's name for the model."""

    model_type: str
    architecture: str
    config: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Any] = field(default_factory=dict)


ROWS = {
    "llama": Row("llama", "llama", {}, {"rope.dimension_count": 16}),
    "llama, tied": Row("llama", "llama", {"tie_word_embeddings": True}),
    "llama, biases": Row("llama", "llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, wide heads": Row(
        "llama", "llama", {"head_dim": 32}, {"attention.key_length": 32, "attention.value_length": 32}
    ),
    "llama 3": Row(
        "llama",
        "llama",
        {"rope_parameters": LLAMA3},
        {},
        {"rope_freqs.weight": files.llama3_factors(16, 500_000.0, 32.0)},
    ),
    "llama, linear": Row(
        "llama", "llama", {"rope_parameters": LINEAR}, {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    ),
    "mistral": Row("mistral", "llama", {"sliding_window": None, "head_dim": 16}),
    "qwen2": Row("qwen2", "qwen2"),
    "qwen2, yarn": Row(
        "qwen2",
        "qwen2",
        {"rope_parameters": YARN, "tie_word_embeddings": True},
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64},
    ),
    "qwen3": Row("qwen3", "qwen3", {"head_dim": 32}),
    "smollm3": Row("smollm3", "smollm3", {"num_hidden_layers": 5, "tie_word_embeddings": True, "pad_token_id": 0}),
    "granite": Row(
        "granite",
        "granite",
        {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
            "logits_scaling": 4.0,
        },
        {"embedding_scale": 12.0, "residual_scale": 0.22, "attention.scale": 0.1, "logit_scale": 4.0},
    ),
}
KINDS = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16, Kind.Q8_0: torch.bfloat16}
MAX_TOKENS = 16


@pytest.fixture(scope="module")
def tokenizer_directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`tokenizer_directory("byte_bpe")`: the text room's small tokenizers."""
    root = tmp_path_factory.mktemp("tokenizers")

    def made(name: str) -> Path:
        directory = root / name
        return directory if directory.exists() else getattr(small, name)(directory)  # type: ignore[no-any-return]

    return made


@pytest.fixture(scope="module")
def byte_tokens(tokenizer_directory: Callable[[str], Path]) -> dict[str, Any]:
    original = Original.from_file(str(tokenizer_directory("byte_bpe") / "tokenizer.json"))
    return files.byte_level_tokens(original, "gpt-2", bos_token_id=0, eos_token_id=2)


def model_of(row: Row) -> Any:
    config = AutoConfig.for_model(row.model_type, **{**SIZES, **row.config})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    files.randomise(model)
    return model


def converted(folder: Path, row: Row, kind: Kind, tokens: Mapping[str, Any], model: Any = None) -> Path:
    file = folder / "model.gguf"
    files.write(
        file, model or model_of(row), row.architecture, kind, tokens=tokens, fields=row.fields, tensors=row.tensors
    )
    directory = folder / "converted"
    directory.mkdir()
    convert(file, directory)
    return directory


def generated(model: Any, prompt_ids: tuple[int, ...]) -> list[int]:
    ids = torch.tensor([prompt_ids])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    return output[0, len(prompt_ids) :].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ROWS)
def test_a_converted_model_has_the_originals_weights_and_says_what_it_says(
    tmp_path: Path, byte_tokens: dict[str, Any], name: str
) -> None:
    row = ROWS[name]
    model = model_of(row)
    directory = converted(tmp_path, row, Kind.F32, byte_tokens, model)
    ours, theirs = load_file(directory / "model.safetensors"), model.state_dict()
    assert ours.keys() == theirs.keys() - ({"lm_head.weight"} if row.config.get("tie_word_embeddings") else set())
    for tensor, values in ours.items():
        assert torch.equal(values, theirs[tensor]), tensor

    assert AutoConfig.from_pretrained(directory).rope_parameters == model.config.rope_parameters
    runner = load_runner(directory, dtype="float32", device="cpu", num_blocks=20)
    assert runner.config.source == "native"
    answers = set()
    for seed, length in ((1, 5), (2, 40)):
        ids = prompt(length, seed=seed, vocab_size=448)
        (answer,) = tokens(engine_for(runner), [Ask(ids, MAX_TOKENS)])
        assert answer == generated(model, ids)
        answers |= set(answer)
    assert len(answers) > 5, "a model that repeats itself shows nothing"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_file_keeps_its_precision_and_a_quantised_one_becomes_bfloat16(
    tmp_path: Path, byte_tokens: dict[str, Any], name: str, kind: Kind
) -> None:
    """All weights here can be said in all of these kinds, so that nothing may be lost."""
    model = model_of(ROWS[name])
    directory = converted(tmp_path, ROWS[name], kind, byte_tokens, model)
    for tensor, values in load_file(directory / "model.safetensors").items():
        assert values.dtype == KINDS[kind]
        assert torch.equal(values.float(), model.state_dict()[tensor]), tensor
    ids = prompt(20, seed=1, vocab_size=448)
    runner = load_runner(directory, dtype="float32", device="cpu", num_blocks=20)
    assert tokens(engine_for(runner), [Ask(ids, MAX_TOKENS)]) == [generated(model, ids)]


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_transformers_reads_the_same_weights_from_the_same_file(
    tmp_path: Path, byte_tokens: dict[str, Any], name: str
) -> None:
    """A second witness for names and for the order of rows: the test's own writer could be wrong as the reader is."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    tokens_with_name = {**byte_tokens, "tokenizer.ggml.padding_token_id": 2}
    directory = converted(tmp_path, ROWS[name], Kind.Q8_0, tokens_with_name)
    theirs = load_gguf_checkpoint(
        str(tmp_path / "model.gguf"), return_tensors=True, model_to_load=model_of(ROWS[name])
    )["tensors"]
    ours = load_file(directory / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for tensor, values in ours.items():
        assert torch.equal(values.float(), torch.as_tensor(theirs[tensor]).float()), tensor


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fields": {"expert_count": 4}}, "a mixture of 4 experts"),
        ({"fields": {"rope.dimension_count": 8}}, "8 of 16 dimensions"),
        ({"fields": {"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}}, "rope scaling 'longrope'"),
        ({"fields": {"rope.scaling.attn_factor": 0.5}}, r"rope\.scaling\.attn_factor=0\.5 is not understood"),
        ({"fields": {"rope.scale_linear": 4.0}}, r"rope\.scale_linear=4\.0 is not understood"),
        ({"fields": {"attention.sliding_window": 64}}, r"attention\.sliding_window=64 is not understood"),
        ({"fields": {"attention.causal": False}}, r"attention\.causal=False is not understood"),
        ({"fields": {"logit_scale": 0.5}}, r"logit_scale=0\.5 is not understood"),
        ({"fields": {"attention.head_count_kv": 4}}, r"k_proj\.weight is .* config\.json implies"),
        ({"fields": {"context_length": None}}, "no field 'context_length'"),
        ({"tensors": {"rope_freqs.weight": np.full(8, 3.0, np.float32)}}, "not Llama 3's"),
        ({"tensors": {"blk.0.ssm_a": np.ones(8, np.float32)}}, r"blk\.0\.ssm_a .* has no place"),
        ({"tokens": {"pre": "deepseek-coder"}}, "pre-tokeniser 'deepseek-coder'"),
        ({"tokens": {"model": "rwkv"}}, "tokenizer 'rwkv'"),
        ({"tokens": {"merges": None}}, "no field 'tokenizer.ggml.merges'"),
    ],
)
def test_what_cannot_be_converted_exactly_is_refused_by_name(
    tmp_path: Path, byte_tokens: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    row = Row("llama", "llama", {}, changes.get("fields", {}), changes.get("tensors", {}))
    with pytest.raises(ModelError, match=words):
        converted(tmp_path, row, Kind.F32, {**byte_tokens, **changes.get("tokens", {})})


def test_fields_that_change_nothing_are_no_reason_to_refuse(tmp_path: Path, byte_tokens: dict[str, Any]) -> None:
    usual = {"attention.causal": True, "rope.scaling.attn_factor": 1.0, "rope.scaling.finetuned": False}
    row = Row("llama", "llama", {}, usual)
    assert (converted(tmp_path, row, Kind.F32, byte_tokens) / "config.json").is_file()


# Tokenizers

TEXTS = (
    "the sea shore",
    "  two  spaces\n\n and 12345 <think>x</think>",
    "<|im_start|>user\nOù est la gare ?<|im_end|>",
    "n't 3.14 😀 Привет",
)


def tokenizer_from(folder: Path, tokens: Mapping[str, Any], vocab_size: int = 448) -> Path:
    row = Row("llama", "llama", {"vocab_size": vocab_size})
    return converted(folder, row, Kind.F32, tokens)


def test_a_byte_level_tokenizer_comes_back_with_its_added_tokens(
    tmp_path: Path, tokenizer_directory: Callable[[str], Path], byte_tokens: dict[str, Any]
) -> None:
    original = Tokenizer.load(tokenizer_directory("byte_bpe"))
    tokenizer = Tokenizer.load(tokenizer_from(tmp_path, byte_tokens))
    for text in TEXTS:
        ids = original.encode_prompt(text)
        assert tokenizer.encode_prompt(text) == ids
        speller = Speller(tokenizer)
        assert speller.replay(ids) + speller.flush() == original.decode(ids)
    assert tokenizer.eos_token_ids == {2}
    assert not tokenizer.has_chat_template


def test_a_sentencepiece_tokenizer_comes_back_with_merges_from_its_scores(
    tmp_path: Path, tokenizer_directory: Callable[[str], Path]
) -> None:
    directory = tokenizer_directory("spm_bpe")
    original = Original.from_file(str(directory / "tokenizer.json"))
    num_tokens = original.get_vocab_size()
    fields = files.sentencepiece_tokens(
        original, bos_token_id=1, eos_token_id=2, unknown_token_id=0, **{"tokenizer.chat_template": "{{ 'x' }}"}
    )
    tokenizer = Tokenizer.load(tokenizer_from(tmp_path, fields, num_tokens))
    for text in ("the sea shore", "Où est la gare ?", "12345 😀 日本", "sea  shells\nby the"):
        ids = tokenizer.encode_prompt(text)
        assert ids == original.encode(text).ids
        assert ids[0] == 1
        speller = Speller(tokenizer)
        assert speller.replay(ids) + speller.flush() == text
    assert tokenizer.eos_token_ids == {2}
    assert tokenizer.has_chat_template


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "ab 123 c", ["ab", "Ġ123", "Ġc"]),
        ("smollm", "ab 123 c", ["ab", "Ġ", "1", "2", "3", "Ġc"]),
        ("llama-bpe", "ab 1234 c", ["ab", "Ġ", "123", "4", "Ġc"]),
        ("qwen2", "ab 123 c", ["ab", "Ġ", "1", "2", "3", "Ġc"]),
        ("tekken", "abCd 12", ["ab", "Cd", "Ġ", "1", "2"]),
    ],
)
def test_text_is_cut_as_the_name_of_the_pre_tokeniser_says(
    tmp_path: Path, byte_tokens: dict[str, Any], pre: str, text: str, pieces: list[str]
) -> None:
    directory = tokenizer_from(tmp_path, {**byte_tokens, "pre": pre})
    tokenizer = Original.from_file(str(directory / "tokenizer.json"))
    assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)] == pieces


def test_a_word_that_is_a_token_is_that_token_in_llama_3_and_not_in_gpt_2(
    tmp_path: Path, byte_tokens: dict[str, Any]
) -> None:
    """No merge leads to "xqz": only a tokenizer that looks for whole words first finds it."""
    more = {"tokens": [*byte_tokens["tokens"], "xqz"], "token_type": [*byte_tokens["token_type"], files.NORMAL]}
    for pre, whole in (("llama-bpe", True), ("gpt-2", False)):
        folder = tmp_path / pre
        folder.mkdir()
        tokenizer = Tokenizer.load(tokenizer_from(folder, {**byte_tokens, **more, "pre": pre}, 449))
        assert (tokenizer.encode_part("xqz", "text") == [448]) == whole


def test_qwen2_composes_its_text_first(tmp_path: Path, byte_tokens: dict[str, Any]) -> None:
    tokenizer = Tokenizer.load(tokenizer_from(tmp_path, {**byte_tokens, "pre": "qwen2"}))
    assert tokenizer.encode_prompt("e\u0301") == tokenizer.encode_prompt("é")


@pytest.mark.parametrize(
    ("pre", "flags", "first", "last"),
    [
        ("gpt-2", {}, False, False),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, True, True),
        ("llama-bpe", {}, True, False),
        ("llama-bpe", {"add_bos_token": False}, False, False),
        ("smollm", {"add_eos_token": True}, False, True),
    ],
)
def test_what_is_added_to_a_prompt_is_what_the_file_says_or_its_kind_does(
    tmp_path: Path, byte_tokens: dict[str, Any], pre: str, flags: dict[str, bool], first: bool, last: bool
) -> None:
    tokenizer = Tokenizer.load(tokenizer_from(tmp_path, {**byte_tokens, "pre": pre, **flags}))
    plain = tokenizer.encode_part("the", "text")
    assert tokenizer.encode_prompt("the") == [*([0] if first else []), *plain, *([2] if last else [])]


def test_every_token_that_ends_a_turn_ends_an_answer(tmp_path: Path, byte_tokens: dict[str, Any]) -> None:
    directory = tokenizer_from(tmp_path, {**byte_tokens, "eot_token_id": 1, "eom_token_id": 3})
    assert Tokenizer.load(directory).eos_token_ids == {1, 2, 3}
    assert served_config(directory).eos_token_ids == (2, 1, 3)


# Under a name of its own


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JITNEY_MODELS_DIR", str(tmp_path / "models"))
    return tmp_path / "models"


@pytest.fixture
def file(tmp_path: Path, byte_tokens: dict[str, Any]) -> Path:
    return files.write(tmp_path / "own.gguf", model_of(ROWS["qwen2"]), "qwen2", Kind.Q8_0, tokens=byte_tokens)


def test_a_file_is_pulled_under_a_name_and_served_by_it(models: Path, file: Path) -> None:
    outcome = CliRunner().invoke(command, ["pull", "my-qwen", "--from-gguf", str(file)])
    assert (outcome.exit_code, outcome.stdout) == (0, f"{models / 'my-qwen'}\n")
    assert CliRunner().invoke(command, ["path", "my-qwen"]).stdout == f"{models / 'my-qwen'}\n"
    listed = CliRunner().invoke(command, ["list"]).stdout.splitlines()
    assert listed[-1].split("\t") == ["my-qwen", "", "converted from GGUF", str(models / "my-qwen")]
    assert resolve("my-qwen", offline=True) == models / "my-qwen"
    assert load_runner(resolve("my-qwen"), dtype="float32", device="cpu", num_blocks=20).max_model_len == 256
    assert sorted(path.name for path in models.iterdir()) == [".my-qwen.lock", "my-qwen"]


def test_the_same_file_is_converted_once_and_another_one_replaces_it(
    models: Path, file: Path, byte_tokens: dict[str, Any]
) -> None:
    pull = ["pull", "mine", "--from-gguf"]
    assert "converting own.gguf" in CliRunner().invoke(command, [*pull, str(file)]).stderr
    manifest = (models / "mine" / MANIFEST).read_text()
    assert "converting" not in CliRunner().invoke(command, [*pull, str(file)]).stderr
    other = files.write(file.parent / "other.gguf", model_of(ROWS["qwen3"]), "qwen3", Kind.F16, tokens=byte_tokens)
    assert "converting other.gguf" in CliRunner().invoke(command, [*pull, str(other)]).stderr
    assert (models / "mine" / MANIFEST).read_text() != manifest
    assert '"model_type": "qwen3"' in (models / "mine" / "config.json").read_text()


def test_a_conversion_that_is_refused_leaves_no_model(
    models: Path, tmp_path: Path, byte_tokens: dict[str, Any]
) -> None:
    fields = {**byte_tokens, "pre": "unheard-of"}
    file = files.write(tmp_path / "own.gguf", model_of(ROWS["llama"]), "llama", Kind.F32, tokens=fields)
    outcome = CliRunner().invoke(command, ["pull", "mine", "--from-gguf", str(file)])
    assert (outcome.exit_code, outcome.stdout) == (1, "")
    assert "'unheard-of'" in outcome.stderr
    assert not (models / "mine").exists()


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("My Model", ["--from-gguf", "FILE"], "cannot be called"),
        ("../x", ["--from-gguf", "FILE"], "cannot be called"),
        ("mine", ["--from-gguf", "/nowhere.gguf"], "/nowhere.gguf does not exist"),
        ("mine", [], "no model 'mine': give a directory"),
    ],
)
def test_names_and_files_that_cannot_be_are_refused(
    models: Path, file: Path, name: str, arguments: list[str], words: str
) -> None:
    told = [str(file) if argument == "FILE" else argument for argument in arguments]
    outcome = CliRunner().invoke(command, ["pull", name, *told])
    assert outcome.exit_code == 1
    assert words in outcome.stderr


def test_a_gguf_file_given_as_a_model_names_the_command_to_run(models: Path, file: Path) -> None:
    with pytest.raises(ModelError, match="jitney model pull NAME --from-gguf"):
        resolve(file)
