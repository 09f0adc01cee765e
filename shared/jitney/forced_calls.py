"""Forced calls: the schemas of tools, in a model's own form of calls, as one structure like any other."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Final

from pydantic import ValidationError

from jitney import grammar
from jitney.call_formats import CallFormat
from jitney.errors import InvalidJob
from jitney.grammar import COMPACT
from jitney.sampling import explain
from jitney.structured import StructuredOutputs
from jitney.tools import ToolUse, parameters_of

MAX_FORCED_CALLS: Final = 16
"""A small model that may end or go on would otherwise go on until its tokens are spent."""


def forced_structure(form: CallFormat, use: ToolUse, special_ids: Mapping[str, int]) -> StructuredOutputs:
    """The structure of an answer that is nothing but calls.

    special_ids: the model's special tokens by their text; a structure knows them by their ids alone.
    Raises pydantic's ValidationError for one that is too large.
    """
    rules = [f"start: {_lark(form.marker + form.opening, special_ids)} call {_more(form, use, special_ids)}"]
    rules[0] += f" {_lark(form.closing, special_ids)}"
    rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(use.tools))))
    for number, tool in enumerate(use.tools):
        head = json.dumps(f'{{"name": "{tool["function"]["name"]}", "{form.key}": ')
        rules.append(f'call_{number}: {head} arguments_{number} "}}"')
        schema = {**parameters_of(tool), "x-guidance": COMPACT}
        rules.append(f"arguments_{number}: %json {json.dumps(schema)}")
    return StructuredOutputs(grammar="\n".join(rules))


def _more(form: CallFormat, use: ToolUse, special_ids: Mapping[str, int]) -> str:
    most = MAX_FORCED_CALLS if use.max_calls is None else use.max_calls
    if form.between is None or most == 1:
        return ""
    return f"({_lark(form.between, special_ids)} call){{0,{most - 1}}}"


def _lark(text: str, special_ids: Mapping[str, int]) -> str:
    """The text as a grammar says it."""
    if not text:
        return ""
    known = sorted((token for token in special_ids if token and token in text), key=len, reverse=True)
    pieces = re.split(f"({'|'.join(map(re.escape, known))})", text) if known else [text]
    return " ".join(f"<[{special_ids[one]}]>" if one in special_ids else json.dumps(one) for one in pieces if one)


def check_forced(use: ToolUse | None) -> None:
    """Raise InvalidJob for tools whose schemas no answer can be held to; nothing where that cannot be told."""
    for tool in use.tools if use is not None and use.is_forced else ():
        with refusing_by_name(f"tools: the parameters of {tool['function']['name']!r}"):
            grammar.check(StructuredOutputs.model_validate({"json": parameters_of(tool)}))


@contextlib.contextmanager
def refusing_by_name(name: str) -> Iterator[None]:
    """An error about the structure that tools became here is one about the tools."""
    try:
        yield
    except ValidationError as error:
        raise InvalidJob(f"{name}: {explain(error)}", param="tools", code="unsupported_structure") from None
    except InvalidJob as error:
        told = str(error).removeprefix(f"{error.param} ")
        raise InvalidJob(f"{name} {told}", param="tools", code=error.code) from None
