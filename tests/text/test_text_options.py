"""min_tokens, include_stop_str_in_output, skip_special_tokens and bad_words: what they change of the text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import small_tokenizers as small
from hypothesis import given, settings
from hypothesis import strategies as st

from jitney.errors import InvalidJob
from jitney_worker.text.bad_words import bad_word_ids
from jitney_worker.text.rules import StopRules
from jitney_worker.text.spelling import Speller, TextOptions
from jitney_worker.text.tokenizer import Tokenizer

Load = Callable[[str], Tokenizer]
Build = Callable[[str], Path]

KINDS = ("byte-bpe", "spm-bpe", "spm-bpe-keep", "unigram", "unigram-never", "wordpiece", "fused-bytes")
SPOKEN = TextOptions(skip_special_tokens=False)
WITH_STOP = TextOptions(include_stop_str_in_output=True)
LETTERS = st.text("abc", max_size=5)


class Letters:
    """Ids that stand for texts, in place of a tokenizer's."""

    def __init__(self, *words: str) -> None:
        self.words = words
        self.pieces = self

    def stream(self, *, skip_special_tokens: bool) -> Letters:
        return self

    def push(self, token_id: int) -> str:
        return self.words[token_id]

    def flush(self) -> str:
        return ""


def told(words: list[str], stop: list[str], options: TextOptions) -> tuple[list[str], int | None]:
    """What each word showed and the end flushed; and how many words there were when a stop string ended it."""
    speller = Speller(Letters(*words), stop, options=options)  # type: ignore[arg-type]
    shown = []
    for number in range(len(words)):
        shown.append(speller.push(number).text)
        if speller.stopped:
            return [*shown, speller.flush()], number + 1
    return [*shown, speller.flush()], None


@pytest.mark.parametrize(
    ("min_tokens", "shown", "ended_after"),
    [
        (0, ["a", "", "", ""], 3),
        (2, ["a", "", "", ""], 3),  # begun within, complete after: it counts
        (3, ["a", "", "END ", "", "E", "", ""], 6),  # complete within: it is text
        (5, ["a", "", "END ", "", "E", "", ""], 6),
        (6, ["a", "", "END ", "", "E", "END", "!", ""], None),
    ],
)
def test_a_stop_string_counts_if_it_is_complete_after_min_tokens(
    min_tokens: int, shown: list[str], ended_after: int | None
) -> None:
    """B25"""
    words = ["a", "E", "ND ", "E", "EN", "D", "!"]
    assert told(words, ["END"], TextOptions(min_tokens=min_tokens)) == (shown, ended_after)


def first_match(words: list[str], stop: list[str], min_tokens: int) -> tuple[str, str, int] | None:
    """The rule as it is written: (text before, text with the stop string, words) at the first character that counts."""
    text = ""
    for number, word in enumerate(words, start=1):
        for character in word:
            text += character
            complete = [string for string in stop if text.endswith(string)]
            if number > min_tokens and complete:
                return text[: len(text) - max(map(len, complete))], text, number
    return None


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    st.lists(LETTERS.filter(bool), min_size=1, max_size=4),
    st.lists(LETTERS, max_size=12),
    st.integers(0, 6),
    st.booleans(),
)
def test_whatever_is_said_the_rule_decides_and_nothing_is_lost(
    stop: list[str], words: list[str], min_tokens: int, include: bool
) -> None:
    options = TextOptions(min_tokens=min_tokens, include_stop_str_in_output=include)
    shown, ended_after = told(words, stop, options)
    wanted = first_match(words, stop, min_tokens)
    if wanted is None:
        assert ("".join(shown), ended_after) == ("".join(words), None)
    else:
        before, with_stop, number = wanted
        assert ("".join(shown), ended_after) == (with_stop if include else before, number)


def test_a_stop_string_that_is_to_be_shown_is_not_held_back() -> None:
    assert told(["a", "EN", "D!", "x"], ["END"], WITH_STOP) == (["a", "EN", "D", ""], 3)


def test_an_end_token_is_text_only_if_both_options_say_so(byte_bpe: Tokenizer) -> None:
    end = byte_bpe.encode_part("<|im_end|>", "text")[0]
    word = byte_bpe.encode_part("a", "text")[0]
    shown = {}
    for include in (False, True):
        for skip in (False, True):
            options = TextOptions(include_stop_str_in_output=include, skip_special_tokens=skip)
            shown[include, skip] = Speller(byte_bpe, (), [end], options).replay([word, end])
    assert shown == {
        (True, False): "a<|im_end|>",
        (True, True): "a",
        (False, False): "a",
        (False, True): "a",
    }


