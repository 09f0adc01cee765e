"""Every decoder of a tokenizer.json, one token at a time, against `tokenizers` over whole answers (B28, B30)."""

from __future__ import annotations

import codecs
import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import small_tokenizers as small
from texts import FAMILY, byte_sequence, character_by_character, is_text
from tokenizers import AddedToken
from tokenizers import Tokenizer as Original

from jitney.errors import ModelError
from jitney_worker.text.spelling import Speller
from jitney_worker.text.tokenizer import Tokenizer

Load = Callable[[str], Tokenizer]
Build = Callable[[str], Path]


def spelled(tokenizer: Tokenizer, ids: list[int]) -> tuple[list[str], str]:
    """The text of each token, and what the end flushes."""
    speller = Speller(tokenizer)
    return [speller.push(token_id).text for token_id in ids], speller.flush()


# Ten thousand byte sequences

NUM_SEQUENCES = 10_000
KINDS = ("byte-bpe-bos", "smollm2", "spm-bpe-keep", "unigram-bytes")
FALLBACK = ("spm-bpe-keep", "unigram-bytes")


def single_bytes(tokenizer: Tokenizer) -> dict[int, int]:
    """Byte → an id that stands for it alone. The demo model's vocabulary lacks some control characters."""
    ids: dict[bytes, int] = {}
    for number in range(tokenizer.vocab_size):
        ids.setdefault(tokenizer.pieces.bytes_of(number), number)
    return {byte: ids[bytes([byte])] for byte in range(256) if bytes([byte]) in ids}


def as_shown(kind: str, content: bytes) -> str:
    return character_by_character(content) if kind in FALLBACK else content.decode(errors="replace")


@pytest.mark.parametrize("kind", KINDS)
def test_ten_thousand_byte_sequences_come_out_as_they_are(build: Build, load: Load, kind: str) -> None:
    """What is valid is shown as it is, in words of the vocabulary and byte by byte; of the rest each byte has its rule.

    Behind a letter, so that no rule about a leading space counts.
    """
    tokenizer, original = load(kind), small.original(build(kind))
    single = single_bytes(tokenizer)
    num_valid = num_in_words = 0
    for seed in range(NUM_SEQUENCES):
        content = b"x" + bytes(byte for byte in byte_sequence(seed) if byte in single)
        ids = [single[byte] for byte in content]
        if seed % 2 and is_text(content):
            ids, num_in_words = original.encode(content.decode(), add_special_tokens=False).ids, num_in_words + 1
        deltas, flushed = spelled(tokenizer, ids)
        text = "".join(deltas) + flushed
        assert text == tokenizer.decode(ids)
        if is_text(content):
            num_valid += 1
            # A word of the vocabulary may say ▁ for a space, and then no ▁ can be said.
            wanted = original.decode(ids) if kind in FALLBACK else content.decode()
            assert (text, flushed) == (wanted, ""), content
            assert ("\ufffd" in text) == ("\ufffd" in wanted)
        else:
            assert text == as_shown(kind, content), content
            assert kind in FALLBACK or text == original.decode(ids)
    assert num_valid > NUM_SEQUENCES // 3
    assert num_in_words > NUM_SEQUENCES // 8


@pytest.mark.parametrize("kind", KINDS)
def test_at_no_moment_is_more_kept_back_than_the_beginning_of_a_character(load: Load, kind: str) -> None:
    tokenizer = load(kind)
    single = single_bytes(tokenizer)
    for seed in range(600):
        content = b"x" + bytes(byte for byte in byte_sequence(seed) if byte in single)
        speller, shown = Speller(tokenizer), ""
        for end in range(1, len(content) + 1):
            shown += speller.push(single[content[end - 1]]).text
            num_kept = next(n for n in range(4) if as_shown(kind, content[: end - n]) == shown)
            assert num_kept == 0 or begins_a_character(content[end - num_kept : end])


