"""Structured answers without a model: whatever tokens are taken from the masks, the text is what was asked for."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import numpy as np
import pytest

from jitney.errors import InvalidJob, JitneyError
from jitney.structured import StructuredOutputs
from jitney_worker.text import structures as module
from jitney_worker.text.rules import StopRules
from jitney_worker.text.structures import Structure, Structures
from jitney_worker.text.tokenizer import Tokenizer

Load = Callable[[str], Tokenizer]

KINDS = ("byte-bpe", "spm-bpe", "unigram", "unigram-bytes", "fused-bytes", "smollm2")
ADDRESS: dict[str, Any] = {
    "type": "object",
    "properties": {"town": {"enum": ["sea", "shore"]}, "zip": {"type": "string", "pattern": "^[0-9]{3}$"}},
    "required": ["town", "zip"],
    "additionalProperties": False,
}
SCHEMA: dict[str, Any] = {
    "$defs": {"address": ADDRESS},
    "type": "object",
    "properties": {
        "zeta": {"type": "integer", "minimum": 3, "maximum": 40},
        "alpha": {"type": "string", "maxLength": 6},
        "home": {"$ref": "#/$defs/address"},
        "tags": {"type": "array", "items": {"enum": ["a", "b", None, True]}, "minItems": 1, "maxItems": 3},
        "more": {"anyOf": [{"const": "no"}, {"type": "array", "items": {"$ref": "#/$defs/address"}, "maxItems": 1}]},
    },
    "required": ["zeta", "alpha", "home", "tags", "more"],
    "additionalProperties": False,
}
GRAMMAR = """\
start: call (", " call)~1..2
call: NAME "(" NAME ")"
NAME: /[a-d]{1,3}/
"""
ASKED: dict[str, dict[str, Any]] = {
    "json": {"json": SCHEMA},
    "regex": {"regex": "(sea|shell)s?, [a-d]{2,4}"},
    "choice": {"choice": ["sea", "sea shore", "a small town", "Grüße"]},
    "grammar": {"grammar": GRAMMAR},
}


def fits(kind: str, text: str) -> None:
    if kind == "json":
        answer = json.loads(text)
        jsonschema.validate(answer, SCHEMA)
        assert list(answer) == list(SCHEMA["properties"])
        assert json.dumps(answer, separators=(",", ":"), ensure_ascii=False) == text or "\\u" in text
    elif kind == "json_object":
        assert isinstance(json.loads(text), dict)
    elif kind == "regex":
        assert re.fullmatch(ASKED[kind]["regex"], text)
    elif kind == "choice":
        assert text in ASKED[kind]["choice"]
    else:
        assert re.fullmatch(r"[a-d]{1,3}\([a-d]{1,3}\)(, [a-d]{1,3}\([a-d]{1,3}\)){1,2}", text)


def structures_of(tokenizer: Tokenizer, **options: Any) -> Structures:
    given: dict[str, Any] = {"vocab_size": tokenizer.vocab_size, "eos_token_ids": tokenizer.eos_token_ids}
    return Structures(tokenizer, **(given | options))


def allowed(structure: Structure) -> list[int]:
    bits = np.unpackbits(np.frombuffer(structure.mask(), np.uint8), bitorder="little")
    return [int(token_id) for token_id in np.flatnonzero(bits)]


def walk(structure: Structure, tokenizer: Tokenizer, draw: random.Random, most: int = 400) -> list[int] | None:
    """Tokens drawn from the masks until the answer ends; None if it goes on after so many."""
    said: list[int] = []
    while len(said) < most:
        token_id = draw.choice(allowed(structure))
        if token_id in tokenizer.eos_token_ids:
            return said
        said.append(token_id)
        if structure.advance(token_id):
            return said
    return None


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_drawn_from_the_masks_is_what_was_asked_for(load: Load, kind: str, name: str) -> None:
    tokenizer = load(kind)
    structures = structures_of(tokenizer)
    num_ended = 0
    for seed in range(40):
        said = walk(structures.begin(StructuredOutputs(**ASKED[name])), tokenizer, random.Random(seed))
        if said is not None:
            num_ended += 1
            fits(name, tokenizer.decode(said))
    assert num_ended > 35


@pytest.mark.parametrize("kind", ["byte-bpe", "spm-bpe"])
def test_a_json_object_of_any_kind_is_one(load: Load, kind: str) -> None:
    tokenizer = load(kind)
    structures = structures_of(tokenizer)
    walks = [
        walk(structures.begin(StructuredOutputs(json_object=True)), tokenizer, random.Random(seed), most=60)
        for seed in range(60)
    ]
    ended = [said for said in walks if said is not None]
    assert len(ended) > 5
    for said in ended:
        fits("json_object", tokenizer.decode(said))


def test_json_is_compact(byte_bpe: Tokenizer) -> None:
    structure = structures_of(byte_bpe).begin(StructuredOutputs(json=SCHEMA))
    for token_id in byte_bpe.encode_part('{"zeta":', "text"):
        assert not structure.advance(token_id)
    shown = {byte_bpe.pieces.bytes_of(token_id)[:1] for token_id in allowed(structure)}
    assert shown == {b"1", b"2", b"3", b"4", b"5", b"6", b"7", b"8", b"9"}


def test_the_end_may_come_only_when_the_structure_is_whole(byte_bpe: Tokenizer) -> None:
    structure = structures_of(byte_bpe).begin(StructuredOutputs(regex="ab?c?"))
    a, b, c = (byte_bpe.encode_part(letter, "text")[0] for letter in "abc")
    ends = byte_bpe.eos_token_ids
    assert not ends & set(allowed(structure))
    assert not structure.advance(a)
    assert ends <= set(allowed(structure))
    assert not structure.advance(b)
    assert structure.advance(c)


def test_special_tokens_are_no_text_for_a_structure(byte_bpe: Tokenizer) -> None:
    """What is hidden from an answer must not fill a string of it."""
    structure = structures_of(byte_bpe).begin(StructuredOutputs(regex="(?s:.*)"))
    special = {token_id for token_id in range(byte_bpe.vocab_size) if byte_bpe.pieces.is_special(token_id)}
    assert set(allowed(structure)) & special == byte_bpe.eos_token_ids


@pytest.mark.parametrize("name", ASKED)
def test_a_state_made_from_what_was_said_is_the_state_that_said_it(byte_bpe: Tokenizer, name: str) -> None:
    structures, asked = structures_of(byte_bpe), StructuredOutputs(**ASKED[name])
    said = walk(structures.begin(asked), byte_bpe, random.Random(3))
    assert said is not None
    living = structures.begin(asked)
    for number, token_id in enumerate(said):
        assert structures_of(byte_bpe).begin(asked, said[:number]).mask() == living.mask()
        living.advance(token_id)


def test_two_states_of_one_structure_do_not_disturb_each_other(byte_bpe: Tokenizer) -> None:
    structures, asked = structures_of(byte_bpe), StructuredOutputs(**ASKED["json"])
    alone = walk(structures.begin(asked), byte_bpe, random.Random(5))
    first, second = structures.begin(asked), structures.begin(asked)
    walk(second, byte_bpe, random.Random(6))
    assert walk(first, byte_bpe, random.Random(5)) == alone


def test_a_structure_is_compiled_once_and_so_many_are_kept(
    byte_bpe: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str | None] = []

    def counting(compiles: Callable[[], Any], asked: StructuredOutputs) -> Any:
        compiled.append(asked.regex)
        return compiles()

    monkeypatch.setattr(module, "on_deep_stack", counting)
    monkeypatch.setattr(module, "MAX_KEPT", 2)
    structures = structures_of(byte_bpe)
    for regex in ("a", "b", "a", "c", "a", "b"):
        structures.begin(StructuredOutputs(regex=regex))
    assert compiled == ["a", "b", "c", "b"]


def test_the_tokenizer_is_not_asked_during_an_answer(byte_bpe: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step would otherwise wait for it, and some vocabularies put a space before every text."""
    structure = structures_of(byte_bpe).begin(StructuredOutputs(json=SCHEMA))

    def asked(text: str, name: str) -> list[int]:
        raise AssertionError(text)

    monkeypatch.setattr(byte_bpe, "encode_part", asked)
    assert walk(structure, byte_bpe, random.Random(1)) is not None


