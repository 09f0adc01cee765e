"""JSON in a text that grows: where a value ends, and the call that it may be."""

from __future__ import annotations

import json
from typing import Any


class Braces:
    """Looks for the end of a JSON value in a text that grows, and at no character twice."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._position = 0
        self._in_string = False
        self._is_escaped = False

    def find_end(self, text: str) -> int | None:
        """Just behind the brace that closes the first one; None if it is not there yet."""
        for position in range(self._position, len(text)):
            character = text[position]
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif character == "\\":
                    self._is_escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return position + 1
        self._position = len(text)
        return None

    def forget(self, count: int) -> None:
        """The first `count` characters are taken away from the text."""
        self._position = max(0, self._position - count)


def call_of(text: str, *, needs_arguments: bool) -> tuple[str, str] | None:
    """Name and arguments of one call as JSON; None if it is none."""
    try:
        call: Any = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        call = call["function"]
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return None
    arguments = call.get("arguments", call.get("parameters"))
    if arguments is None:
        return None if needs_arguments else (call["name"], "{}")
    shown = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return call["name"], shown
