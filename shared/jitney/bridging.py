"""A job's answer as another queue's result: plain JSON, the same from RQ and from Celery."""

from __future__ import annotations

from typing import Any, Final

from jitney.keys import queue_of
from jitney.messages import Event
from jitney.result import Choice, Result
from jitney.tool_calls import ToolCall

ANSWER: Final = "jitney.answer"
"""The `object` of every answer."""


def answer_of(result: Result) -> dict[str, Any]:
    """The whole answer, in OpenAI's words. `choices` stands there only when there is more than one.

    `content` and `tool_calls` stand there only if the text calls tools; `embedding` instead of a text, for a job with
    `pooling`.
    """
    heading = {"id": result.id, "object": ANSWER, "model": queue_of(result.id)}
    usage = {"usage": _usage(result.usage)}
    if result.embedding is not None:
        return {**heading, "embedding": list(result.embedding), **usage}
    first = _said(result.choices[0])
    several = {"choices": [{"index": choice.index, **_said(choice)} for choice in result.choices]}
    return {**heading, **first, **usage, **(several if len(result.choices) > 1 else {})}


def _said(choice: Choice) -> dict[str, Any]:
    said: dict[str, Any] = {"text": choice.text, "finish_reason": choice.finish_reason}
    if choice.tool_calls:
        said |= {"content": choice.content, "tool_calls": [_call(call) for call in choice.tool_calls]}
    return said


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _usage(counted: dict[str, int]) -> dict[str, Any]:
    prompt, completion = counted.get("prompt_tokens", 0), counted.get("completion_tokens", 0)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": counted.get("cached_tokens", 0)},
    }


class Partial:
    """What a job has said so far, for those who ask while it speaks. Of choice 0."""

    def __init__(self) -> None:
        self.job_id = ""
        self.num_tokens = 0
        self._pieces: list[str] = []

    def begin(self, job_id: str) -> None:
        """Of this job, from its first event on: also when it is read anew."""
        self.job_id, self.num_tokens, self._pieces = job_id, 0, []

    def add(self, event: Event) -> None:
        if event.type == "tokens" and event.choice == 0:
            self.num_tokens += len(event.token_ids)
            self._pieces.append(event.text)

    def shape(self) -> dict[str, Any]:
        """Plain JSON: the job's id, its text, and how many tokens that is."""
        self._pieces = ["".join(self._pieces)]
        return {"id": self.job_id, "text": self._pieces[0], "num_tokens": self.num_tokens}
