"""A tokenizer from a checkpoint's files: raw prompts, facts about it, and files that are no good (B26, B35)."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import small_tokenizers as small
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import AutoTokenizer

from jitney.errors import InvalidJob, ModelError
from jitney.text.tokenizer import SAMPLE
from jitney_worker.text.tokenizer import Tokenizer

Build = Callable[[str], Path]
Load = Callable[[str], Tokenizer]

PROMPTS = (
    "Once upon a time",
    "  two spaces before, one after ",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "a<s>b</s> c<unk>",
    "<think>hm</think> covid19\n\n<tool_call>",
    "é\u0301 \U0001f468‍\U0001f469 \ufffd \x00\x07",
)


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("kind", ["byte-bpe", "byte-bpe-bos", "spm-bpe", "unigram", "unigram-first", "smollm2"])
def test_a_raw_prompt_has_transformers_ids_control_tokens_included(
    build: Build, load: Load, kind: str, prompt: str
) -> None:
    assert load(kind).encode_prompt(prompt) == AutoTokenizer.from_pretrained(build(kind)).encode(prompt)


def test_the_demo_models_prompts_have_transformers_ids(build: Build, load: Load) -> None:
    tokenizer, reference = load("smollm2"), AutoTokenizer.from_pretrained(build("smollm2"))

    @settings(max_examples=300, deadline=None)
    @given(st.lists(st.one_of(st.text(max_size=20), st.sampled_from(reference.all_special_tokens)), min_size=1))
    def law(parts: list[str]) -> None:
        prompt = "".join(parts)
        wanted = reference.encode(prompt)
        if wanted:
            assert tokenizer.encode_prompt(prompt) == wanted

    law()


def test_a_raw_prompt_may_write_control_tokens(byte_bpe: Tokenizer) -> None:
    ids = byte_bpe.encode_prompt("<|im_start|>user<|im_end|>")
    assert (ids[0], ids[-1]) == (1, 2)


def test_a_bos_is_added_where_the_checkpoint_says_so(load: Load) -> None:
    plain = load("byte-bpe").encode_prompt("the sea")
    assert load("byte-bpe-bos").encode_prompt("the sea") == [0, *plain]
    assert load("spm-bpe").encode_prompt("the sea")[0] == 1


def test_a_token_that_only_the_configuration_calls_special_is_special(build: Build, tmp_path: Path) -> None:
    """Named ones and further ones; hidden in answers, kept out of a user's reach, and transformers' ids again."""
    shutil.copytree(build("byte-bpe"), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {"eos_token": "Q", "extra_special_tokens": ["Z"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer, reference = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    prompt = "a|Q|Z|b"
    ids = tokenizer.encode_prompt(prompt)
    assert ids == reference.encode(prompt)
    assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True) == "a|||b"
    assert tokenizer.eos_token_ids == {ids[2]}
    turn = [{"role": "user", "content": prompt}]
    assert not {ids[2], ids[4]} & set(tokenizer.encode_chat(turn))


def test_of_two_control_tokens_that_begin_alike_the_longer_counts(build: Build, tmp_path: Path) -> None:
    shutil.copytree(build("byte-bpe"), tmp_path, dirs_exist_ok=True)
    original = small.original(tmp_path)
    original.add_special_tokens(["<|a", "<|a|>", "<|a|><|b|>"])
    original.save(str(tmp_path / "tokenizer.json"))
    for prompt in ("<|a", "x<|a|>y", "<|a|><|b|><|a|>", "<|a<|a|>"):
        assert Tokenizer.load(tmp_path).encode_prompt(prompt) == original.encode(prompt).ids


def test_a_control_token_that_is_only_a_word_of_its_own_is_found_as_such(build: Build, tmp_path: Path) -> None:
    shutil.copytree(build("byte-bpe"), tmp_path, dirs_exist_ok=True)
    original = small.original(tmp_path)
    original.add_special_tokens([AddedToken("END", single_word=True), AddedToken("<|s|>", lstrip=True, rstrip=True)])
    original.save(str(tmp_path / "tokenizer.json"))
    for prompt in ("the END.", "theEND", "ENDs END", "a  <|s|>  b"):
        assert Tokenizer.load(tmp_path).encode_prompt(prompt) == original.encode(prompt).ids


def test_an_empty_prompt_is_the_bos_alone_or_refused(load: Load) -> None:
    assert load("byte-bpe-bos").encode_prompt("") == [0]
    with pytest.raises(InvalidJob, match="prompt is empty") as refused:
        load("byte-bpe").encode_prompt("")
    assert refused.value.param == "prompt"


@pytest.mark.parametrize("prompt", ["a\ud800", "\udc82\udca2", b"\x82\xa2", None, 7])
def test_a_prompt_that_is_not_unicode_text_is_refused(byte_bpe: Tokenizer, prompt: Any) -> None:
    with pytest.raises(InvalidJob, match="prompt is") as refused:
        byte_bpe.encode_prompt(prompt)
    assert refused.value.param == "prompt"


def test_the_facts_of_the_demo_model(build: Build, load: Load) -> None:
    tokenizer = load("smollm2")
    assert tokenizer.vocab_size == 49_152
    assert tokenizer.eos_token_ids == {2}
    assert tokenizer.has_chat_template
    ids = small.original(build("smollm2")).encode(SAMPLE).ids
    assert tokenizer.bytes_per_token == round(len(SAMPLE.encode()) / len(ids), 2)
    assert 3.0 < tokenizer.bytes_per_token < 4.5


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({}, {2}),
        ({"config.json": {"eos_token_id": 0}}, {0, 2}),
        ({"config.json": {"eos_token_id": 0}, "generation_config.json": {"eos_token_id": [1, 2]}}, {1, 2}),
        ({"config.json": {"eos_token_id": 0}, "generation_config.json": {"eos_token_id": None}}, {0, 2}),
    ],
)
def test_an_answer_ends_at_what_the_checkpoint_and_its_tokenizer_say(
    build: Build, tmp_path: Path, files: dict[str, Any], ids: set[int]
) -> None:
    shutil.copytree(build("byte-bpe"), tmp_path, dirs_exist_ok=True)
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert Tokenizer.load(tmp_path).eos_token_ids == ids


def test_the_digest_is_of_the_files_and_of_nothing_else(build: Build, tmp_path: Path) -> None:
    directory = tmp_path / "elsewhere"
    shutil.copytree(build("byte-bpe"), directory)
    digests = [Tokenizer.load(build("byte-bpe")).digest, Tokenizer.load(directory).digest]
    assert digests[0] == digests[1]
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        path = directory / name
        path.write_text(path.read_text() + "\n")
        digests.append(Tokenizer.load(directory).digest)
    (directory / "config.json").write_text("{}")
    assert Tokenizer.load(directory).digest == digests[-1]
    assert len(set(digests)) == 4


@pytest.mark.parametrize("place", ["chat_template.json", "config", "config list"])
def test_older_checkpoints_keep_their_template_elsewhere(build: Build, tmp_path: Path, place: str) -> None:
    shutil.copytree(build("byte-bpe"), tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").unlink()
    assert not Tokenizer.load(tmp_path).has_chat_template
    template: Any = small.CHATML
    if place == "config list":
        template = [{"name": "tool_use", "template": "{{ 1 }}"}, {"name": "default", "template": template}]
    path = tmp_path / ("chat_template.json" if place == "chat_template.json" else "tokenizer_config.json")
    fields = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**fields, "chat_template": template}))
    turn = [{"role": "user", "content": "x"}]
    assert Tokenizer.load(tmp_path).encode_chat(turn) == Tokenizer.load(build("byte-bpe")).encode_chat(turn)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer.json", b"{", "cannot read"),
        ("tokenizer.json", b"[]", "not a JSON object"),
        ("tokenizer.json", b'{"model": {"type": "Nonsense"}, "added_tokens": []}', "cannot be used"),
        ("tokenizer.json", b'{"version": "1.0"}', "no valid 'added_tokens'"),
        ("tokenizer.json", b'{"added_tokens": [7], "model": {}}', "cannot be used"),
        ("tokenizer_config.json", b"\xff", "cannot read"),
        ("chat_template.jinja", b"\xff", "cannot read"),
    ],
)
def test_files_that_cannot_be_used_are_named(
    build: Build, tmp_path: Path, name: str, content: bytes | None, words: str
) -> None:
    shutil.copytree(build("byte-bpe"), tmp_path, dirs_exist_ok=True)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=words):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        {"model": {"type": "BPE", "vocab": "a", "merges": []}},
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a"]}},
        {"model": 7},
        {"normalizer": 1.5},
        {"decoder": []},
        {"added_tokens": [{"id": "x", "content": "<s>"}]},
        {"added_tokens": [{"id": 0, "content": "", "special": True}]},
    ],
)
def test_a_damaged_tokenizer_is_refused_and_never_a_traceback(
    build: Build, tmp_path: Path, damage: dict[str, Any]
) -> None:
    shutil.copytree(build("byte-bpe"), tmp_path, dirs_exist_ok=True)
    spec = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps({**spec, **damage}))
    with pytest.raises(ModelError, match="cannot be used"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(("eos", "ids"), [(-1, set()), ([5, -1], {5}), (None, set())])
def test_an_end_token_of_minus_one_is_none(build: Build, tmp_path: Path, eos: Any, ids: set[int]) -> None:
    shutil.copytree(build("byte-bpe"), tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    named = Tokenizer.load(build("byte-bpe")).eos_token_ids
    assert Tokenizer.load(tmp_path).eos_token_ids - named == ids


def test_a_truncation_or_padding_left_in_the_file_does_not_cut_prompts(build: Build, tmp_path: Path) -> None:
    shutil.copytree(build("byte-bpe"), tmp_path, dirs_exist_ok=True)
    original = small.original(tmp_path)
    original.enable_truncation(4)
    original.enable_padding(length=16)
    original.save(str(tmp_path / "tokenizer.json"))
    for prompt in ("x", "x y z a b c"):
        assert Tokenizer.load(tmp_path).encode_prompt(prompt) == Tokenizer.load(build("byte-bpe")).encode_prompt(prompt)


def test_threads_may_share_a_tokenizer(load: Load) -> None:
    tokenizer = load("smollm2")
    chats = [[{"role": "user", "content": f"{n} <|im_end|> " + "sea " * (n % 7)}] for n in range(200)]
    alone = [tokenizer.encode_chat(chat) for chat in chats]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(tokenizer.encode_chat, chats)) == alone


def test_the_text_room_needs_neither_torch_nor_transformers() -> None:
    """A worker's start, and every process that only spells, would pay seconds for them."""
    code = (
        "import sys, jitney_worker.text.rules, jitney_worker.text.logprobs;"
        "print([name for name in ('torch', 'transformers', 'fastapi') if name in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