def begins_a_character(content: bytes) -> bool:
    """True if further bytes can make a character of it."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    return decoder.decode(content) == ""


# Every form of decoder that real tokenizers have

WORDS = [
    *("a", "▁", "▁the", "▁▁", "the▁", "x▁y", "##ing", "##", "do", "n't", ".", " .", "'s", "wor</w>", "d</w>", "</w>"),
    *("</w></w>", "a</w>b</w>", " ", "  ", " a ", "\n", "é", "▁é", "Ġa", "Ġ", "Ã", "©", "<0x41>", "<0xE2>", "<0x96>"),
    *("<0x81>", "<0xFF>", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "\ufffd", "aa", "|", "<0xG0>", "日本", "ĉĉ"),
]
REPLACE = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
BYTES, FUSE, STRIP = (
    {"type": "ByteFallback"},
    {"type": "Fuse"},
    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
)
LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}


def sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "decoders": list(steps)}


DECODERS: dict[str, dict[str, Any] | None] = {
    "gpt2, llama 3, qwen": LEVEL,
    "llama 2": sequence(REPLACE, BYTES, FUSE, STRIP),
    "gemma": sequence(REPLACE, BYTES, FUSE),
    "spm without bytes": sequence(REPLACE, FUSE, STRIP),
    "t5": METASPACE,
    "albert": METASPACE | {"prepend_scheme": "first"},
    "metaspace, never": METASPACE | {"prepend_scheme": "never"},
    "metaspace of another age": {"type": "Metaspace", "replacement": "▁", "add_prefix_space": True},
    "bert": {"type": "WordPiece", "prefix": "##", "cleanup": True},
    "bert, nothing cleaned": {"type": "WordPiece", "prefix": "##", "cleanup": False},
    "gpt": {"type": "BPEDecoder", "suffix": "</w>"},
    "word level": None,
    "level and fuse": sequence(LEVEL, FUSE),
    "level and trim": sequence(LEVEL, STRIP | {"start": 2, "stop": 1}),
    "trim both ends": sequence(REPLACE, FUSE, STRIP | {"start": 1, "stop": 3}),
    "each token trimmed": sequence(REPLACE, STRIP),
    "fused, then replaced": sequence(FUSE, REPLACE, STRIP),
    "regex": sequence({"type": "Replace", "pattern": {"Regex": "▁+|\\|"}, "content": " "}, FUSE),
    "nested": sequence(sequence(REPLACE, BYTES), sequence(FUSE, STRIP)),
    "bytes, then metaspace": sequence(BYTES, METASPACE),
    "fuse": FUSE,
}


def spoken_runs(chance: random.Random) -> list[str]:
    """Words; runs of fallback bytes are whole characters or hopeless, never both (see `decoders`)."""
    words = [word for word in WORDS if not re.fullmatch("<0x[0-9A-F]{2}>", word)]
    runs = [
        ["<0x41>"],
        ["<0xE2>", "<0x96>", "<0x80>"],
        ["<0xF0>", "<0x9F>", "<0x98>", "<0x80>"],
        ["<0xFF>"] * 2,
        ["<0xE2>"],
    ]
    said: list[str] = []
    for _ in range(chance.randint(0, 12)):
        said += [*(chance.choice(runs) if chance.random() < 0.3 else ()), chance.choice(words)]
    return said + (chance.choice(runs) if chance.random() < 0.3 else [])


@pytest.mark.parametrize("name", DECODERS)
def test_the_texts_and_the_flush_are_what_the_decoder_makes_of_the_whole(tmp_path: Path, name: str) -> None:
    directory = small.of_words(tmp_path, WORDS, DECODERS[name])
    tokenizer, original = Tokenizer.load(directory), small.original(directory)
    chance = random.Random(name)
    for _ in range(700):
        ids = [WORDS.index(word) for word in spoken_runs(chance)]
        if name in ("level and trim", "trim both ends") and overlaps(original, ids):
            continue
        deltas, flushed = spelled(tokenizer, ids)
        assert "".join(deltas) + flushed == original.decode(ids), [WORDS[number] for number in ids]


def overlaps(original: Original, ids: list[int]) -> bool:
    """`tokenizers` panics where it would strip the same spaces from both ends."""
    return len("".join(original.id_to_token(number) for number in ids).strip(" ▁Ġ")) < 1


@pytest.mark.parametrize("name", DECODERS)
def test_the_bytes_of_tokens_are_what_they_are_in_the_middle_of_a_text(tmp_path: Path, name: str) -> None:
    """So that the bytes beside log probabilities add up to the answer, but for its ends."""
    directory = small.of_words(tmp_path, WORDS, DECODERS[name])
    tokenizer, original = Tokenizer.load(directory), small.original(directory)
    letter = WORDS.index("a")
    joint = tokenizer.pieces.bytes_of(letter)
    for number, word in enumerate(WORDS):
        spelt = tokenizer.pieces.bytes_of(number)
        if not re.fullmatch("<0x[0-9A-F]{2}>", word):
            around = (b"a" + spelt + joint).decode(errors="replace")
            assert around == original.decode([letter, number, letter])
        elif "ByteFallback" in str(DECODERS[name]):
            assert spelt == bytes([int(word[3:5], 16)])


@pytest.mark.parametrize(
    ("decoder", "words"),
    [
        ({"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True}, "CTC"),
        (sequence(FUSE, BYTES), "ByteFallback behind"),
        (sequence(FUSE, {"type": "Replace", "pattern": {"String": "ab"}, "content": "c"}), "Replace behind"),
        (sequence(LEVEL, METASPACE), "Metaspace behind"),
    ],
)
def test_a_decoder_whose_text_is_not_certain_before_the_end_is_refused_by_name(
    tmp_path: Path, decoder: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelError, match=f"decoder {words}.*cannot be followed token by token"):
        Tokenizer.load(small.of_words(tmp_path, WORDS, decoder))


@pytest.mark.parametrize("name", DECODERS)
def test_a_token_costs_the_same_however_many_came_before_it(tmp_path: Path, name: str) -> None:
    """Of 8,000 tokens that could be held back at most three are: to look at them all each time would take hours."""
    directory = small.of_words(tmp_path, WORDS, DECODERS[name])
    tokenizer, original = Tokenizer.load(directory), small.original(directory)
    for word in ("<0xFF>", "<0xF0>", "d</w>", "▁▁", "Ã", "\ufffd", "##"):
        speller, number, num_shown = Speller(tokenizer), WORDS.index(word), 0
        for _ in range(8_000):
            num_shown += len(speller.push(number).text)
        rest = speller.flush()
        assert len(rest) <= 3
        assert num_shown + len(rest) == len(original.decode([number] * 8_000))


# What transformers would still do to a text


@pytest.mark.parametrize("cleans", [True, False])
def test_spaces_that_the_model_wrote_are_not_cleaned_up(build: Build, tmp_path: Path, cleans: bool) -> None:
    """`clean_up_tokenization_spaces` removes the space in "wait ." afterwards, in a whole text, and no stream can."""
    shutil.copytree(build("byte-bpe"), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"clean_up_tokenization_spaces": cleans}))
    tokenizer = Tokenizer.load(tmp_path)
    ids = tokenizer.encode_part("wait . do n't you ?", "text")
    deltas, flushed = spelled(tokenizer, ids)
    assert "".join(deltas) + flushed == tokenizer.decode(ids) == "wait . do n't you ?"


def test_an_added_token_is_one_piece_whatever_its_flags(build: Build, tmp_path: Path) -> None:
    """lstrip and rstrip eat spaces of a prompt, not of an answer; normalized decides what is found."""
    shutil.copytree(build("byte-bpe"), tmp_path, dirs_exist_ok=True)
    original = small.original(tmp_path)
    flags = [{"lstrip": True}, {"rstrip": True}, {"normalized": True}, {"normalized": False}, {"single_word": True}]
    original.add_tokens([AddedToken(f"«É{n}»", **flag) for n, flag in enumerate(flags)])
    original.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    for n in range(len(flags)):
        prompt = f"a  «É{n}»  b"
        ids = tokenizer.encode_part(prompt, "text")
        assert ids == original.encode(prompt).ids
        assert original.token_to_id(f"«É{n}»") in ids
        deltas, flushed = spelled(tokenizer, ids)
        assert "".join(deltas) + flushed == original.decode(ids)


# Any ids at all


@pytest.mark.parametrize("kind", [*KINDS, "spm-bpe", "unigram", "wordpiece"])
def test_random_ids_of_a_whole_vocabulary_come_out_as_decode_says(load: Load, kind: str) -> None:
    """Not only what encoding a text gives: a model may say anything."""
    tokenizer, chance = load(kind), random.Random(kind)
    for _ in range(2_000):
        ids = [chance.randrange(-1, tokenizer.vocab_size + 2) for _ in range(chance.randint(0, 20))]
        deltas, flushed = spelled(tokenizer, ids)
        assert "".join(deltas) + flushed == tokenizer.decode(ids)
        for number, delta in zip(ids, deltas, strict=True):
            assert not tokenizer.pieces.is_special(number) or delta == ""


def test_a_family_is_shown_person_by_person_and_never_in_halves(build: Build, load: Load) -> None:
    for kind in KINDS:
        tokenizer = load(kind)
        single = single_bytes(tokenizer)
        deltas, flushed = spelled(tokenizer, [single[byte] for byte in b"x" + FAMILY.encode()])
        assert [delta for delta in deltas if delta] == ["x", *FAMILY]
        assert flushed == ""
