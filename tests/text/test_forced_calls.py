"""Forced calls without a model: whatever is drawn from the masks is calls, with arguments of their schemas."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
import small_tokenizers as small
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.text import tool_templates as templates
from tests.text.test_structures import structures_of, walk
from tests.text.tool_templates import TOOLS

from jitney.call_formats import CALL_FORMATS
from jitney.call_reader import read_answer
from jitney.errors import InvalidJob
from jitney.forced_calls import MAX_FORCED_CALLS, check_forced
from jitney.messages import JobSpec
from jitney.tool_calls import ToolCall
from jitney.tools import parameters_of
from jitney_worker.text.calls import with_calls
from jitney_worker.text.spelling import Speller
from jitney_worker.text.tokenizer import Tokenizer

TEMPLATES = {
    "hermes": templates.HERMES,
    "llama": templates.LLAMA,
    "mistral": templates.MISTRAL,
    "json": templates.UNKNOWN,
}
Load = Callable[[str], Tokenizer]


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """`family("hermes")`: a tokenizer with a template of that family; Mistral's marker is one of its special tokens."""
    kept: dict[str, Tokenizer] = {}

    def made(name: str) -> Tokenizer:
        if name not in kept:
            directory = small.byte_bpe(tmp_path_factory.mktemp(name), template=TEMPLATES[name])
            if name == "mistral":
                spec = json.loads((directory / "tokenizer.json").read_text())
                spec["added_tokens"][3]["content"] = "[TOOL_CALLS]"
                spec["model"]["vocab"] = {
                    "[TOOL_CALLS]" if token == "<|function_call|>" else token: number
                    for token, number in spec["model"]["vocab"].items()
                }
                (directory / "tokenizer.json").write_text(json.dumps(spec))
            kept[name] = Tokenizer.load(directory)
        return kept[name]

    return made


def job(tools: list[dict[str, Any]], **fields: Any) -> JobSpec:
    messages = [{"role": "user", "content": "x"}]
    return JobSpec.build({"messages": messages, "tools": tools, "tool_choice": "required", **fields})


def drawn(tokenizer: Tokenizer, spec: JobSpec, seed: int) -> tuple[str, tuple[ToolCall, ...]] | None:
    """The text of an answer that a model without any sense gave, and its calls; None if it did not end."""
    spec, terms = with_calls(spec, tokenizer)
    assert terms is not None
    assert spec.sampling.structured_outputs is not None
    said = walk(
        structures_of(tokenizer).begin(spec.sampling.structured_outputs), tokenizer, random.Random(seed), most=3_000
    )
    if said is None:
        return None
    stream = tokenizer.pieces.stream(skip_special_tokens=spec.sampling.skip_special_tokens)
    text = stream.push(*said) + stream.flush()
    content, calls = read_answer(terms, "q.job", 0, text)
    assert content is None, text
    return text, calls


def check_calls(calls: tuple[ToolCall, ...], tools: list[dict[str, Any]]) -> None:
    schemas = {tool["function"]["name"]: parameters_of(tool) for tool in tools}
    assert calls
    for call in calls:
        arguments = json.loads(call.arguments)
        assert isinstance(arguments, dict)
        jsonschema.validate(arguments, schemas[call.name])


@pytest.mark.parametrize("name", TEMPLATES)
def test_forced_calls_are_calls_of_the_given_tools_in_the_models_own_form(family: Load, name: str) -> None:
    tokenizer, counts, names = family(name), set[int](), set[str]()
    for seed in range(30):
        found = drawn(tokenizer, job(TOOLS), seed)
        if found is not None:
            text, calls = found
            check_calls(calls, TOOLS)
            counts.add(len(calls))
            names |= {call.name for call in calls}
            assert text.startswith(CALL_FORMATS[name].marker + CALL_FORMATS[name].opening)
            assert text.endswith(CALL_FORMATS[name].closing or "}")
    assert names == {"weather", "clock"}
    assert 1 in counts
    assert max(counts) <= (1 if name == "llama" else MAX_FORCED_CALLS)
    assert len(counts) > 1 or name == "llama"


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": {"type": "function", "function": {"name": "clock"}}},
        {
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "clock"}}]},
            },
            "parallel_tool_calls": False,
        },
    ],
)
def test_a_named_function_is_called_once_and_no_other(family: Load, name: str, fields: dict[str, Any]) -> None:
    for seed in range(5):
        found = drawn(family(name), job(TOOLS, **fields), seed)
        assert found is not None
        assert [(call.name, call.arguments) for call in found[1]] == [("clock", "{}")]


