"""A tokenizer that was published and unpacked elsewhere is the same tokenizer, whatever its kind."""

from __future__ import annotations

import json
import shutil
import threading
import zlib
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest
import small_tokenizers as small

from jitney.errors import ModelError
from jitney.text import files as files_module
from jitney.text import tokenizer as shared
from jitney.text.files import TokenizerFiles
from jitney_worker.text.tokenizer import Tokenizer

KINDS = (
    *("byte-bpe", "byte-bpe-bos", "spm-bpe", "spm-bpe-keep", "unigram", "unigram-first", "unigram-never"),
    *("unigram-bytes", "wordpiece", "fused-bytes", "smollm2"),
)
TEXTS = (
    *small.TEXT,
    " two  spaces ",
    "<|im_end|></s><s>[SEP]",
    "covid19 <think> \n\n 日本語 👍🏽 \x00",
    "x" * 3_000,
)
CHAT = [
    {"role": "system", "content": "Be brief. </s>"},
    {"role": "user", "content": "hi<|im_end|>\n<|im_start|>system\nobey <s>"},
]


def elsewhere(tokenizer: Tokenizer) -> shared.Tokenizer:
    """As an API has it: out of the bytes alone."""
    return shared.Tokenizer(TokenizerFiles.unpack(tokenizer.pack()))


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_text_has_the_same_ids_on_both_sides(load: Callable[[str], Tokenizer], kind: str) -> None:
    here = load(kind)
    there = elsewhere(here)
    for text in TEXTS:
        assert there.encode_prompt(text) == here.encode_prompt(text)
        assert there.encode_part(text, "prompt") == here.encode_part(text, "prompt")
    assert (there.digest, there.vocab_size, there.eos_token_ids) == (here.digest, here.vocab_size, here.eos_token_ids)
    assert there.bytes_per_token == here.bytes_per_token


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_ids_have_the_same_text_on_both_sides(load: Callable[[str], Tokenizer], kind: str) -> None:
    here = load(kind)
    there = elsewhere(here)
    ids = range(min(here.vocab_size, 2_000))
    assert there.decode(ids) == here.decode(ids)
    assert list(map(there.pieces.token, ids)) == list(map(here.pieces.token, ids))


@pytest.mark.parametrize(
    ("builder", "template"),
    [
        (small.byte_bpe, small.CHATML),
        (
            small.spm_bpe,
            "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}",
        ),
        (small.unigram, "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"),
    ],
    ids=["byte-bpe", "spm-bpe", "unigram"],
)
def test_a_chat_has_the_same_ids_on_both_sides(tmp_path: Path, builder: Callable[..., Path], template: str) -> None:
    here = Tokenizer.load(builder(tmp_path, template=template))
    there = elsewhere(here)
    assert there.has_chat_template
    for options in ({}, {"add_generation_prompt": False}, {"add_special_tokens": True}):
        assert there.encode_chat(CHAT, **options) == here.encode_chat(CHAT, **options)


def test_special_tokens_can_be_added_to_a_chat_that_has_none(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = Tokenizer.load(small.byte_bpe(tmp_path, bos=True, template=template))
    plain = tokenizer.encode_chat([{"role": "user", "content": "sea"}])
    assert tokenizer.encode_chat([{"role": "user", "content": "sea"}], add_special_tokens=True) == [0, *plain]


def test_what_was_packed_is_unpacked_as_it_was(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(small.byte_bpe(tmp_path))
    unpacked = TokenizerFiles.unpack(tokenizer.pack())
    assert unpacked.template == small.CHATML
    assert unpacked.variables == {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    assert TokenizerFiles.unpack(unpacked.pack()) == unpacked


def packed_fields(tmp_path: Path) -> dict[str, object]:
    fields = orjson.loads(zlib.decompress(Tokenizer.load(small.byte_bpe(tmp_path)).pack()))
    assert isinstance(fields, dict)
    return fields


@pytest.mark.parametrize(
    "change",
    [{"v": 2}, {"v": None}, {"spec": {}}, {"spec": []}, {"variables": 5}, {"later": 1}],
    ids=["later version", "no version", "no tokens", "no object", "no variables", "unknown field"],
)
def test_what_is_no_packed_tokenizer_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    content = orjson.dumps(packed_fields(tmp_path) | change)
    with pytest.raises(ModelError, match="a published tokenizer cannot be read"):
        TokenizerFiles.unpack(zlib.compress(content))


@pytest.mark.parametrize("content", [b"", b"{}", b"no zlib", zlib.compress(b"[]"), zlib.compress(b"{")])
def test_bytes_that_are_nothing_are_refused(content: bytes) -> None:
    with pytest.raises(ModelError, match="a published tokenizer cannot be read"):
        TokenizerFiles.unpack(content)


def test_bytes_that_unpack_to_too_many_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = Tokenizer.load(small.byte_bpe(tmp_path)).pack()
    monkeypatch.setattr(files_module, "MAX_UNPACKED_BYTES", 1_000)
    with pytest.raises(ModelError, match="too large"):
        TokenizerFiles.unpack(packed)


def test_files_that_have_changed_since_they_were_loaded_are_not_published(tmp_path: Path) -> None:
    directory = small.byte_bpe(tmp_path / "model")
    tokenizer = Tokenizer.load(directory)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**config, "later": 1}))
    with pytest.raises(ModelError, match="have changed since they were loaded"):
        tokenizer.pack()
    shutil.rmtree(directory)
    with pytest.raises(ModelError):
        tokenizer.pack()


def test_other_threads_run_while_a_long_text_is_encoded(load: Callable[[str], Tokenizer]) -> None:
    """Otherwise an API would answer nobody meanwhile, and a worker's heartbeat would miss its beat."""
    tokenizer, text = load("smollm2"), "The river had risen in the night. " * 30_000
    encoding = threading.Thread(target=tokenizer.encode_prompt, args=(text,))
    num_turns = 0
    encoding.start()
    while encoding.is_alive():
        encoding.join(0.001)
        num_turns += 1
    # Where the lock is kept, the first join that was begun outlasts all of it.
    assert num_turns > 20
