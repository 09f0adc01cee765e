"""A job's result in OpenAI's shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jitney.keys import JobId
from jitney.result import Choice, Result
from jitney.shapes import call_shape, usage_shape


@dataclass(frozen=True, slots=True)
class Heading:
    """What every object and chunk of one job's answer repeats.

    model: the queue's own name, also for a request that used an alias. created: Unix seconds of the enqueue,
    by Redis' clock. Both so that a replay says the same.
    """

    job_id: JobId
    model: str
    created: int
    fingerprint: str | None

    def fields(self, prefix: str, kind: str) -> dict[str, Any]:
        """The members before `choices`. The answer's id is the job's with OpenAI's prefix."""
        return {
            "id": f"{prefix}-{self.job_id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


def chat_answer(heading: Heading, result: Result) -> dict[str, Any]:
    """The body of a chat completion that was not streamed. `prompt_logprobs` stand beside the choices, as in vLLM."""
    choices = [
        {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.content, "refusal": None, **_calls(choice)},
            "logprobs": None if choice.logprobs is None else chat_logprobs(choice.logprobs),
            "finish_reason": chat_ending(choice.finish_reason, len(choice.tool_calls)),
        }
        for choice in result.choices
    ]
    fields = heading.fields("chatcmpl", "chat.completion")
    return {**fields, "choices": choices, "usage": usage_shape(result.usage), **_prompt(result)}


def _calls(choice: Choice) -> dict[str, Any]:
    return {"tool_calls": [call_shape(call) for call in choice.tool_calls]} if choice.tool_calls else {}


def chat_ending(reason: str | None, num_calls: int) -> str | None:
    """Why a choice of a chat ended: one that has made its calls waits for what they give."""
    return "tool_calls" if reason == "stop" and num_calls else reason


def completion_answer(heading: Heading, result: Result) -> dict[str, Any]:
    """The body of a text completion that was not streamed. `prompt_logprobs` stand in each choice, as in vLLM."""
    choices = [
        {
            "index": choice.index,
            "text": choice.text,
            "logprobs": None if choice.logprobs is None else completion_logprobs(choice.logprobs, 0),
            "finish_reason": choice.finish_reason,
            **_prompt(result),
        }
        for choice in result.choices
    ]
    fields = heading.fields("cmpl", "text_completion")
    return {**fields, "choices": choices, "usage": usage_shape(result.usage)}


def _prompt(result: Result) -> dict[str, Any]:
    """vLLM's member of a body or a choice; absent when nobody asked for it."""
    found = result.prompt_logprobs
    return {} if found is None else {"prompt_logprobs": prompt_logprobs(found)}


def prompt_logprobs(entries: Sequence[Mapping[str, Any] | None]) -> list[dict[str, Any] | None]:
    """`prompt_logprobs` in vLLM's shape: for each token of the prompt a map of token ids, null for the first token.

    rank: how many tokens are at least as probable; null if the worker did not say.
    """
    return [None if entry is None else _by_token_id(entry) for entry in entries]


def _by_token_id(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The prompt's own token first, then the most probable ones, best first."""
    top = entry.get("top", ())
    ranked = [(entry, entry.get("rank")), *((other, rank) for rank, other in enumerate(top, 1))]
    # Where the prompt's own token is among the others too, it keeps its place and takes its rank there.
    return {
        str(one["token_id"]): {"logprob": one["logprob"], "rank": rank, "decoded_token": one["token"]}
        for one, rank in ranked
    }


def chat_logprobs(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """`logprobs` of a chat choice: one entry for each token."""
    content = [{**_one(entry), "top_logprobs": [_one(other) for other in entry.get("top", ())]} for entry in entries]
    return {"content": content, "refusal": None}


def _one(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {"token": entry["token"], "logprob": entry["logprob"], "bytes": entry.get("bytes")}


def completion_logprobs(entries: Sequence[Mapping[str, Any]], offset: int) -> dict[str, Any]:
    """`logprobs` of a text completion. offset: characters of the tokens before these."""
    offsets = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry["token"])
    return {
        "tokens": [entry["token"] for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": [{one["token"]: one["logprob"] for one in (*entry.get("top", ()), entry)} for entry in entries],
        "text_offset": offsets,
    }
