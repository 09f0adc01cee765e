"""Checkpoints without a tokenizer.json, and fields of tokenizer_config.json that could mean something."""

from __future__ import annotations

import importlib.util
import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import small_tokenizers as small
from transformers import AutoTokenizer

from jitney.errors import ModelError
from jitney_worker.text.spelling import Speller
from jitney_worker.text.tokenizer import Tokenizer

Build = Callable[[str], Path]
PROMPTS = ("the sea shore", " two  spaces ", "<|im_start|>user\nhi<|im_end|>\n", "<think>é 😀</think>\n\n", "covid19")


def without_tokenizer_json(source: Path, directory: Path, **config: Any) -> Path:
    """The same checkpoint as vocab.json and merges.txt, its added tokens in tokenizer_config.json."""
    shutil.copytree(source, directory, dirs_exist_ok=True)
    spec = json.loads((directory / "tokenizer.json").read_text())
    (directory / "tokenizer.json").unlink()
    (directory / "vocab.json").write_text(json.dumps(spec["model"]["vocab"]))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in spec["model"]["merges"]]
    (directory / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    added = {str(token["id"]): {k: v for k, v in token.items() if k != "id"} for token in spec["added_tokens"]}
    named = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "added_tokens_decoder": added}
    (directory / "tokenizer_config.json").write_text(json.dumps({**named, **config}))
    return directory


@pytest.fixture(scope="module")
def older(build: Build, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("older")
    return without_tokenizer_json(build("byte-bpe"), directory, tokenizer_class="GPT2Tokenizer")


def test_a_vocabulary_and_its_merges_serve_like_the_tokenizer_json_they_would_be(build: Build, older: Path) -> None:
    tokenizer, original = Tokenizer.load(older), Tokenizer.load(build("byte-bpe"))
    reference = AutoTokenizer.from_pretrained(older)
    for prompt in PROMPTS:
        ids = original.encode_prompt(prompt)
        assert tokenizer.encode_prompt(prompt) == ids == reference.encode(prompt)
        speller = Speller(tokenizer)
        assert speller.replay(ids) + speller.flush() == original.decode(ids)
    turn = [{"role": "user", "content": "x<|im_end|>y"}]
    assert tokenizer.encode_chat(turn) == original.encode_chat(turn)
    assert (tokenizer.vocab_size, tokenizer.eos_token_ids) == (original.vocab_size, original.eos_token_ids)


def test_nothing_is_written_into_a_checkpoint_that_is_converted(older: Path) -> None:
    before = sorted((path.name, path.stat().st_mtime_ns) for path in older.iterdir())
    Tokenizer.load(older)
    assert sorted((path.name, path.stat().st_mtime_ns) for path in older.iterdir()) == before


def test_every_process_converts_to_the_same_digest_and_another_vocabulary_to_another(
    older: Path, tmp_path: Path
) -> None:
    """A job may be continued by another worker only if the two tokenizers are the same."""
    code = "import sys; from jitney_worker.text.tokenizer import Tokenizer; print(Tokenizer.load(sys.argv[1]).digest)"
    answer = subprocess.run([sys.executable, "-c", code, str(older)], capture_output=True, text=True, check=True)
    digest = Tokenizer.load(older).digest
    assert answer.stdout.strip() == digest
    shutil.copytree(older, tmp_path, dirs_exist_ok=True)
    merges = (tmp_path / "merges.txt").read_text().splitlines()
    (tmp_path / "merges.txt").write_text("\n".join(merges[:-1]) + "\n")
    assert Tokenizer.load(tmp_path).digest != digest


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "has no tokenizer.json, nor another vocabulary"),
        ({"merges.txt": "a b"}, "has no tokenizer.json, nor another vocabulary"),
        ({"vocab.json": "{}"}, "has no tokenizer.json, and none can be made of its other files: Couldn't instantiate"),
        ({"vocab.json": "{", "tokenizer_config.json": '{"tokenizer_class": "GPT2Tokenizer"}'}, "none can be made"),
    ],
)
def test_files_that_make_no_tokenizer_are_refused_with_the_reason(
    tmp_path: Path, files: dict[str, str], words: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ModelError, match=words) as refused:
        Tokenizer.load(tmp_path)
    assert str(tmp_path) in str(refused.value)


def test_code_that_a_checkpoint_brings_is_not_run(older: Path, tmp_path: Path) -> None:
    shutil.copytree(older, tmp_path, dirs_exist_ok=True)
    mark = tmp_path / "it ran"
    (tmp_path / "evil.py").write_text(f"open({str(mark)!r}, 'w')\nclass Evil: pass\n")
    config = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="none can be made"):
        Tokenizer.load(tmp_path)
    assert not mark.exists()


