"""The random model is a whole one: transformers reads it, and its tokenizer spells anything."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from jitney.errors import ModelError
from jitney_worker.model.tiny import FAMILY_NAMES, make_tiny

TEXT = "What is the capital of France?  12345\n\tnaïve 日本語 😀 <|im_end|>"


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_transformers_loads_every_family_whole(tmp_path: Path, family: str) -> None:
    from transformers import AutoModelForCausalLM

    directory = make_tiny(tmp_path, family=family)
    model, report = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert {name: list(found) for name, found in report.items() if found} == {}
    assert model.dtype == torch.float32
    assert sum(file.stat().st_size for file in directory.iterdir()) < 2_000_000


def test_the_tokenizer_spells_any_text_and_has_a_chat_template(tiny_llama: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    ids = tokenizer(TEXT)["input_ids"]
    assert tokenizer.decode(ids) == TEXT
    assert max(ids) < len(tokenizer) == 512
    assert len(ids) < len(TEXT.encode()) / 1.5, "frequent words are merged"
    assert ids[-1] == tokenizer.eos_token_id == 2
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_the_same_seed_gives_the_same_bytes_and_another_seed_other_weights(tmp_path: Path) -> None:
    first, again, other = (make_tiny(tmp_path / name, seed=seed) for name, seed in (("a", 3), ("b", 3), ("c", 4)))
    for file in first.iterdir():
        assert file.read_bytes() == (again / file.name).read_bytes(), file.name
        assert (file.read_bytes() == (other / file.name).read_bytes()) is (file.name != "model.safetensors")


def test_an_unknown_family_is_refused_by_value(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="family='gpt9' is unknown: use one of llama, mistral, qwen2, qwen3"):
        make_tiny(tmp_path, family="gpt9")
