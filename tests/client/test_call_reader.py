"""Text into words and calls: every form, however it is cut, and never a word lost."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitney.call_formats import CallTerms
from jitney.call_reader import CallReader, read_answer
from jitney.tool_calls import Argued, Called, Said, call_id

ADD = '{"name": "add", "arguments": {"a": 1, "b": "}{\\""}}'
ADD_ARGUMENTS = '{"a": 1, "b": "}{\\""}'
LOOK = '{"name": "look_up", "arguments": {}}'

READ: list[tuple[str, str, str | None, list[tuple[str, str]]]] = [
    ("hermes", "Hello.", "Hello.", []),
    ("hermes", "", "", []),
    ("hermes", " a <tool_", " a <tool_", []),
    ("hermes", f"<tool_call>\n{ADD}\n</tool_call>", None, [("add", ADD_ARGUMENTS)]),
    ("hermes", f"Let me.\n\n<tool_call>{ADD}</tool_call>\n", "Let me.", [("add", ADD_ARGUMENTS)]),
    (
        "hermes",
        f"<tool_call>\n{ADD}\n</tool_call>\n<tool_call>\n{LOOK}\n</tool_call> done",
        " done",
        [("add", ADD_ARGUMENTS), ("look_up", "{}")],
    ),
    ("hermes", f"<tool_call>\n{ADD}", None, [("add", ADD_ARGUMENTS)]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1', None, [("add", '{"a": 1')]),
    ("hermes", f"<tool_call>{ADD[:-1]}", None, [("add", ADD_ARGUMENTS)]),
    ("hermes", f"<tool_call>{ADD}\n</tool", None, [("add", ADD_ARGUMENTS)]),
    ("hermes", f"<tool_call>{ADD} and more", " and more", [("add", ADD_ARGUMENTS)]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', None, [("add", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "add"}</tool_call>', None, [("add", "{}")]),
    ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', None, [("add", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "a\\u0064d", "arguments": {}}</tool_call>', None, [("add", "{}")]),
    ("hermes", '<tool_call>{"name": "\\x", "arguments": {}}', '<tool_call>{"name": "\\x", "arguments": {}}', []),
    ("hermes", "use <tool_call> as you like", "use <tool_call> as you like", []),
    ("hermes", '<tool_call>{"other": 1}</tool_call>', '<tool_call>{"other": 1}</tool_call>', []),
    ("hermes", '\n<tool_call>\n{"name": "ad', '\n<tool_call>\n{"name": "ad', []),
    ("hermes", f"<tool_call>no <tool_call>{ADD}</tool_call>", "<tool_call>no", [("add", ADD_ARGUMENTS)]),
    ("llama", '{"name": "add", "parameters": {"a": 1}}', None, [("add", '{"a": 1}')]),
    ("llama", '\n\n{"name": "add", "parameters": {"a": 1}}\n', None, [("add", '{"a": 1}')]),
    ("llama", '{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}', None, [("a", "{}"), ("b", "{}")]),
    ("llama", '{"type": "function", "function": {"name": "add", "parameters": {}}}', None, [("add", "{}")]),
    ("llama", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
    ("llama", '{"age": 3', '{"age": 3', []),
    ("llama", 'Like so: {"name": "add", "parameters": {}}', 'Like so: {"name": "add", "parameters": {}}', []),
    ("llama", '{"name": "add", "parameters": {}} there', " there", [("add", "{}")]),
    ("mistral", f"[TOOL_CALLS] [{ADD}, {LOOK}]", None, [("add", ADD_ARGUMENTS), ("look_up", "{}")]),
    ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}]', None, [("add", '{"a": 1}')]),
    ("mistral", f"Sure. [TOOL_CALLS][{ADD}]", "Sure.", [("add", ADD_ARGUMENTS)]),
    ("mistral", "[TOOL_CALLS] none", "[TOOL_CALLS] none", []),
    ("mistral", f"[{ADD}]", f"[{ADD}]", []),
    ("json", f"[{ADD}, {LOOK}]", None, [("add", ADD_ARGUMENTS), ("look_up", "{}")]),
    ("json", "[1, 2]", "[1, 2]", []),
    ("json", "words", "words", []),
]  # fmt: skip


def told(terms: CallTerms, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """What a reader says of a text in these pieces, added up as a client does it."""
    reader, said, calls = CallReader(terms), "", list[list[str]]()
    for piece in [one for text in pieces for one in reader.feed(text)] + reader.end():
        match piece:
            case Said(text):
                assert text
                said += text
            case Called(index, name):
                assert index == len(calls)
                calls.append([name, ""])
            case Argued(index, text):
                assert index == len(calls) - 1
                calls[index][1] += text
    assert reader.num_calls == len(calls)
    return said, [(name, arguments) for name, arguments in calls]


@pytest.mark.parametrize(("form", "text", "content", "calls"), READ)
def test_words_and_calls_are_told_apart(form: str, text: str, content: str | None, calls: Any) -> None:
    said, found = read_answer(CallTerms(form), "q.job", 0, text)
    assert (said, [(call.name, call.arguments) for call in found]) == (content, calls)


@pytest.mark.parametrize(("form", "text", "content", "calls"), READ)
def test_the_cut_makes_no_difference(form: str, text: str, content: str | None, calls: Any) -> None:
    assert told(CallTerms(form), list(text)) == (content or "", calls)
    for cut in range(len(text)):
        assert told(CallTerms(form), [text[:cut], text[cut:]]) == (content or "", calls)


ALPHABET = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", ADD, LOOK, '{"name": "', '"arguments": ', "{", "}", "[", "]"]
ALPHABET += ['"', "\\", ",", ";", " ", "\n", "a", "<", "T", '"parameters": {', "é"]


@given(st.sampled_from(["hermes", "llama", "mistral", "json"]), st.lists(st.sampled_from(ALPHABET)), st.data())
def test_no_text_and_no_cut_of_it_makes_a_difference(form: str, parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = told(CallTerms(form), [text])
    assert told(CallTerms(form), pieces) == whole
    content, calls = read_answer(CallTerms(form), "q.job", 0, text)
    assert (content or "", [(call.name, call.arguments) for call in calls]) == whole
    if not calls:
        assert content == text


def test_arguments_are_given_out_as_they_come_and_the_name_before_them() -> None:
    reader = CallReader(CallTerms("hermes"))
    assert reader.feed('Yes. <tool_call>\n{"name": "add", "argu') == [Said("Yes.")]
    assert reader.feed('ments": {"a"') == [Called(0, "add"), Argued(0, '{"a"')]
    assert reader.feed(": 1") == [Argued(0, ": 1")]
    assert reader.feed("}}\n</tool_call>") == [Argued(0, "}")]
    assert reader.end() == []


def test_words_are_held_back_no_longer_than_they_could_be_a_call() -> None:
    reader = CallReader(CallTerms("hermes"))
    assert reader.feed("a <tool") == [Said("a")]
    assert reader.feed("box>") == [Said(" <toolbox>")]
    reader = CallReader(CallTerms("llama"))
    assert reader.feed('{"age"') == [Said('{"age"')]
    assert reader.feed(": 3}") == [Said(": 3}")]


def test_of_more_calls_than_count_the_first_ones_are_told() -> None:
    text = f"<tool_call>{ADD}</tool_call><tool_call>{LOOK}</tool_call> bye"
    assert told(CallTerms("hermes", 1), [text]) == (" bye", [("add", ADD_ARGUMENTS)])
    assert told(CallTerms("mistral", 1), [f"[TOOL_CALLS][{ADD}, {LOOK}]"]) == ("", [("add", ADD_ARGUMENTS)])


def test_ids_are_the_same_for_everybody_and_differ_by_job_choice_and_index() -> None:
    ids = {call_id(job, choice, index) for job in ("q.a", "q.b") for choice in range(3) for index in range(3)}
    assert len(ids) == 18
    assert all(len(one) == 9 and one.isascii() and one.isalnum() for one in ids)
    _, (call,) = read_answer(CallTerms("hermes"), "q.a", 2, f"<tool_call>{ADD}")
    assert call.id == call_id("q.a", 2, 0)
    assert json.loads(call.arguments) == {"a": 1, "b": '}{"'}


def test_a_long_answer_that_is_no_call_is_read_in_good_time() -> None:
    """Held back to its end, and looked at once: half a million characters, one at a time."""
    text = '{"name": [' + "1," * 100_000
    reader = CallReader(CallTerms("llama"))
    for start in range(0, len(text), 50):
        assert reader.feed(text[start : start + 50]) == []
    assert reader.end() == [Said(text)]
