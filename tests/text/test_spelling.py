"""Ids become text token by token: nothing half, nothing lost, nothing twice (B28, B30)."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import pytest
import small_tokenizers as small
from hypothesis import given, settings
from hypothesis import strategies as st

from jitney_worker.text.spelling import Speller
from jitney_worker.text.tokenizer import Tokenizer

Load = Callable[[str], Tokenizer]
Build = Callable[[str], Path]

BYTE_LEVEL = ("byte-bpe", "byte-bpe-bos", "smollm2")
FALLBACK = ("spm-bpe", "spm-bpe-keep")
METASPACE = ("unigram", "unigram-first", "unigram-never")
OTHER = ("wordpiece", "fused-bytes")

FAMILY = "👨‍👩‍👧‍👦"
TEXTS = {
    "emoji": "I say 👍🏽 and 😀!",
    "zwj family": f"the {FAMILY} family",
    "hangul": "안녕하세요 한국",
    "hangul jamo": "\u1112\u1161\u11ab",
    "combining accent": "cafe\u0301 n\u0303",
    "right to left": "שלום \u200fעולם",
    "newline first": "\n\n  indented\tline\r\n",
    "every space": " a  b   c ",
    "replacement character": "a \ufffd is meant\ufffd",
    "astral plane": "\U0001f9d1\U00020bb7\U0010fffd",
    "markup": "<b>&amp; 1 < 2 > 0</b>",
}


def spell(tokenizer: Tokenizer, ids: list[int], **options: object) -> tuple[list[str], str]:
    """The text of each token, and what the end flushes."""
    speller = Speller(tokenizer, **options)
    return [speller.push(token_id).text for token_id in ids], speller.flush()


def plain_ids(build: Build, kind: str, text: str) -> list[int]:
    return small.original(build(kind)).encode(text, add_special_tokens=False).ids


def byte_ids(tokenizer: Tokenizer, content: bytes) -> list[int]:
    """One token for each byte."""
    ids = {tokenizer.pieces.bytes_of(token_id): token_id for token_id in reversed(range(tokenizer.vocab_size))}
    return [ids[bytes([byte])] for byte in content]


@pytest.mark.parametrize("kind", [*BYTE_LEVEL, "spm-bpe"])
@pytest.mark.parametrize("name", TEXTS)
def test_valid_text_comes_out_whole_and_never_with_a_stray_replacement_character(
    build: Build, load: Load, kind: str, name: str
) -> None:
    ids = plain_ids(build, kind, TEXTS[name])
    deltas, flushed = spell(load(kind), ids)
    assert flushed == ""
    assert "".join(deltas) == small.original(build(kind)).decode(ids) == TEXTS[name]
    if "\ufffd" not in TEXTS[name]:
        assert not any("\ufffd" in delta for delta in deltas)


@pytest.mark.parametrize("kind", ["byte-bpe", "spm-bpe"])
def test_a_character_is_shown_with_the_token_that_completes_it(load: Load, kind: str) -> None:
    tokenizer = load(kind)
    deltas, flushed = spell(tokenizer, byte_ids(tokenizer, "é€😀".encode()))
    assert deltas == ["", "é", "", "", "€", "", "", "", "😀"]
    assert flushed == ""


@pytest.mark.parametrize("kind", ["byte-bpe", "spm-bpe"])
def test_a_replacement_character_that_the_model_means_is_shown_at_once(load: Load, kind: str) -> None:
    tokenizer = load(kind)
    deltas, _ = spell(tokenizer, byte_ids(tokenizer, "\ufffdx".encode()))
    assert deltas == ["", "", "\ufffd", "x"]


@pytest.mark.parametrize(
    ("kind", "shown"),
    [("byte-bpe", "ab \ufffd"), ("smollm2", "ab \ufffd"), ("spm-bpe", "ab \ufffd\ufffd\ufffd")],
)
def test_an_answer_cut_in_mid_character_ends_as_decode_ends_it(build: Build, load: Load, kind: str, shown: str) -> None:
    tokenizer = load(kind)
    ids = [*plain_ids(build, kind, "ab "), *byte_ids(tokenizer, "😀".encode()[:3])]
    deltas, flushed = spell(tokenizer, ids)
    assert "".join(deltas) == "ab "
    assert "ab " + flushed == shown == small.original(build(kind)).decode(ids)


def test_flushing_twice_gives_the_tail_once(byte_bpe: Tokenizer) -> None:
    speller = Speller(byte_bpe, stop=["zebra"])
    speller.replay([*byte_ids(byte_bpe, b"ze"), *byte_ids(byte_bpe, b"\xf0\x9f")])
    assert (speller.flush(), speller.flush()) == ("ze\ufffd", "")


@pytest.mark.parametrize("kind", ["byte-bpe", "spm-bpe"])
@pytest.mark.parametrize("bad", [b"\x80", b"\xff\xfe", b"\xf0\x9f\x80\xf0", b"\xed\xa0\x80", b"\xc3\xc3\xc3"])
def test_invalid_bytes_do_not_hold_the_stream(load: Load, kind: str, bad: bytes) -> None:
    """However long the run: at most the three bytes that may still become a character are kept back."""
    tokenizer = load(kind)
    ids, speller, shown = byte_ids(tokenizer, bad * 50), Speller(tokenizer), ""
    for count, token_id in enumerate(ids, start=1):
        shown += speller.push(token_id).text
        decoded = tokenizer.decode(ids[:count])
        assert decoded.startswith(shown)
        assert decoded[len(shown) :] in ("", "\ufffd", "\ufffd" * 2, "\ufffd" * 3)
    assert shown.endswith("\ufffd")
    assert speller.push(byte_ids(tokenizer, b"x")[0]).text.endswith("x")


@pytest.mark.parametrize(("scheme", "shown"), [("always", ["", " leading", " x"]), ("never", [" ", " leading", " x"])])
def test_metaspace_words_stay_apart_after_a_leading_space(tmp_path: Path, scheme: str, shown: list[str]) -> None:
    directory = small.by_hand(tmp_path, ["▁", "▁leading", "▁x"], scheme=scheme)
    assert spell(Tokenizer.load(directory), [2, 3, 4]) == (shown, "")
    assert small.original(directory).decode([2, 3, 4]) == "".join(shown)


@pytest.mark.parametrize("kind", BYTE_LEVEL)
def test_byte_level_words_keep_even_the_first_space(build: Build, load: Load, kind: str) -> None:
    deltas, _ = spell(load(kind), plain_ids(build, kind, " a b"))
    assert deltas == [" a", " b"]


@pytest.mark.parametrize(("kind", "lead"), [("spm-bpe", ""), ("spm-bpe-keep", " ")])
def test_the_space_before_a_metaspace_answer_is_dropped_only_if_the_decoder_says_so(
    build: Build, load: Load, kind: str, lead: str
) -> None:
    deltas, _ = spell(load(kind), plain_ids(build, kind, "the sea  shore"))
    assert "".join(deltas) == lead + "the sea  shore"


def test_special_tokens_end_tokens_and_unknown_ids_are_not_text(build: Build, byte_bpe: Tokenizer) -> None:
    the, sea = plain_ids(build, "byte-bpe", "the"), plain_ids(build, "byte-bpe", " sea")
    ids = [0, *the, 1, 10**6, *sea, -1, 2]
    assert "".join(spell(byte_bpe, ids)[0]) == "the sea"
    assert "".join(spell(byte_bpe, [*the, *sea], end_ids=sea[-1:])[0]) == byte_bpe.decode([*the, *sea[:-1]])


def test_an_end_token_between_the_bytes_of_a_character_changes_nothing(byte_bpe: Tokenizer) -> None:
    ids = byte_ids(byte_bpe, "😀".encode())
    ids.insert(2, 2)
    assert spell(byte_bpe, ids) == (["", "", "", "", "😀"], "")


# The law, over any ids at all


def ids_of(kind: str, tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Ids of the whole vocabulary, with many more single bytes than chance would give."""
    pieces = tokenizer.pieces
    short = [number for number in range(tokenizer.vocab_size) if len(pieces.bytes_of(number)) <= 1]
    anything = st.integers(0, tokenizer.vocab_size + 3)
    return st.lists(st.one_of(anything, st.sampled_from(short or [0])), max_size=40)


