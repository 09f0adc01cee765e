"""Stop strings: nothing of them is shown, nothing more is held back, the earliest wins (B31, B33)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jitney.errors import InvalidJob
from jitney.sampling import SamplingParams, sampling_params
from jitney_worker.text.rules import StopRules
from jitney_worker.text.spelling import Speller
from jitney_worker.text.stops import StopStrings
from jitney_worker.text.tokenizer import Tokenizer


class Words:
    """Ids that stand for whole words, in place of a tokenizer's: the tokens of a case, exactly as it has them."""

    def __init__(self, *words: str) -> None:
        self.words = words

    @property
    def pieces(self) -> Words:
        return self

    def stream(self, *, skip_special_tokens: bool = True) -> Words:
        return self

    def push(self, token_id: int) -> str:
        return self.words[token_id]

    def flush(self) -> str:
        return ""


def spoken(stop: list[str], *words: str) -> tuple[list[str], bool]:
    """What each word showed, what the end flushed, and whether a stop string ended it."""
    speller = Speller(Words(*words), stop)
    shown = []
    for number in range(len(words)):
        shown.append(speller.push(number).text)
        if speller.stopped:
            break
    return [*shown, speller.flush()], speller.stopped


def test_a_stop_string_over_several_tokens_never_shows() -> None:
    words = ("al", "pha ", "be", "ta", " gam", "ma del")
    assert spoken(["beta gamma"], *words) == (["al", "pha ", "", "", "", "", ""], True)


def test_text_before_a_match_in_the_same_token_shows() -> None:
    assert spoken(["END"], "one", " two EN", "D three") == (["one", " two ", "", ""], True)


def test_a_tail_that_turns_out_to_be_something_else_shows_at_once() -> None:
    assert spoken(["beta gamma"], "be", "ta ", "x", "be") == (["", "", "beta x", "", "be"], False)


def test_a_long_stop_string_that_never_comes_holds_nothing_back() -> None:
    assert spoken(["#" * 40], "a", "b", "c") == (["a", "b", "c", ""], False)


@pytest.mark.parametrize(
    ("stop", "text", "shown"),
    [
        (["ab", "abc"], "xabcd", "x"),  # ab is complete first
        (["abc", "ab"], "xabcd", "x"),  # the order in the list does not count
        (["bcd", "abcd"], "xabcd", "x"),  # complete together: the longest
        (["abcd", "bc"], "xabcd", "xa"),  # bc is complete before abcd
        (["aab"], "aaab", "a"),  # the match begins inside a failed one
        (["abab"], "abaabab", "aba"),
        (["\n\n"], "a\n\n\nb", "a"),
        (["é"], "caf\u0065\u0301 é", "caf\u0065\u0301 "),  # characters, not what they look like
        (["👍"], "a😀👍😀", "a😀"),
        (["😀👍"], "👍😀😀👍", "👍😀"),
    ],
)
def test_the_earliest_match_wins_however_the_text_is_cut(stop: list[str], text: str, shown: str) -> None:
    for size in range(1, len(text) + 1):
        words = [text[start : start + size] for start in range(0, len(text), size)]
        pieces, stopped = spoken(stop, *words)
        assert ("".join(pieces), stopped) == (shown, True)


def first_match(stop: list[str], text: str) -> str | None:
    """The rule as it is written: up to the first character at which any string is complete; the longest counts."""
    for end in range(1, len(text) + 1):
        complete = [string for string in stop if text[:end].endswith(string)]
        if complete:
            return text[: end - max(map(len, complete))]
    return None


LETTERS = st.text("abc", max_size=5)


@settings(max_examples=500, deadline=None)
@given(st.lists(LETTERS.filter(bool), min_size=1, max_size=4), st.lists(LETTERS, max_size=12))
def test_what_shows_is_the_rule_and_what_is_held_is_the_longest_beginning(stop: list[str], words: list[str]) -> None:
    speller, text, shown = Speller(Words(*words), stop), "", ""
    for number, word in enumerate(words):
        text += word
        spelled = speller.push(number)
        shown += spelled.text
        wanted = first_match(stop, text)
        assert spelled.stopped == (wanted is not None)
        if wanted is not None:
            assert shown == wanted
            assert speller.flush() == ""
            return
        tails = [text[-n:] for n in range(1, len(text) + 1) if any(s.startswith(text[-n:]) for s in stop)]
        assert text[len(shown) :] == max(tails, key=len, default="")
    assert shown + speller.flush() == text


def test_stop_strings_made_to_fail_late_do_not_make_the_worker_crawl() -> None:
    """Each of 20,000 characters fails all sixteen at their very end: to read them again would take minutes."""
    strings = StopStrings(["a" * (1_000 - n) + "b" for n in range(16)])
    assert strings.feed("a" * 20_000) is None
    assert strings.held == 1_000
    found = strings.feed("b")
    assert found is not None
    assert found.length == 1_001


def test_the_same_stop_string_twice_is_one() -> None:
    assert len(StopStrings(["a", "a", "b"])._strings) == 2


