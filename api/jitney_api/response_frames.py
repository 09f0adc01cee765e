"""A response's stream: OpenAI's events, numbered without a gap by what stands in the job's log.

What is said of an event, and under which numbers, depends on the job and on the events before it alone. So a stream
that is gone on with, through any process, has the frames of the live one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import orjson

from jitney.errors import JobEnded
from jitney.follower import Message
from jitney.messages import Event
from jitney_api.failures import refuse_if_failed
from jitney_api.responses import ResponseShape, Said, output_logprobs

Telling = Iterator[tuple[str, dict[str, Any]]]
"""Events of the stream: type, and the members besides."""

_ENDINGS: Final = {
    # OpenAI has no event of its own for a response that was cancelled: its status says so.
    "completed": "response.completed",
    "incomplete": "response.incomplete",
    "failed": "response.failed",
    "cancelled": "response.failed",
}


class ResponseTale:
    """A job's events as the events of a response, from the first to the last.

    response: as it stands after the events so far, for whoever does not stream. has_ended: the last one was told.
    """

    def __init__(self, shape: ResponseShape) -> None:
        self._shape = shape
        self._place = {"item_id": shape.item_id, "output_index": 0, "content_index": 0}
        self._has_begun = self._has_item = False
        self.has_ended = False
        self._text: list[str] = []
        self._logprobs: list[dict[str, Any]] | None = None
        self._finish_reason: str | None = None
        self.response = shape.standing("queued" if shape.background else "in_progress")

    def opening(self) -> Telling:
        """Before any event."""
        yield "response.created", {"response": self.response}
        if self._shape.background:
            yield "response.queued", {"response": self.response}

    def of(self, event: Event) -> Telling:
        """What an event of the job is told as; often nothing."""
        if not self._has_begun and event.type in ("started", "tokens", "finished"):
            self._has_begun = True
            self.response = self._shape.standing("in_progress")
            yield "response.in_progress", {"response": self.response}
        if event.type == "tokens":
            yield from self._spoken(event)
        elif event.is_terminal:
            yield from self._ending(event)

    def _spoken(self, event: Event) -> Telling:
        yield from self._item_added()
        self._finish_reason = event.finish_reason or self._finish_reason
        self._text.append(event.text)
        if event.logprobs is not None:
            self._logprobs = self._logprobs or []
            self._logprobs += event.logprobs
        if event.text or event.logprobs:
            told = output_logprobs(event.logprobs or ())
            yield "response.output_text.delta", {**self._place, "delta": event.text, "logprobs": told}

    def _item_added(self) -> Telling:
        if not self._has_item:
            self._has_item = True
            yield "response.output_item.added", {"output_index": 0, "item": self._shape.item(None, "in_progress")}
            yield "response.content_part.added", {**self._place, "part": Said().part()}

    def _ending(self, event: Event) -> Telling:
        said = Said("".join(self._text), self._logprobs)
        try:
            refuse_if_failed(event, self._shape.job_id)
        except JobEnded as ended:
            self.response = self._shape.broken(said, ended, event.usage)
        else:
            yield from self._item_added()
            for choice in event.choices or ():
                self._finish_reason = choice.get("finish_reason") or self._finish_reason
            self.response = self._shape.finished(said, self._finish_reason, event.usage)
            part = said.part()
            yield "response.output_text.done", {**self._place, "text": said.text, "logprobs": part["logprobs"]}
            yield "response.content_part.done", {**self._place, "part": part}
            yield "response.output_item.done", {"output_index": 0, "item": self.response["output"][0]}
        self.has_ended = True
        yield _ENDINGS[self.response["status"]], {"response": self.response}


class ResponseFrames:
    """The stream of a response after a number. after: the last `sequence_number` already seen, -1 for none."""

    needs_past = True

    def __init__(self, shape: ResponseShape, after: int = -1) -> None:
        self._tale = ResponseTale(shape)
        self._after = after
        self.num_told = 0
        self.opening = self._frames(self._tale.opening())

    @property
    def response(self) -> dict[str, Any]:
        """As it stands after the events so far."""
        return self._tale.response

    @property
    def has_ended(self) -> bool:
        """The job's last event was told."""
        return self._tale.has_ended

    def of(self, message: Message) -> bytes:
        return self._frames(self._tale.of(message.event))

    def _frames(self, telling: Telling) -> bytes:
        frames = []
        for kind, members in telling:
            number, self.num_told = self.num_told, self.num_told + 1
            if number > self._after:
                data = orjson.dumps({"type": kind, "sequence_number": number, **members})
                frames.append(b"event: %b\nid: %d\ndata: %b\n\n" % (kind.encode(), number, data))
        return b"".join(frames)