@pytest.mark.parametrize("kind", [*BYTE_LEVEL, *METASPACE, *OTHER])
def test_the_texts_and_the_flush_are_what_tokenizers_decodes(build: Build, load: Load, kind: str) -> None:
    tokenizer, reference = load(kind), small.original(build(kind))

    @settings(max_examples=300, deadline=None)
    @given(ids_of(kind, tokenizer))
    def law(ids: list[int]) -> None:
        deltas, flushed = spell(tokenizer, ids)
        assert "".join(deltas) + flushed == reference.decode(ids) == tokenizer.decode(ids)

    law()


@pytest.mark.parametrize("kind", FALLBACK)
def test_with_byte_fallback_only_a_run_that_is_broken_differs(build: Build, load: Load, kind: str) -> None:
    """`tokenizers` blanks all of a run of bytes if any of it is invalid; what was shown before cannot be blanked."""
    tokenizer, reference = load(kind), small.original(build(kind))

    @settings(max_examples=300, deadline=None)
    @given(ids_of(kind, tokenizer))
    def law(ids: list[int]) -> None:
        deltas, flushed = spell(tokenizer, ids)
        assert "".join(deltas) + flushed == spelled_run_by_run(reference, ids, strip=kind == "spm-bpe")
        if all_runs_are_whole_or_hopeless(reference, ids):
            assert "".join(deltas) + flushed == reference.decode(ids)

    law()