def test_a_structure_that_no_tokenizer_can_follow_is_refused_with_the_reason(byte_bpe: Tokenizer) -> None:
    with pytest.raises(InvalidJob, match='Unimplemented keys: \\["not"\\]') as refused:
        structures_of(byte_bpe).begin(StructuredOutputs(json={"not": {}}))
    assert refused.value.param == "structured_outputs.json"


def test_tokens_that_do_not_fit_are_another_builds(byte_bpe: Tokenizer) -> None:
    with pytest.raises(JitneyError, match="another build"):
        structures_of(byte_bpe).begin(StructuredOutputs(regex="a+"), byte_bpe.encode_part("aab", "text"))


def test_what_the_vocabulary_cannot_spell_fails_instead_of_ending(load: Load) -> None:
    """The library would let the answer end there, unfinished."""
    tokenizer = load("wordpiece")
    structure = structures_of(tokenizer).begin(StructuredOutputs(json_object=True))
    assert allowed(structure) == []
    assert structure.failure is not None
    assert "no token of this model fits" in structure.failure


@pytest.mark.parametrize(
    "costly", [{"regex": "((a{1,500}){1,500}){1,500}"}, {"grammar": 'start: s\ns: s s | s s s | "a"'}]
)
def test_a_structure_that_becomes_too_costly_fails_by_name(byte_bpe: Tokenizer, costly: dict[str, Any]) -> None:
    structure = structures_of(byte_bpe).begin(StructuredOutputs(**costly))
    (letter,) = byte_bpe.encode_part("a", "text")
    num_said = 0
    while letter in allowed(structure):
        assert not structure.advance(letter)
        num_said += 1
        assert num_said < 1_000
    assert structure.failure is not None
    assert structure.failure.startswith("structured_outputs cannot be followed any further: ")
    assert "\n" not in structure.failure


