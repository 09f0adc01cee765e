"""Chat messages as somebody sent them → what a template may see: plain, checked, control tokens hidden."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from jitney.errors import InvalidJob
from jitney.text.control import ControlTokens, Masks, TokenSet

ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")
"""A closed list: templates paste the role between the halves of a control token."""

MAX_DEPTH: Final = 32

_TYPES: Final = frozenset({"function", "object", "array", "string", "number", "integer", "boolean", "null"})

Message = dict[str, Any]


def read_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages with their content as one string each. Raises InvalidJob that names message and field.

    `content` may be a string, a list of text parts (joined with nothing between), or, for the assistant
    alone, null. Fields that are null are dropped: a template tests whether a field is there.
    """
    if not messages:
        raise InvalidJob("messages is empty: give at least one message", param="messages")
    return [_read(message, f"messages.{number}") for number, message in enumerate(messages)]


def masked(messages: Sequence[Message], control: ControlTokens, masks: Masks) -> list[Message]:
    """Copies in which every string is hidden by `masks`, except the roles.

    An assistant's messages are the model's own words: of its control tokens only the special ones are
    hidden there, because templates look for the others (the end of a thought, say) and the model wrote them.
    """
    shown = []
    for message in messages:
        tokens = control.special if message["role"] == "assistant" else control.every
        fields = {name: value for name, value in message.items() if name != "role"}
        shown.append({**_hide("", fields, tokens, masks), "role": message["role"]})
    return shown


def masked_tools(tools: Sequence[Mapping[str, Any]], control: ControlTokens, masks: Masks) -> list[dict[str, Any]]:
    """Copies in which every string is hidden by `masks`: what a caller says of a function is no control token."""
    return [_hide("", tool, control.every, masks) for tool in tools]


def check_text(text: Any, where: str) -> str:
    """`text` if it is a string that has a UTF-8 form; InvalidJob otherwise (a lone surrogate has none)."""
    if not isinstance(text, str):
        raise InvalidJob(f"{where} is {type(text).__name__}, not a string", param=where)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidJob(
            f"{where} is not valid Unicode: {text[error.start]!r} at character {error.start} has no UTF-8 form",
            param=where,
            code="invalid_unicode",
        ) from None
    return text


def _read(message: Any, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise InvalidJob(f"{where} is {type(message).__name__}, not an object", param=where)
    role = message.get("role")
    if role not in ROLES:
        raise InvalidJob(f"{where}.role is {role!r:.40}; it must be one of {', '.join(ROLES)}", param=f"{where}.role")
    fields = {name: value for name, value in message.items() if value is not None}
    fields["content"] = _content(fields.get("content"), role, f"{where}.content")
    if isinstance(fields.get("tool_calls"), list | tuple):
        fields["tool_calls"] = [_with_object(call) for call in fields["tool_calls"]]
    for name, value in fields.items():
        check_text(name, where)
        _check(value, f"{where}.{name}", MAX_DEPTH)
    return fields


def _content(content: Any, role: str, where: str) -> str:
    """One string of whatever shape the content has."""
    if content is None and role == "assistant":
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, (list, tuple)):
        return "".join(_part(part, f"{where}.{number}") for number, part in enumerate(content))
    given = "null" if content is None else type(content).__name__
    raise InvalidJob(f"{where} is {given}; it must be a string or a list of text parts", param=where)


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind != "text":
        raise InvalidJob(f"{where} has type {kind!r:.40}; this model takes parts of type 'text' only", param=where)
    return check_text(part.get("text"), f"{where}.text")


def _with_object(call: Any) -> Any:
    """A call with its arguments as the object that their text says: OpenAI sends text, templates expect the object.

    Text that says none (a model was cut off in the middle of it) stays as it is.
    """
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _check(value: Any, where: str, depth: int) -> None:
    """Every string in it is valid, it is made of JSON's types, and not deeper than recursion stands."""
    if depth == 0:
        raise InvalidJob(f"{where[:80]} is nested more than {MAX_DEPTH} deep", param=where[:80])
    if isinstance(value, str):
        check_text(value, where)
    elif isinstance(value, Mapping):
        for name, item in value.items():
            check_text(name, where)
            _check(item, f"{where}.{name[:40]}", depth - 1)
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            _check(item, f"{where}.{number}", depth - 1)
    elif value is not None and not isinstance(value, (bool, int, float)):
        raise InvalidJob(f"{where} is {type(value).__name__}, which is not JSON", param=where)


def _hide(name: str, value: Any, tokens: TokenSet, masks: Masks) -> Any:
    """A copy of JSON with every string hidden, names of fields included."""
    if isinstance(value, str):
        # Templates compare the type of a tool, and those of its parameters, with these very words.
        return value if name == "type" and value in _TYPES else masks.hide(value, tokens)
    if isinstance(value, Mapping):
        return {masks.hide_whole(key, tokens): _hide(key, item, tokens, masks) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_hide(name, item, tokens, masks) for item in value]
    return value