def runs(reference: object, ids: list[int]) -> list[tuple[bool, list[str]]]:
    """Visible tokens in runs: (are they bytes, tokens)."""
    tokens = [reference.id_to_token(number) for number in ids]
    visible = [token for token in tokens if token is not None and token not in small.SPM_CONTROL]
    is_byte = re.compile(r"<0x[0-9A-F]{2}>").fullmatch
    return [(is_bytes, list(run)) for is_bytes, run in groupby(visible, key=lambda token: bool(is_byte(token)))]


def spelled_run_by_run(reference: object, ids: list[int], *, strip: bool) -> str:
    """The rule in its plainest form: good characters of a run of bytes, and U+FFFD for each other byte."""
    text = ""
    for is_bytes, tokens in runs(reference, ids):
        if not is_bytes:
            text += "".join(tokens).replace("▁", " ")
            continue
        content = bytes(int(token[3:5], 16) for token in tokens)
        while content:
            size = next((n for n in (1, 2, 3, 4) if is_character(content[:n])), 0)
            text += content[:size].decode() or "\ufffd"
            content = content[size or 1 :]
    return text.removeprefix(" ") if strip else text


def is_character(content: bytes) -> bool:
    try:
        return len(content.decode()) == 1
    except UnicodeDecodeError:
        return False


def all_runs_are_whole_or_hopeless(reference: object, ids: list[int]) -> bool:
    for is_bytes, tokens in runs(reference, ids):
        if is_bytes:
            text = bytes(int(token[3:5], 16) for token in tokens).decode(errors="replace")
            if "\ufffd" in text and set(text) != {"\ufffd"}:
                return False
    return True


# Resuming


@pytest.mark.parametrize("kind", ["byte-bpe", "smollm2", "spm-bpe", "unigram", *OTHER])
def test_replaying_ids_gives_the_text_so_far_and_the_very_same_continuation(load: Load, kind: str) -> None:
    tokenizer = load(kind)

    @settings(max_examples=200, deadline=None)
    @given(
        ids_of(kind, tokenizer),
        st.lists(st.sampled_from(["the", " s", "\ufffd", "ea", "e", "a b"]), max_size=3),
        st.data(),
    )
    def law(ids: list[int], stop: list[str], data: st.DataObject) -> None:
        cut = data.draw(st.integers(0, len(ids)))
        whole, resumed = Speller(tokenizer, stop), Speller(tokenizer, stop)
        first = whole.replay(ids[:cut])
        assert resumed.replay(ids[:cut]) == first
        rest = [speller.replay(ids[cut:]) + speller.flush() for speller in (whole, resumed)]
        assert rest[0] == rest[1]
        assert whole.stopped == resumed.stopped
        once = Speller(tokenizer, stop)
        assert once.replay(ids) + once.flush() == first + rest[0]

    law()