NAMES = st.text("abz_ \"\\é}'", min_size=1, max_size=4)
VALUES = st.recursive(
    st.sampled_from(
        [
            {"type": "integer", "minimum": -3, "maximum": 90},
            {"type": "boolean"},
            {"type": "string", "maxLength": 5},
            {"enum": ["}", '"', "</tool_call>", 3, None]},
            {"type": "string", "pattern": "^[A-C]{1,3}$"},
            {"type": ["null", "boolean"]},
        ]
    ),
    lambda inner: st.one_of(
        st.builds(lambda items: {"type": "array", "items": items, "maxItems": 2}, inner),
        st.builds(lambda members: objects_of(members), st.dictionaries(NAMES, inner, max_size=2)),
    ),
    max_leaves=4,
)


def objects_of(members: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": members, "required": [*members], "additionalProperties": False}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from([*TEMPLATES]),
    schemas=st.lists(st.dictionaries(NAMES, VALUES, max_size=3).map(objects_of), min_size=1, max_size=2),
    parallel=st.sampled_from([None, False]),
    seed=st.integers(0, 100),
)
def test_arguments_parse_and_follow_their_schema_whatever_it_is(
    family: Load, name: str, schemas: list[dict[str, Any]], parallel: bool | None, seed: int
) -> None:
    tools = [
        {"type": "function", "function": {"name": f"f-{number}", "parameters": schema}}
        for number, schema in enumerate(schemas)
    ]
    found = drawn(family(name), job(tools, parallel_tool_calls=parallel), seed)
    if found is not None:
        check_calls(found[1], tools)
        assert parallel is None or len(found[1]) == 1


def test_a_marker_that_is_a_special_token_is_said_as_that_token_and_shown(family: Load) -> None:
    tokenizer = family("mistral")
    spec, _ = with_calls(job(TOOLS), tokenizer)
    assert spec.sampling.structured_outputs is not None
    said = walk(
        structures_of(tokenizer).begin(spec.sampling.structured_outputs), tokenizer, random.Random(1), most=3_000
    )
    assert said is not None
    assert said[0] == tokenizer.special_ids["[TOOL_CALLS]"] == 3
    assert not spec.sampling.skip_special_tokens
    assert with_calls(job(TOOLS, tool_choice="auto"), tokenizer)[0].sampling.skip_special_tokens is False
    assert with_calls(job(TOOLS), family("hermes"))[0].sampling.skip_special_tokens is True
    assert Speller(tokenizer).push(3).text == ""


def test_free_calls_are_held_to_nothing(family: Load) -> None:
    spec, terms = with_calls(job(TOOLS, tool_choice="auto"), family("hermes"))
    assert spec.sampling.structured_outputs is None
    assert terms is not None
    plain = JobSpec.build({"prompt": "x"})
    assert with_calls(plain, family("hermes")) == (plain, None)


def test_schemas_that_cannot_be_followed_are_refused_where_they_would_have_to_be(family: Load) -> None:
    tools = [{"type": "function", "function": {"name": "odd", "parameters": {"type": "object", "not": {}}}}]
    check_forced(job(tools, tool_choice="auto").tool_use)
    with pytest.raises(InvalidJob, match=r"parameters of 'odd' cannot be followed.*\"not\"") as refused:
        check_forced(job(tools).tool_use)
    assert (refused.value.param, refused.value.code) == ("tools", "unsupported_structure")


def test_tools_that_are_together_too_large_to_be_forced_are_refused_by_their_name(family: Load) -> None:
    large = {"type": "object", "properties": {"x": {"enum": ["y" * 40_000]}}}
    tools = [{"type": "function", "function": {"name": name, "parameters": large}} for name in ("a", "b")]
    with pytest.raises(InvalidJob, match="at most 65536") as refused:
        with_calls(job(tools), family("hermes"))
    assert refused.value.param == "tools"
