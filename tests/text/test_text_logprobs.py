"""Log probabilities as they stand in an event: valid JSON, and bytes that add up to the answer (B24)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass

import orjson
import pytest

from jitney_worker.text.logprobs import LOWEST, LogprobSpeller
from jitney_worker.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Chosen:
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None


def refuse(constant: str) -> float:
    raise AssertionError(f"{constant} is not JSON")


def test_a_token_and_its_rivals_have_text_bytes_and_numbers(byte_bpe: Tokenizer) -> None:
    (sea,), (word,) = byte_bpe.encode_prompt("\n"), byte_bpe.encode_prompt("a")
    entries = LogprobSpeller(byte_bpe)([sea], [Chosen(-0.5, ((sea, -0.5), (word, -1.25)))])
    newline = {"token_id": sea, "token": "\n", "logprob": -0.5, "bytes": [10]}
    assert entries == [newline | {"top": [newline, {"token_id": word, "token": "a", "logprob": -1.25, "bytes": [97]}]}]


def test_a_rank_stands_where_somebody_has_counted_it(byte_bpe: Tokenizer) -> None:
    counted, uncounted = LogprobSpeller(byte_bpe)([5, 6], [Chosen(-1.0, ((7, -0.5),), rank=9), Chosen(-1.0)])
    assert (counted["rank"], "rank" in counted["top"][0], "rank" in uncounted) == (9, False, False)


@pytest.mark.parametrize("value", [-math.inf, math.nan, -1e30])
def test_what_json_has_no_word_for_becomes_the_lowest_number(byte_bpe: Tokenizer, value: float) -> None:
    entries = LogprobSpeller(byte_bpe)([5], [Chosen(value, ((5, value),))])
    assert [entries[0]["logprob"], entries[0]["top"][0]["logprob"]] == [LOWEST, LOWEST] == [-9999.0] * 2
    assert json.loads(orjson.dumps(entries), parse_constant=refuse) == json.loads(json.dumps(entries, allow_nan=False))


@pytest.mark.parametrize("kind", ["byte-bpe", "smollm2"])
def test_the_bytes_of_all_tokens_are_the_bytes_of_the_answer(load: Callable[[str], Tokenizer], kind: str) -> None:
    """Also where a token is part of a character: its name is escaped, its bytes are true."""
    tokenizer = load(kind)
    text = " caf\u00e9 \U0001f468\u200d\U0001f469 \ud55c"
    ids = tokenizer.encode_prompt(text)
    entries = LogprobSpeller(tokenizer)(ids, [Chosen(-1.0)] * len(ids))
    assert bytes(byte for entry in entries for byte in entry["bytes"]) == text.encode()
    assert [entry["top"] for entry in entries] == [[]] * len(ids)
    for entry in entries:
        assert entry["token"] == bytes(entry["bytes"]).decode("utf-8", "backslashreplace")
    assert any("\\x" in entry["token"] for entry in entries)


def test_a_space_in_front_belongs_to_the_token_and_a_special_token_has_its_name(
    load: Callable[[str], Tokenizer],
) -> None:
    tokenizer = load("spm-bpe")
    ids = [*tokenizer.encode_prompt("a")[1:], 2, 10**6]
    spelled = [entry["token"] for entry in LogprobSpeller(tokenizer)(ids, [Chosen(0.0)] * len(ids))]
    assert "".join(spelled) == " a</s>"
    assert spelled[-2:] == ["</s>", ""]


def test_a_byte_of_a_fallback_token_is_that_byte_even_zero(load: Callable[[str], Tokenizer]) -> None:
    tokenizer = load("spm-bpe")
    ids = [number for number in range(tokenizer.vocab_size) if tokenizer.pieces.token(number) in ("<0x00>", "<0xE2>")]
    spelled = LogprobSpeller(tokenizer)(ids, [Chosen(0.0)] * 2)
    assert [(entry["token"], entry["bytes"]) for entry in spelled] == [("\0", [0]), ("\\xe2", [0xE2])]


def test_a_token_without_its_log_probability_is_a_fault(byte_bpe: Tokenizer) -> None:
    with pytest.raises(ValueError, match="shorter"):
        LogprobSpeller(byte_bpe)([5, 6], [Chosen(-1.0)])
