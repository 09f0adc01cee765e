"""Request to job: OpenAI's names and defaults into `JobSpec`. Pure; nothing here awaits or writes."""

from __future__ import annotations

from typing import Any, Final

from jitney.errors import InvalidJob
from jitney.messages import JobSpec
from jitney.sampling import MAX_LOGPROBS, SamplingParams, sampling_params
from jitney.structured import StructuredOutputs
from jitney_api.schemas import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    JobRequest,
    Queued,
    Sampled,
    WithChatEnd,
    WithTools,
)
from jitney_api.structure import structured

COMPLETION_MAX_TOKENS: Final = 16
"""What OpenAI documents for /v1/completions. A chat may go on up to the model's context."""

_SAMPLED: Final = tuple(Sampled.model_fields)
_QUEUED: Final = tuple(name for name in Queued.model_fields if name != "idempotency_key")


def completion_job(asked: CompletionRequest) -> JobSpec:
    """The job of a text completion. Raises InvalidJob."""
    limit = COMPLETION_MAX_TOKENS if asked.max_tokens is None else asked.max_tokens
    sampling = sampling_of(asked, structured(asked), logprobs=asked.logprobs, max_tokens=limit)
    return job_of(asked, sampling, prompt=asked.prompt, on_disconnect=on_disconnect_of(asked))


def chat_job(asked: ChatRequest) -> JobSpec:
    """The job of a chat completion. Raises InvalidJob."""
    limit = asked.max_completion_tokens
    if limit is not None and limit < 1:
        raise InvalidJob(f"max_completion_tokens must be at least 1 (given: {limit})", param="max_completion_tokens")
    limit = asked.max_tokens if limit is None else limit
    sampling = sampling_of(asked, structured(asked), logprobs=_chat_logprobs(asked), max_tokens=limit)
    messages = tuple(message.plain() for message in asked.messages)
    further = {"on_disconnect": on_disconnect_of(asked), **_tools(asked), **_chat_end(asked)}
    return job_of(asked, sampling, messages=messages, **further)


def detached_job(asked: JobRequest) -> JobSpec:
    """The job of `POST /v1/jobs`. Raises InvalidJob."""
    structure = asked.structured_outputs
    sampling = sampling_of(
        asked, structure, logprobs=asked.logprobs, max_tokens=asked.max_tokens, pooling=asked.pooling
    )
    given = {**_tools(asked), **_chat_end(asked)}
    if asked.messages is not None:
        given["messages"] = tuple(message.plain() for message in asked.messages)
    if asked.prompt is not None:
        given["prompt"] = asked.prompt
    if asked.traceparent is not None:
        given["traceparent"] = asked.traceparent
    return job_of(asked, sampling, **given)


def embedding_jobs(asked: EmbeddingRequest) -> list[JobSpec]:
    """A job for each input, in order. Raises InvalidJob."""
    given = {"pooling": asked.pooling, "truncate_prompt_tokens": asked.truncate_prompt_tokens}
    sampling = sampling_params(**{name: value for name, value in given.items() if value is not None})
    return [job_of(asked, sampling, prompt=one, on_disconnect=asked.on_disconnect or "cancel") for one in asked.input]


def _tools(asked: WithTools) -> dict[str, Any]:
    """Checked where every door's are: in `JobSpec`."""
    if not asked.tools and asked.tool_choice in (None, "none", "auto"):
        return {}
    return {name: getattr(asked, name) for name in WithTools.model_fields}


def _chat_end(asked: WithChatEnd) -> dict[str, Any]:
    return {name: getattr(asked, name) for name in WithChatEnd.model_fields}


def _chat_logprobs(asked: ChatRequest) -> int | None:
    """`logprobs` (yes or no) and `top_logprobs` (how many besides) as the one number of a job."""
    top = asked.top_logprobs
    if top is not None and not asked.logprobs:
        raise InvalidJob("top_logprobs needs logprobs=true", param="top_logprobs")
    if top is not None and not 0 <= top <= MAX_LOGPROBS:
        raise InvalidJob(f"top_logprobs must be from 0 to {MAX_LOGPROBS} (given: {top})", param="top_logprobs")
    return (top or 0) if asked.logprobs else None


def sampling_of(asked: Sampled, structure: StructuredOutputs | None, **others: int | str | None) -> SamplingParams:
    given = {name: getattr(asked, name) for name in _SAMPLED}
    given |= {"structured_outputs": structure, **others}
    return sampling_params(**{name: value for name, value in given.items() if value is not None})


def on_disconnect_of(asked: Queued) -> str:
    """Whoever waits for an answer and goes away no longer wants it.

    Not so with an idempotency key: it is there to come back with, and to a cancelled job nobody can.
    """
    if asked.on_disconnect is not None:
        return asked.on_disconnect
    return "continue" if asked.idempotency_key is not None else "cancel"


def job_of(asked: Queued, sampling: SamplingParams, **fields: Any) -> JobSpec:
    """The job of a request: what it says of waiting and keeping, and `fields`. Raises InvalidJob."""
    given = {name: getattr(asked, name) for name in _QUEUED}
    given |= fields
    return JobSpec.build({"sampling": sampling, **{name: value for name, value in given.items() if value is not None}})
