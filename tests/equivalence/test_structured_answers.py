"""Structured answers of real models: valid, and the same alone, in company, preempted and resumed anywhere."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from engine_driver import Answer, Ask, alone, engine_for, prompt, run, with_own_cache

from jitney.structured import StructuredOutputs
from jitney_worker.engine.engine import LocalEngine
from jitney_worker.engine.sequence import LogitRules
from jitney_worker.model.runner import TorchRunner
from jitney_worker.text.rules import StopRules
from jitney_worker.text.structures import Structures
from jitney_worker.text.tokenizer import Tokenizer

SCHEMA: dict[str, Any] = {
    "$defs": {"mark": {"type": "object", "properties": {"m": {"enum": ["x", "y"]}}, "required": ["m"]}},
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "code": {"type": "string", "pattern": "^[A-F]{2}-[0-9]{2}$"},
        "marks": {"type": "array", "items": {"$ref": "#/$defs/mark"}, "minItems": 1, "maxItems": 3},
        "even": {"type": "boolean"},
    },
    "required": ["name", "code", "marks", "even"],
    "additionalProperties": False,
}
SCHEMA["$defs"]["mark"]["additionalProperties"] = False
ASKED: dict[str, dict[str, Any]] = {
    "json": {"json": SCHEMA},
    "regex": {"regex": "[a-f]{6,9}(, [a-f]{6,9}){2}\\."},
    "choice": {"choice": ["a small town by the sea", "a small house by the sea shore", "the town"]},
    "grammar": {"grammar": 'start: call ("; " call)~1..2\ncall: NAME "(" NAME ")"\nNAME: /[a-d]{3,6}/'},
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.2, "seed": 3},
    "filtered": {"temperature": 1.5, "seed": 4, "min_p": 0.05, "top_k": 60, "top_p": 0.9, "num_logprobs": 2},
}


class Bench:
    """A runner with what structures need of its tokenizer."""

    def __init__(self, runner: TorchRunner, tokenizer: Tokenizer) -> None:
        self.runner, self.tokenizer = runner, tokenizer
        self.ends = frozenset(runner.eos_token_ids) | tokenizer.eos_token_ids
        self.rules = StopRules(tokenizer)
        self.structures = Structures(tokenizer, vocab_size=runner.vocab_size, eos_token_ids=self.ends)

    def ask(self, name: str, way: str, length: int = 12, **options: Any) -> Ask:
        given = {"stop_token_ids": self.ends, **WAYS[way], **options}
        structure = StructuredOutputs(**ASKED[name])
        tokens = prompt(length, seed=length, vocab_size=self.runner.vocab_size)
        return Ask(tokens, 200, options=given, structure=structure)

    def engine(self, **settings: Any) -> LocalEngine:
        return engine_for(with_own_cache(self.runner, 80), rules=self.rules, **{"num_blocks": 80, **settings})

    def run(self, asks: list[Ask], engine: LocalEngine | None = None, **more: Any) -> list[Answer]:
        return run(engine or self.engine(), asks, rules=self.rules, structures=self.structures, **more)

    def check(self, name: str, answer: Answer) -> None:
        assert (answer.finish_reason, answer.error) == ("stop", None)
        text = self.tokenizer.decode(answer.token_ids)
        if name == "json":
            jsonschema.validate(json.loads(text), SCHEMA)
            assert list(json.loads(text)) == list(SCHEMA["properties"])
        elif name == "choice":
            assert text in ASKED[name]["choice"]
        else:
            pattern = r"[a-d]{3,6}\([a-d]{3,6}\)(; [a-d]{3,6}\([a-d]{3,6}\)){1,2}"
            assert re.fullmatch(ASKED[name].get("regex", pattern), text)


@pytest.fixture(scope="session")
def bench(tiny: TorchRunner, tiny_directory: Callable[[str], Path]) -> Bench:
    return Bench(tiny, Tokenizer.load(tiny_directory("llama")))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ASKED)
def test_an_answer_has_its_structure_and_goes_on_from_anywhere_as_it_would_have(
    bench: Bench, name: str, way: str
) -> None:
    ask = bench.ask(name, way)
    (whole,) = bench.run([ask])
    bench.check(name, whole)
    for cut in range(1, len(whole.token_ids), max(1, len(whole.token_ids) // 6)):
        resumed = dataclasses.replace(ask, output_ids=tuple(whole.token_ids[:cut]))
        (rest,) = bench.run([resumed])
        assert (rest.token_ids, rest.finish_reason) == (whole.token_ids[cut:], "stop"), cut


@pytest.mark.parametrize("way", WAYS)
def test_beside_free_rows_nobody_notices_anybody(bench: Bench, way: str) -> None:
    """Free rows have the tokens that they have alone, and no mask is made for them."""
    structured = [bench.ask(name, way, length) for length, name in enumerate(ASKED, start=9)]
    free = [Ask(prompt(n, seed=n), 40, options={**WAYS[way], "choice": n}) for n in (3, 17, 30)]
    asks = [one for pair in zip(structured, [*free, free[0]], strict=True) for one in pair]
    found = bench.run(asks, every=2)
    for name, ask, answer in zip(ASKED, structured, found[::2], strict=True):
        bench.check(name, answer)
        assert answer.token_ids == bench.run([ask])[0].token_ids
    assert [answer.token_ids for answer in found[1::2]] == [alone(bench.runner, ask) for ask in [*free, free[0]]]


@pytest.mark.parametrize("way", WAYS)
def test_preempted_in_the_middle_an_answer_is_the_undisturbed_one(bench: Bench, way: str) -> None:
    asks = [bench.ask(name, way, length) for length, name in ((20, "json"), (21, "regex"), (22, "json"), (23, "json"))]
    expected = [bench.run([ask])[0] for ask in asks]
    engine = bench.engine(num_blocks=9, admission_reserve=0.0)
    asks = [dataclasses.replace(ask, max_tokens=120) for ask in asks]
    found = bench.run(asks, engine)
    assert engine.snapshot().num_preemptions >= 2
    assert [(one.token_ids, one.finish_reason) for one in found] == [(one.token_ids, "stop") for one in expected]


def test_three_choices_each_have_the_structure_and_a_course_of_their_own(bench: Bench) -> None:
    base = dataclasses.replace(bench.ask("json", "seeded"), group="job")
    asks = [dataclasses.replace(base, options={**base.options, "choice": choice}) for choice in range(3)]
    found = bench.run(asks)
    for answer in found:
        bench.check("json", answer)
    assert len({tuple(answer.token_ids) for answer in found}) == 3


def test_an_answer_whose_options_leave_nothing_fails_alone_by_name(bench: Bench) -> None:
    """Allowed ids that the structure never takes; and a structure that the library gives up on after a while."""
    only = {letter: LogitRules(allowed_token_ids=(bench.tokenizer.encode_part(letter, "text")[0],)) for letter in "za"}
    stuck = bench.ask("json", "greedy", rules=only["z"])
    costly = dataclasses.replace(
        bench.ask("regex", "greedy", rules=only["a"]), structure=StructuredOutputs(regex="((a{1,500}){1,500}){1,500}b")
    )
    beside = bench.ask("json", "greedy", 13)
    found = bench.run([stuck, costly, beside])
    assert [answer.error for answer in found] == ["no_token_left", "structure_failed", None]
    bench.check("json", found[2])


def test_the_answer_ends_with_its_structure_whatever_min_tokens_asks(bench: Bench) -> None:
    """As long as the structure goes on, the end is held off."""
    ask = dataclasses.replace(bench.ask("choice", "greedy"), structure=StructuredOutputs(choice=["ab"]))
    (short,) = bench.run([dataclasses.replace(ask, options={**ask.options, "min_tokens": 50})])
    assert (bench.tokenizer.decode(short.token_ids), short.finish_reason) == ("ab", "stop")
    ask = dataclasses.replace(ask, structure=StructuredOutputs(regex="[a-z]+"), max_tokens=60)
    (long,) = bench.run([dataclasses.replace(ask, options={**ask.options, "min_tokens": 50})])
    assert len(long.token_ids) >= 50


@pytest.mark.slow
@pytest.mark.parametrize("way", ["greedy", "seeded"])
def test_smollm2_answers_in_json_and_resumes_in_the_middle(
    smollm2: TorchRunner, smollm2_directory: Path, way: str
) -> None:
    bench = Bench(smollm2, Tokenizer.load(smollm2_directory))
    chat = bench.tokenizer.encode_chat([{"role": "user", "content": "Describe a small town as JSON."}])
    asks = [dataclasses.replace(bench.ask(name, way), prompt_ids=tuple(chat)) for name in ASKED]
    found = bench.run(asks)
    for name, answer in zip(ASKED, found, strict=True):
        bench.check(name, answer)
    half = len(found[0].token_ids) // 2
    (rest,) = bench.run([dataclasses.replace(asks[0], output_ids=tuple(found[0].token_ids[:half]))])
    assert rest.token_ids == found[0].token_ids[half:]