def test_a_stop_token_that_is_an_ordinary_word_is_shown_with_the_option(byte_bpe: Tokenizer) -> None:
    ids = [byte_bpe.encode_part(letter, "text")[0] for letter in "ab"]
    assert Speller(byte_bpe, (), ids[1:]).replay(ids) == "a"
    assert Speller(byte_bpe, (), ids[1:], WITH_STOP).replay(ids) == "ab"


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_that_are_asked_for_come_out_as_decode_gives_them(build: Build, load: Load, kind: str) -> None:
    tokenizer, original = load(kind), small.original(build(kind))
    special = [token_id for token_id in range(tokenizer.vocab_size) if tokenizer.pieces.is_special(token_id)]
    words = original.encode("the sea shore", add_special_tokens=False).ids
    for number in special:
        ids = [*words, number, *words, number]
        speller = Speller(tokenizer, options=SPOKEN)
        text = speller.replay(ids) + speller.flush()
        assert text == original.decode(ids, skip_special_tokens=False)
        assert text != tokenizer.decode(ids)


def test_a_special_token_that_is_shown_can_be_a_stop_string_and_the_engine_agrees(byte_bpe: Tokenizer) -> None:
    ids = [*byte_bpe.encode_part("a", "text"), *byte_bpe.encode_part("<|im_start|>", "text")]
    for options, stops in ((SPOKEN, True), (TextOptions(), False)):
        rules, speller = StopRules(byte_bpe), Speller(byte_bpe, ["<|im_start|>"], options=options)
        rules.register("s", ["<|im_start|>"], options=options)
        rules.start("s", ids[:1])
        speller.replay(ids[:1])
        assert (rules.advance("s", ids[1]) == "stop") is speller.push(ids[1]).stopped is stops


@pytest.mark.parametrize("kind", [*KINDS, "byte-bpe-bos", "unigram-first", "unigram-bytes"])
@pytest.mark.parametrize("prompt", ["the sea", "the sea ", "alpha", "\n"])
def test_an_answer_that_follows_a_text_is_the_rest_of_both_together(
    build: Build, load: Load, kind: str, prompt: str
) -> None:
    """B30: words are not glued to those of the prompt, whatever spaces a decoder drops at the start of a text."""
    tokenizer, original = load(kind), small.original(build(kind))
    before = tokenizer.encode_prompt(prompt) if kind != "wordpiece" or prompt.strip() else [5]
    for words in ("the sea shore", " alpha", "beta"):
        ids = original.encode(words, add_special_tokens=False).ids
        speller = Speller(tokenizer, options=TextOptions(follows=tuple(before)))
        text = speller.replay(ids) + speller.flush()
        assert original.decode(before) + text == original.decode([*before, *ids])


def test_an_answer_that_follows_nothing_that_is_text_is_a_text_of_its_own(load: Load) -> None:
    """A BOS alone is no text, and half of a character is no part of what comes after it."""
    tokenizer = load("spm-bpe")
    ids = tokenizer.encode_prompt("sea")[1:]
    (half,) = (number for number in range(tokenizer.vocab_size) if tokenizer.pieces.token(number) == "<0xC3>")
    shown = []
    for follows in ((1,), (1, half), (1, *ids, half), (1, *ids)):
        speller = Speller(tokenizer, options=TextOptions(follows=follows))
        shown.append(speller.replay(ids) + speller.flush())
    assert shown == ["sea", "sea", " sea", " sea"]


@pytest.mark.parametrize(("kind", "word"), [("byte-bpe", "b"), ("smollm2", "sea")])
def test_a_bad_word_is_forbidden_at_the_start_of_a_text_and_after_a_space(load: Load, kind: str, word: str) -> None:
    tokenizer = load(kind)
    bare, spaced = (tuple(tokenizer.encode_part(text, "text")) for text in (word, " " + word))
    assert bare[0] != spaced[0]
    assert len(bare) == len(spaced) == 1
    for written in (word, " " + word, "  " + word):
        assert bad_word_ids(tokenizer, [written]) == (bare, spaced)


def test_a_bad_word_whose_second_spelling_is_longer_has_one(byte_bpe: Tokenizer) -> None:
    """The word "zq" is two tokens, " zq" three: a space of its own comes first, and the other two stand behind it."""
    bare, spaced = (byte_bpe.encode_part(text, "text") for text in ("zq", " zq"))
    assert (len(bare), len(spaced)) == (2, 3)
    assert bad_word_ids(byte_bpe, ["zq"]) == (tuple(bare),)


def test_a_bad_word_that_is_given_twice_is_one(load: Load) -> None:
    tokenizer = load("spm-bpe")
    assert bad_word_ids(tokenizer, ["sea", " sea", "sea"]) == bad_word_ids(tokenizer, ["sea"])


@pytest.mark.parametrize("word", [" ", "\u2028 "])
def test_a_bad_word_without_a_token_is_refused(byte_bpe: Tokenizer, word: str) -> None:
    with pytest.raises(InvalidJob, match="has no tokens") as refused:
        bad_word_ids(byte_bpe, ["sea", word])
    assert refused.value.param == "bad_words"
