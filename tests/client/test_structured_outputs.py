"""Structures on their way into a job: exactly one, bounded, and refused by name before anything is written."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from typing import Any

import orjson
import pytest

from jitney import AsyncClient, InvalidJob
from jitney.grammar import check, on_deep_stack
from jitney.messages import JobSpec
from jitney.structured import MAX_SCHEMA_DEPTH, MAX_STRUCTURE_BYTES, MAX_STRUCTURE_CHOICES, StructuredOutputs
from jitney.submission import digest_of, spec_from

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"zeta": {"type": "integer"}, "alpha": {"enum": ["é", '"']}},
    "required": ["zeta", "alpha"],
}


def asked(**structure: Any) -> JobSpec:
    return spec_from({"prompt": "x", "structured_outputs": structure})


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    "structure",
    [
        {"json": SCHEMA},
        {"json": json.dumps(SCHEMA)},
        {"json_object": True},
        {"regex": "a+/b"},
        {"choice": ["yes", "no"]},
        {"grammar": 'start: "a"'},
    ],
)
def test_a_structure_travels_in_the_body_and_comes_back_the_same(structure: dict[str, Any]) -> None:
    spec = asked(**structure)
    assert JobSpec.decode(spec.encode()) == spec
    structured = spec.sampling.structured_outputs
    assert structured is not None
    assert structured.kind == next(iter(structure))


def test_a_schema_keeps_the_order_of_its_properties_and_its_text_and_object_are_one_job() -> None:
    """A body's keys are sorted; an answer follows the order in which the properties were written."""
    spec = asked(json=SCHEMA)
    carried = orjson.loads(spec.encode())["sampling"]["structured_outputs"]["json"]
    assert list(orjson.loads(carried)["properties"]) == ["zeta", "alpha"]
    assert digest_of(spec) == digest_of(asked(json=json.dumps(SCHEMA, indent=4)))