def test_the_prompt_never_matches(byte_bpe: Tokenizer) -> None:
    """A speller knows only what is generated, so a stop string that the prompt ends with does not stop."""
    prompt = byte_bpe.encode_prompt("tell me: the sea")
    speller = Speller(byte_bpe, stop=["the sea shore"])
    answer = byte_bpe.encode_prompt(" shore is far")
    assert speller.replay(answer) + speller.flush() == " shore is far"
    assert byte_bpe.decode([*prompt, *answer]) == "tell me: the sea shore is far"


def test_special_tokens_are_not_text_that_could_match(byte_bpe: Tokenizer) -> None:
    speller = Speller(byte_bpe, stop=["<|im_end|>"])
    assert not speller.push(2).stopped


def test_a_stop_string_is_found_over_the_bytes_of_a_character(byte_bpe: Tokenizer) -> None:
    ids = [*byte_bpe.encode_prompt("a"), *byte_bpe.encode_prompt("😀"), *byte_bpe.encode_prompt("b")]
    speller = Speller(byte_bpe, stop=["😀b"])
    assert speller.replay(ids) == "a"
    assert speller.stopped


# For the engine


def test_the_rules_stop_at_the_token_at_which_the_speller_stops(byte_bpe: Tokenizer) -> None:
    ids = byte_bpe.encode_prompt("the sea shells by the sea shore")
    rules, speller = StopRules(byte_bpe), Speller(byte_bpe, stop=["sea sh", "shore"])
    rules.register("q.1/0", ["sea sh", "shore"])
    rules.start("q.1/0", [])
    for token_id in ids:
        reason = rules.advance("q.1/0", token_id)
        assert (reason == "stop") == speller.push(token_id).stopped
        if reason:
            break
    assert reason == "stop"


@pytest.mark.parametrize("num_before", range(8))
def test_the_rules_go_on_where_an_earlier_attempt_stopped(byte_bpe: Tokenizer, num_before: int) -> None:
    """The match may have begun in tokens that another worker made."""
    ids = [byte_bpe.encode_prompt(letter)[0] for letter in "ab sea c"]
    rules = StopRules(byte_bpe)
    rules.register("s", ["b sea"])
    rules.start("s", ids[:num_before])
    reasons = [rules.advance("s", token_id) for token_id in ids[num_before:6]]
    assert [reason for reason in reasons if reason] == (["stop"] if num_before < 6 else [])
    assert rules.advance("s", ids[6]) == "stop"  # it stays stopped


def test_sequences_do_not_see_each_other(byte_bpe: Tokenizer) -> None:
    b, e = (byte_bpe.encode_prompt(letter)[0] for letter in "be")
    rules = StopRules(byte_bpe)
    for name, stop in (("one", ["be"]), ("two", ["be"]), ("three", ["e"])):
        rules.register(name, stop)
        rules.start(name, [])
    assert rules.advance("one", b) is None
    assert rules.advance("two", e) is None
    assert rules.advance("three", e) == "stop"
    assert rules.advance("one", e) == "stop"


def test_a_sequence_that_is_gone_leaves_nothing_behind(byte_bpe: Tokenizer) -> None:
    rules = StopRules(byte_bpe)
    rules.register("started", ["a"])
    rules.start("started", [])
    rules.drop("started")
    rules.register("never added", ["a"])
    rules.forget("never added")
    rules.register("without stop strings", [])
    assert (rules._registered, rules._started) == ({}, {})


def test_a_sequence_forgotten_before_the_engine_takes_it_in_is_harmless(byte_bpe: Tokenizer) -> None:
    rules = StopRules(byte_bpe)
    rules.register("s", ["a"])
    rules.forget("s")
    rules.start("s", [1, 2])
    assert rules.advance("s", byte_bpe.encode_prompt("a")[0]) is None
    rules.drop("s")


# The shapes in which `stop` arrives


@pytest.mark.parametrize(
    ("given", "meant"), [(None, ()), ([], ()), ("x", ("x",)), (["x"], ("x",)), (["a"] * 16, ("a",) * 16)]
)
def test_a_stop_is_nothing_a_string_or_a_list(given: Any, meant: tuple[str, ...]) -> None:
    assert sampling_params(stop=given) == SamplingParams(stop=meant)


@pytest.mark.parametrize("given", ["", [""], [None], ["a", ""], [7], {"a": 1}, ["a"] * 17, ["a" * 1_025]])
def test_any_other_stop_is_refused_by_name(given: Any) -> None:
    with pytest.raises(InvalidJob) as refused:
        sampling_params(stop=given)
    assert str(refused.value.param).startswith("stop")


@pytest.mark.parametrize("given", [[None], [-1], list(range(257)), [1.5]])
def test_stop_token_ids_are_ids(given: Any) -> None:
    with pytest.raises(InvalidJob) as refused:
        sampling_params(stop_token_ids=given)
    assert str(refused.value.param).startswith("stop_token_ids")
