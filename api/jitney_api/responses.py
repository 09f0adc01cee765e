"""OpenAI's response object, made of a job and what its log says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from jitney.errors import JobCancelled, JobEnded
from jitney.messages import JobSpec
from jitney.result import Result
from jitney_api.answers import Heading
from jitney_api.failures import wire_of
from jitney_api.response_job import Terms, instructions_of, text_format

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]

PREFIX: Final = "resp_"
"""A response's id is its job's behind it."""


@dataclass(frozen=True, slots=True)
class Said:
    """What a job has said: its text, and the log probabilities of its tokens where they were asked for."""

    text: str = ""
    logprobs: Sequence[Mapping[str, Any]] | None = None

    def part(self) -> dict[str, Any]:
        """The content part."""
        told = output_logprobs(self.logprobs) if self.logprobs is not None else []
        return {"type": "output_text", "annotations": [], "logprobs": told, "text": self.text}


class ResponseShape:
    """Objects of one response. All of it comes from the job itself, so a replay says what the live stream said."""

    def __init__(self, heading: Heading, spec: JobSpec) -> None:
        terms, sampling = Terms.of(spec), spec.sampling
        self.job_id = heading.job_id
        self.id = f"{PREFIX}{heading.job_id}"
        self.item_id = f"msg_{heading.job_id}"
        self.background = terms.background
        self._head = {"id": self.id, "object": "response", "created_at": heading.created}
        self._tail: dict[str, Any] = {
            "background": terms.background,
            "instructions": instructions_of(spec),
            "max_output_tokens": sampling.max_tokens,
            "metadata": spec.metadata,
            "model": heading.model,
            "parallel_tool_calls": True,
            "previous_response_id": terms.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": spec.keep_body,
            "temperature": sampling.temperature,
            "text": {"format": text_format(spec), "verbosity": "medium"},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": sampling.logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "user": None,
        }

    def standing(self, status: Status) -> dict[str, Any]:
        """Of a job that has not ended: nothing of what it has said so far."""
        return self._object(status)

    def item(self, said: Said | None, status: str) -> dict[str, Any]:
        """The answer as an output item. said: None before its first part."""
        content = [] if said is None else [said.part()]
        return {"id": self.item_id, "type": "message", "status": status, "role": "assistant", "content": content}

    def finished(self, said: Said, finish_reason: str | None, usage: Mapping[str, int] | None) -> dict[str, Any]:
        """Of a job that finished: completed, or incomplete where its limit of tokens ended it."""
        status: Status = "incomplete" if finish_reason == "length" else "completed"
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return self._object(status, output=[self.item(said, status)], usage=response_usage(usage), cut=cut)

    def broken(self, said: Said, ended: JobEnded, usage: Mapping[str, int] | None) -> dict[str, Any]:
        """Of a job that ended otherwise, with what it had said and why it ended."""
        wire = wire_of(ended)
        error = {name: wire.get(name) for name in ("code", "message", "type", "param")}
        return self._object(
            "cancelled" if isinstance(ended, JobCancelled) else "failed",
            output=[self.item(said, "incomplete")] if said.text else [],
            usage=response_usage(usage),
            error=error,
        )

    def of_result(self, _heading: Heading, result: Result) -> dict[str, Any]:
        """Of a job whose events somebody has added up."""
        [choice] = result.choices
        return self.finished(Said(choice.text, choice.logprobs), choice.finish_reason, result.usage)

    def _object(
        self,
        status: Status,
        *,
        output: Sequence[dict[str, Any]] = (),
        usage: dict[str, Any] | None = None,
        error: dict[str, Any] | None = None,
        cut: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        told = {"status": status, "error": error, "incomplete_details": cut, "output": output, "usage": usage}
        return {**self._head, **told, **self._tail}


def response_usage(usage: Mapping[str, int] | None) -> dict[str, Any]:
    """A terminal event's usage in the response's shape."""
    counted = usage or {}
    given, made = counted.get("prompt_tokens", 0), counted.get("completion_tokens", 0)
    return {
        "input_tokens": given,
        "input_tokens_details": {"cached_tokens": counted.get("cached_tokens", 0), "cache_write_tokens": 0},
        "output_tokens": made,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": given + made,
    }


def output_logprobs(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Log probabilities of tokens: one entry for each of them."""
    return [{**_one(entry), "top_logprobs": [_one(other) for other in entry.get("top", ())]} for entry in entries]


def _one(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {"token": entry["token"], "logprob": entry["logprob"], "bytes": entry.get("bytes")}
