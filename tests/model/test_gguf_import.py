"""The conversion against transformers' own reading of the same GGUF file."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from small_gguf import MERGES, TOKENS, write_gguf
from tokenizers import Tokenizer

from jitney import progress
from jitney.errors import ModelError
from jitney_worker.model.gguf_import import convert


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "small.gguf")


@pytest.fixture(scope="module")
def converted(gguf_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("converted")
    convert(gguf_file, directory)
    return directory


def test_every_tensor_equals_what_transformers_reads_rounded_to_bfloat16(gguf_file: Path, converted: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    ours = load_file(converted / "model.safetensors")
    config = LlamaConfig.from_pretrained(converted)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    theirs = load_gguf_checkpoint(str(gguf_file), return_tensors=True, model_to_load=model)["tensors"]
    assert set(ours) == set(theirs)
    assert len(ours) == 2 + 2 * 9
    for name, tensor in ours.items():
        assert torch.equal(tensor, torch.as_tensor(theirs[name]).to(torch.bfloat16)), name


def test_its_progress_is_told_tensor_by_tensor(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    convert(gguf_file, tmp_path)
    lines = capsys.readouterr().err.splitlines()
    num_tensors = len(lines)
    assert lines[-1] == f"converting: {num_tensors} of {num_tensors} tensors (100%)"


def test_transformers_loads_the_directory_without_a_missing_or_surplus_weight(converted: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, report = AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32, output_loading_info=True)
    assert {name: list(found) for name, found in report.items() if found} == {}
    assert model.config.rms_norm_eps == 1e-5
    assert (model.config.head_dim, model.config.tie_word_embeddings) == (16, True)
    assert (model.generation_config.bos_token_id, model.generation_config.eos_token_id) == (1, 2)
    tokenizer = AutoTokenizer.from_pretrained(converted)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hell"}], tokenize=False) == "hell"


def test_the_tokenizer_merges_splits_digits_and_keeps_control_tokens_whole(converted: Path) -> None:
    tokenizer = Tokenizer.from_file(str(converted / "tokenizer.json"))
    assert tokenizer.get_vocab() == {token: i for i, token in enumerate(TOKENS)}
    assert tokenizer.encode("hello world 42<|im_end|>").tokens == [
        "hell",
        "o",
        "Ġw",
        *"orld",
        "Ġ",
        "4",
        "2",
        "<|im_end|>",
    ]
    assert "4 2" in MERGES, "only the pre-tokeniser keeps these digits apart"
    text = "hello 日本語 😀\n\ttabs"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match="architecture 'gemma' cannot be converted; llama, qwen2, qwen3, smollm3, granite can"
    ):
        convert(write_gguf(tmp_path / "other.gguf", architecture="gemma"), tmp_path)


def test_a_file_without_one_of_its_tensors_is_refused_when_it_is_converted(tmp_path: Path) -> None:
    file = replace_once(write_gguf(tmp_path / "s.gguf"), b"blk.1.attn_norm.weight", b"blk.7.attn_norm.weight")
    with pytest.raises(ModelError, match=r"s\.gguf: .*tensor model\.layers\.1\.input_layernorm\.weight is missing"):
        convert(file, tmp_path)


@pytest.mark.parametrize(
    ("old", "new"),
    [(b"hell", b"\xffell"), (b"hell", b"hexl"), (b"blk.0.attn_q.weight", b"blk.0.attn_x.weight")],
    ids=["no text", "a merge of what is no token", "another name"],
)
def test_a_damaged_file_is_refused_by_its_name(tmp_path: Path, old: bytes, new: bytes) -> None:
    file = replace_once(write_gguf(tmp_path / "s.gguf"), old, new)
    with pytest.raises(ModelError, match=r"s\.gguf"):
        convert(file, tmp_path)


@pytest.mark.parametrize("share", [0.01, 0.1, 0.3, 0.6, 0.999])
def test_a_file_that_ends_too_early_is_refused_by_its_name(tmp_path: Path, share: float) -> None:
    file = write_gguf(tmp_path / "s.gguf")
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ModelError, match=r"s\.gguf cannot be read as GGUF"):
        convert(file, tmp_path)


def test_one_part_of_several_is_refused_with_what_to_do(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "part.gguf", "llama")
    writer.add_uint16("split.count", 3)
    writer.add_tensor("token_embd.weight", np.ones((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"part\.gguf: it is one of 3 parts: merge them first"):
        convert(tmp_path / "part.gguf", tmp_path)


def replace_once(file: Path, old: bytes, new: bytes) -> Path:
    """Where it stands last: tokens stand before merges."""
    content = file.read_bytes()
    assert old in content
    assert len(old) == len(new)
    at = content.rindex(old) if old.startswith(b"blk") else content.index(old)
    file.write_bytes(content[:at] + new + content[at + len(old) :])
    return file