def test_a_mask_is_as_long_as_the_models_vocabulary_and_allows_nothing_beyond_the_tokenizers(
    byte_bpe: Tokenizer,
) -> None:
    more = byte_bpe.vocab_size + 100
    structure = structures_of(byte_bpe, vocab_size=more).begin(StructuredOutputs(regex="(?s:.*)"))
    assert len(structure.mask()) * 8 >= more
    assert max(allowed(structure)) < byte_bpe.vocab_size
    fewer = structures_of(byte_bpe, vocab_size=200, eos_token_ids=[300]).begin(StructuredOutputs(regex="(?s:.*)"))
    assert set(allowed(fewer)) - {200} <= set(range(200))


def test_a_choice_that_is_whole_ends_and_one_with_stop_strings_ends_at_whichever_comes_first(
    byte_bpe: Tokenizer,
) -> None:
    structures, rules = structures_of(byte_bpe), StopRules(byte_bpe)
    asked = StructuredOutputs(choice=["abc", "abd"])
    rules.register("whole", [], structure=structures.begin(asked))
    rules.register("stopped", ["b"], structure=structures.begin(asked))
    rules.register("plain", ["z"])
    for name in ("whole", "stopped", "plain", "unknown"):
        rules.start(name, [])
    a, b, c = (byte_bpe.encode_part(letter, "text")[0] for letter in "abc")
    assert rules.mask("plain") is None
    assert rules.mask("unknown") is None
    assert rules.mask("whole") is not None
    assert [rules.advance("whole", token_id) for token_id in (a, b, c)] == [None, None, "stop"]
    assert [rules.advance("stopped", token_id) for token_id in (a, b)] == [None, "stop"]
    assert rules.failure("whole") is None
    rules.drop("whole")
    assert rules.mask("whole") is None


ODD = [
    'a"b',
    "a\\b",
    "a/b",
    "é",
    "\U0001f600",
    "x\ny",
    "\\d+",
    "a|b",
    "[x]",
    "(",
    " lead",
    "\t",
    "\0",
    "\x7f",
    "\u2028",
]


def test_choices_are_taken_to_the_letter(byte_bpe: Tokenizer) -> None:
    structures = structures_of(byte_bpe)
    for text in ODD:
        said = byte_bpe.encode_part(text, "text")
        assert set(allowed(structures.begin(StructuredOutputs(choice=ODD), said))) >= byte_bpe.eos_token_ids
    for text in ("aab", "[y]"):
        with pytest.raises(JitneyError, match="does not fit"):
            structures.begin(StructuredOutputs(choice=ODD), byte_bpe.encode_part(text, "text"))