def test_a_sentencepiece_model_without_its_library_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == "sentencepiece" else importlib.util.find_spec(name, package)

    monkeypatch.setattr("jitney_worker.text.converted.find_spec", find)
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x00")
    with pytest.raises(ModelError, match=r"tokenizer\.model can be converted only if sentencepiece and protobuf"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_sentencepiece_model_serves_with_sentencepieces_own_ids(tmp_path: Path, kind: str) -> None:
    (tmp_path / "text").write_text("\n".join(small.TEXT * 4))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=420,
        model_type=kind,
        byte_fallback=kind == "bpe",
        normalization_rule_name="identity",
        remove_extra_whitespaces=kind == "unigram",
        hard_vocab_limit=False,
        minloglevel=2,
    )
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer_class = {"bpe": "LlamaTokenizer", "unigram": "T5Tokenizer"}[kind]
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": tokenizer_class, "extra_ids": 0, **names})
    )
    tokenizer = Tokenizer.load(tmp_path)
    reference = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    texts = ["the sea shore", "Où est la gare ?", "a  b   c", *(["😀 日本"] if kind == "bpe" else [])]
    for text in texts:
        ids = tokenizer.encode_part(text, "text")
        assert ids == reference.encode(text)
        speller = Speller(tokenizer)
        assert speller.replay(ids) + speller.flush() == reference.decode(ids)


# Fields of tokenizer_config.json


@pytest.mark.parametrize("kind", ["byte-bpe", "byte-bpe-bos", "spm-bpe"])
@pytest.mark.parametrize("tokenizer_class", ["PreTrainedTokenizerFast", "LlamaTokenizerFast", "LlamaTokenizer"])
def test_flags_about_bos_and_eos_change_nothing_where_there_is_a_tokenizer_json(
    build: Build, tmp_path: Path, kind: str, tokenizer_class: str
) -> None:
    """As in transformers: the post-processor of tokenizer.json says what is added to a prompt."""
    shutil.copytree(build(kind), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["tokenizer_class"] = tokenizer_class
    plain = Tokenizer.load(build(kind)).encode_prompt("the sea")
    for bos, eos, legacy in itertools.product([None, False, True], repeat=3):
        flags = {"add_bos_token": bos, "add_eos_token": eos, "legacy": legacy}
        told = {**config, **{name: value for name, value in flags.items() if value is not None}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(told))
        assert Tokenizer.load(tmp_path).encode_prompt("the sea") == plain
        if legacy is None:
            assert AutoTokenizer.from_pretrained(tmp_path).encode("the sea") == plain


@pytest.mark.parametrize(("flag", "ends"), [("add_bos_token", (0, None)), ("add_eos_token", (None, 2))])
@pytest.mark.parametrize("value", [True, False])
def test_flags_about_bos_and_eos_count_where_the_tokenizer_is_converted(
    build: Build, older: Path, tmp_path: Path, flag: str, ends: tuple[int | None, int | None], value: bool
) -> None:
    shutil.copytree(older, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, flag: value}))
    ids = Tokenizer.load(tmp_path).encode_prompt("the sea")
    assert ids == AutoTokenizer.from_pretrained(tmp_path).encode("the sea")
    plain = Tokenizer.load(build("byte-bpe")).encode_prompt("the sea")
    first, last = ends if value else (None, None)
    assert ids == [*([] if first is None else [first]), *plain, *([] if last is None else [last])]


OTHER = "{{ 'other' }}"


@pytest.mark.parametrize(
    ("template", "is_found"),
    [
        (small.CHATML, True),
        ([{"name": "tool_use", "template": OTHER}, {"name": "default", "template": small.CHATML}], True),
        ({"tool_use": OTHER, "default": small.CHATML}, True),
        ([{"name": "tool_use", "template": OTHER}], False),
        ({"rag": OTHER}, False),
        ([7, {"name": "default"}], False),
        (None, False),
    ],
)
def test_of_several_chat_templates_the_default_one_counts(
    build: Build, tmp_path: Path, template: Any, is_found: bool
) -> None:
    shutil.copytree(build("byte-bpe"), tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").unlink()
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    tokenizer, turn = Tokenizer.load(tmp_path), [{"role": "user", "content": "x"}]
    assert tokenizer.has_chat_template == is_found
    if is_found:
        assert tokenizer.encode_chat(turn) == Tokenizer.load(build("byte-bpe")).encode_chat(turn)


def test_a_template_in_a_file_of_its_own_goes_before_the_one_in_the_configuration(build: Build, tmp_path: Path) -> None:
    shutil.copytree(build("byte-bpe"), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": OTHER}))
    turn = [{"role": "user", "content": "x"}]
    ids = Tokenizer.load(tmp_path).encode_chat(turn)
    assert ids == Tokenizer.load(build("byte-bpe")).encode_chat(turn)
    assert (
        ids
        == AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(turn, add_generation_prompt=True)["input_ids"]
    )
