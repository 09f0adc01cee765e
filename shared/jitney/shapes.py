"""OpenAI's shapes of parts of an answer, for every door that gives answers out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jitney.tool_calls import ToolCall


def usage_shape(usage: Mapping[str, int] | None) -> dict[str, Any]:
    """A terminal event's usage."""
    counted = usage or {}
    prompt, completion = counted.get("prompt_tokens", 0), counted.get("completion_tokens", 0)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": counted.get("cached_tokens", 0)},
    }


def call_shape(call: ToolCall) -> dict[str, Any]:
    """A call of an answer."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
