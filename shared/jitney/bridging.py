"""A job's answer as another queue's result: plain JSON, the same from RQ and from Celery."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, Final

from jitney.async_client import AsyncJob
from jitney.errors import StreamLost
from jitney.keys import queue_of
from jitney.messages import Event
from jitney.result import Choice, Collector, Result
from jitney.shapes import call_shape, usage_shape

ANSWER: Final = "jitney.answer"
"""The `object` of every answer."""


def answer_of(result: Result) -> dict[str, Any]:
    """The whole answer, in OpenAI's words. `choices` stands there only when there is more than one.

    `content` and `tool_calls` stand there only if the text calls tools; `embedding` instead of a text, for a job with
    `pooling`.
    """
    heading = {"id": result.id, "object": ANSWER, "model": queue_of(result.id)}
    usage = {"usage": usage_shape(result.usage)}
    if result.embedding is not None:
        return {**heading, "embedding": list(result.embedding), **usage}
    first = _said(result.choices[0])
    several = {"choices": [{"index": choice.index, **_said(choice)} for choice in result.choices]}
    return {**heading, **first, **usage, **(several if len(result.choices) > 1 else {})}


def _said(choice: Choice) -> dict[str, Any]:
    said: dict[str, Any] = {"text": choice.text, "finish_reason": choice.finish_reason}
    if choice.tool_calls:
        said |= {"content": choice.content, "tool_calls": [call_shape(call) for call in choice.tool_calls]}
    return said


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


async def _nobody() -> None:
    """Is told anything."""


async def follow(job: AsyncJob, partial: Partial, show: Callable[[], Awaitable[None]] = _nobody) -> dict[str, Any]:
    """The job's answer, once it has ended. show: called whenever `partial` has taken in what came.

    Raises as `AsyncJob.batches`, and the job's own ending where that is not `finished`.
    """
    partial.begin(job.id)
    await show()
    collector, result = Collector(job.id), None
    async with contextlib.aclosing(job.batches()) as batches:
        async for batch in batches:
            for message in batch:
                partial.add(message.event)
                result = collector.add(message.event) or result
            await show()
            if result is not None:
                return answer_of(result)
    raise StreamLost(f"the log of {job.id} ended without a last event")
