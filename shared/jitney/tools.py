"""Functions that a model may call: what a job may ask for, named and shaped as at OpenAI. No library is needed here."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from jitney.errors import InvalidJob
from jitney.structured import check_depth, check_size

MAX_TOOLS: Final = 128
MAX_TOOLS_BYTES: Final = 262_144

_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NO_PARAMETERS: Final = {"type": "object", "properties": {}, "additionalProperties": False}

Mode = Literal["none", "auto", "required"]
_MODES: Final[dict[str, Mode]] = {"none": "none", "auto": "auto", "required": "required"}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a job wants of its tools.

    tools: those that the model is shown, in OpenAI's shape. is_forced: the answer is calls and nothing else, with
    arguments that follow the schemas. max_calls: how many there may be; None for any number.
    """

    tools: tuple[dict[str, Any], ...]
    is_forced: bool
    max_calls: int | None


def read_tools(value: Any) -> str | None:
    """The tools as JSON text: a job's body sorts its keys, and a model reads them in the order given.

    None for an empty list, which is the same as none at all. Raises InvalidJob that names the member.
    """
    if isinstance(value, str):
        value = _parsed(value)
    if value is None or (isinstance(value, Sequence) and not value):
        return None
    if not isinstance(value, list | tuple):
        raise InvalidJob(f"tools is {type(value).__name__}, not a list", param="tools")
    if len(value) > MAX_TOOLS:
        raise InvalidJob(f"tools holds {len(value)}; at most {MAX_TOOLS} are allowed", param="tools")
    try:
        check_depth(value)
        names = [_name_of(tool, f"tools.{number}") for number, tool in enumerate(value)]
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        check_size(text, MAX_TOOLS_BYTES)
    except (TypeError, ValueError) as error:
        raise InvalidJob(f"tools {error}", param="tools") from None
    for name in names:
        if names.count(name) > 1:
            raise InvalidJob(f"tools names the function {name!r} twice", param="tools")
    return text


def read_tool_choice(value: Any) -> Any:
    """`value` if it is one of OpenAI's shapes. Raises InvalidJob."""
    _chosen(value)
    return value


def tool_use(tools: str | None, tool_choice: Any, parallel_tool_calls: bool | None) -> ToolUse | None:
    """What the three fields mean together; None for an answer without calls. Raises InvalidJob.

    tools: as `read_tools` wrote them. Tools that may not be called are not shown either.
    """
    mode, names = _chosen(tool_choice)
    if tools is None:
        if mode == "required":
            raise InvalidJob("tool_choice needs tools: there is nothing to call", param="tool_choice")
        return None
    given: list[dict[str, Any]] = json.loads(tools)
    known = [tool["function"]["name"] for tool in given]
    for name in names or ():
        if name not in known:
            raise InvalidJob(f"tool_choice names {name!r}, which is not among tools", param="tool_choice")
    if mode == "none":
        return None
    shown = tuple(tool for tool in given if names is None or tool["function"]["name"] in names)
    is_named = isinstance(tool_choice, Mapping) and tool_choice.get("type") == "function"
    return ToolUse(shown, mode == "required", 1 if is_named or parallel_tool_calls is False else None)


def parameters_of(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments, which are always an object."""
    schema = tool["function"].get("parameters")
    if schema is None:
        return dict(_NO_PARAMETERS)
    is_open = schema.keys().isdisjoint(("type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"))
    return {**schema, "type": "object"} if is_open else dict(schema)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidJob("tools is a string that is not JSON: send a list", param="tools") from None


def _name_of(tool: Any, where: str) -> str:
    """The name of the function that it is, after a look at the rest."""
    kind = tool.get("type") if isinstance(tool, Mapping) else type(tool).__name__
    if kind != "function":
        raise InvalidJob(f"{where}.type is {kind!r:.40}; only 'function' is supported", param=f"{where}.type")
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise InvalidJob(f"{where}.function is required: {{name, description, parameters}}", param=f"{where}.function")
    name, described = function.get("name"), function.get("description")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        told = "must be 1 to 64 letters, digits, underscores or hyphens"
        raise InvalidJob(f"{where}.function.name {told} (given: {name!r:.64})", param=f"{where}.function.name")
    if described is not None and not isinstance(described, str):
        raise InvalidJob(f"{where}.function.description must be a string", param=f"{where}.function.description")
    schema = function.get("parameters")
    if schema is not None and (not isinstance(schema, Mapping) or schema.get("type", "object") != "object"):
        told = "must be a JSON schema of an object"
        raise InvalidJob(f"{where}.function.parameters {told}", param=f"{where}.function.parameters")
    return name


def _chosen(value: Any) -> tuple[Mode, tuple[str, ...] | None]:
    """Whether there must be a call, and of which functions; None: of any."""
    if value is None:
        return "auto", None
    if isinstance(value, str) and value in _MODES:
        return _MODES[value], None
    kind = value.get("type") if isinstance(value, Mapping) else None
    try:
        if kind == "function":
            return "required", (_named(value),)
        if kind == "allowed_tools":
            allowed = value.get("allowed_tools")
            mode, names = allowed["mode"], tuple(_named(tool) for tool in allowed["tools"])
            if mode in ("auto", "required") and names:
                return mode, names
    except (AttributeError, KeyError, TypeError):
        pass
    raise InvalidJob(
        "tool_choice must be 'none', 'auto', 'required', {type: 'function', function: {name}} or "
        "{type: 'allowed_tools', allowed_tools: {mode: 'auto' or 'required', tools: [...]}}",
        param="tool_choice",
    )


def _named(choice: Mapping[str, Any]) -> str:
    name = choice["function"]["name"]
    if not isinstance(name, str):
        raise TypeError
    return name