@pytest.mark.parametrize(
    ("structure", "param", "words"),
    [
        ({}, "structured_outputs", "given: none"),
        ({"json_object": False}, "structured_outputs", "given: none"),
        ({"regex": "a", "choice": ["b"]}, "structured_outputs", "given: regex and choice"),
        ({"whitespace_pattern": " "}, "structured_outputs.whitespace_pattern", "unknown field"),
        ({"json": [1]}, "structured_outputs.json", "must be an object"),
        ({"json": "{"}, "structured_outputs.json", "is not JSON"),
        ({"json": {"const": float("nan")}}, "structured_outputs.json", "is not JSON"),
        ({"json": {"x-guidance": {"lenient": True}}}, "structured_outputs.json", "x-guidance"),
        ({"json": nested(MAX_SCHEMA_DEPTH + 1)}, "structured_outputs.json", f"more than {MAX_SCHEMA_DEPTH} deep"),
        ({"json": {"const": "x" * MAX_STRUCTURE_BYTES}}, "structured_outputs.json", f"at most {MAX_STRUCTURE_BYTES}"),
        ({"regex": ""}, "structured_outputs.regex", "must not be empty"),
        ({"regex": "é" * (MAX_STRUCTURE_BYTES // 2 + 1)}, "structured_outputs.regex", f"at most {MAX_STRUCTURE_BYTES}"),
        ({"regex": "\ud800"}, "structured_outputs.regex", "surrogate"),
        ({"grammar": 'start: "a"\n %llguidance {}'}, "structured_outputs.grammar", "%llguidance"),
        ({"choice": []}, "structured_outputs.choice", "at least 1, not 0"),
        ({"choice": ["a", ""]}, "structured_outputs.choice", "empty"),
        (
            {"choice": ["a"] * (MAX_STRUCTURE_CHOICES + 1)},
            "structured_outputs.choice",
            f"at most {MAX_STRUCTURE_CHOICES}",
        ),
        ({"choice": ["a" * MAX_STRUCTURE_BYTES, "b"]}, "structured_outputs.choice", f"at most {MAX_STRUCTURE_BYTES}"),
    ],
)
def test_what_is_no_structure_or_too_large_is_refused_by_name(
    structure: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(InvalidJob) as refused:
        asked(**structure)
    assert refused.value.param == param
    assert words in str(refused.value)
    assert len(str(refused.value)) < 300


def test_a_schema_that_contains_itself_is_refused() -> None:
    endless: dict[str, Any] = {}
    endless["anyOf"] = [endless, endless]
    with pytest.raises(InvalidJob, match="nested more than"):
        asked(json=endless)


def test_a_schema_at_the_very_limits_is_taken() -> None:
    asked(json=nested(MAX_SCHEMA_DEPTH))
    asked(regex="a" * MAX_STRUCTURE_BYTES)
    asked(choice=["a"] * MAX_STRUCTURE_CHOICES)


def test_ignored_end_tokens_contradict_a_structure() -> None:
    with pytest.raises(InvalidJob, match="ignore_eos=true") as refused:
        spec_from({"prompt": "x", "ignore_eos": True, "structured_outputs": {"json_object": True}})
    assert refused.value.param == "structured_outputs"


@pytest.mark.parametrize(
    ("structure", "words"),
    [
        ({"json": {"properties": {"a": {"not": {}}}}}, '["not"]'),
        ({"json": {"type": "array", "uniqueItems": True}}, '["uniqueItems"]'),
        ({"json": {"format": "phone", "type": "string"}}, "Unknown format: phone"),
        ({"json": {"$ref": "http://elsewhere/schema"}}, "elsewhere"),
        ({"json": {"type": "string", "pattern": "(?=a)b"}}, "look-around"),
        ({"json": {"enum": []}}, "Unsatisfiable"),
        ({"regex": "(unclosed"}, "unclosed group"),
        ({"grammar": "start: nobody"}, 'unknown name: "nobody"'),
        ({"grammar": 'root ::= "a"'}, "Expected token"),
    ],
)
async def test_what_cannot_be_followed_is_refused_early_with_the_reason(
    client: AsyncClient, structure: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidJob) as refused:
        await client.enqueue("x", structured_outputs=structure)
    field = f"structured_outputs.{next(iter(structure))}"
    assert (refused.value.param, refused.value.code) == (field, "unsupported_structure")
    assert str(refused.value).startswith(f"{field} cannot be followed: ")
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


HOSTILE = """
from jitney.grammar import check
from jitney.structured import StructuredOutputs
rules = "\\n".join(f"a{i}: a{i + 1}" for i in range(4_000))
check(StructuredOutputs(grammar=f'start: a0\\n{rules}\\na4000: "x"'))
schemas = {f"a{i}": {"properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}} for i in range(1_200)}
check(StructuredOutputs(json={"$defs": {**schemas, "a1200": {}}, "$ref": "#/$defs/a0"}))
print("alive")
"""


def test_a_structure_that_nests_thousands_of_rules_does_not_end_the_process() -> None:
    """The library recurses from rule to rule: on a usual stack this is a segmentation fault."""
    ended = subprocess.run([sys.executable, "-c", HOSTILE], capture_output=True, text=True, timeout=100, check=False)
    assert (ended.returncode, ended.stdout) == (0, "alive\n"), ended.stderr


def test_patterns_that_multiply_beyond_all_memory_take_nobody_along() -> None:
    """None of the library's limits stops it, and a thread that was given up would go on."""
    schema = {"type": "string", "allOf": [{"pattern": f"x{number}"} for number in range(24)]}
    with pytest.raises(InvalidJob, match=r"too much memory|longer than") as refused:
        check(StructuredOutputs.model_validate({"json": schema}))
    assert refused.value.code == "unsupported_structure"
    assert [thread for thread in threading.enumerate() if thread.name == "jitney-grammar"] == []


def test_compiling_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jitney.grammar.COMPILE_TIMEOUT_S", 0.0)
    done = threading.Event()
    with pytest.raises(InvalidJob, match="takes longer than 0 s") as refused:
        on_deep_stack(lambda: done.wait(60), StructuredOutputs(regex="a"))
    done.set()
    assert refused.value.param == "structured_outputs.regex"


WITHOUT = """
import sys
sys.modules["llguidance"] = None
from jitney.grammar import check, is_available
from jitney.structured import StructuredOutputs
check(StructuredOutputs(json={"not": {}}))
print(is_available())
"""


def test_a_client_without_the_library_leaves_the_judgement_to_the_worker() -> None:
    ended = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=100, check=False)
    assert ended.stdout == "False\n", ended.stderr
