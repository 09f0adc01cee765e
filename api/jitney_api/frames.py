"""Events as server-sent frames: bytes built once per stream, with only the text put in between.

An event's frames depend on nothing but the event (text completions with logprobs, chats with tools, and streams with
usage in every chunk: and those before it), so a replay says what the live stream said. The `id` line stands in the
*last* frame of an event: a reader cut off in the middle of one gets all of it again. Frames that close a stream carry
none, except in the job's own format: whoever comes back then is told once more how it ended.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Final, Literal, Protocol

import orjson

from jitney.errors import InvalidJob, JitneyError, JobEnded
from jitney.follower import Message
from jitney.messages import Event
from jitney.result import terms_of
from jitney.shapes import usage_shape
from jitney_api.answers import Heading, chat_logprobs, completion_logprobs, prompt_logprobs
from jitney_api.call_deltas import CallDeltas
from jitney_api.failures import error_body, refuse_if_failed, wire_of

StreamFormat = Literal["job", "chat.completion.chunk", "completion"]

KEEP_ALIVE: Final = b": keep-alive\n\n"
DONE: Final = b"data: [DONE]\n\n"


class Frames(Protocol):
    """Turns messages into frames. needs_past: the log must be read from its start, whatever the cursor is.

    opening: what is said before any event, and depends on none.
    """

    needs_past: bool
    opening: bytes

    def of(self, message: Message) -> bytes:
        """All frames of one message; empty when there is nothing to say."""
        ...


def error_frame(error: JitneyError) -> bytes:
    """One frame that no client takes for a piece of an answer. The stream closes after it, without `[DONE]`."""
    return b"data: " + error_body(wire_of(error)) + b"\n\n"


@dataclass(frozen=True, slots=True)
class UsageTerms:
    """Which chunks tell the usage: none, one more at the end, or besides every one.

    Named as in `stream_options`; `where` these stand, for the error.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False
    where: str = ""

    def __post_init__(self) -> None:
        if self.continuous_usage_stats and not self.include_usage:
            name = f"{self.where}continuous_usage_stats"
            raise InvalidJob(f"{name} needs {self.where}include_usage=true beside it", param=name)


NO_USAGE: Final = UsageTerms()


class JobFrames:
    """The events as they are."""

    needs_past = False
    opening = b""

    def of(self, message: Message) -> bytes:
        return b"id: %d\ndata: %b\n\n" % (message.event.seq, message.payload)


_ROLE: Final = b'{"role":"assistant","content":""}'
_ROLE_OF_TOOLS: Final = b'{"role":"assistant","content":null}'
"""What is added up from here stays null where nothing is said but calls."""


class _OpenAIFrames(ABC):
    """What the two OpenAI formats share: the fixed bytes around a choice, and how a stream ends."""

    needs_past = False
    opening = b""
    prefix: str
    kind: str

    def __init__(self, heading: Heading, usage: UsageTerms) -> None:
        self._job_id = heading.job_id
        self._usage = usage
        self._so_far = {"prompt_tokens": 0, "completion_tokens": 0, "cached_tokens": 0}
        start = orjson.dumps(heading.fields(self.prefix, self.kind))[:-1]
        self._head = b"data: " + start + b',"choices":['
        self._close = b',"usage":null}\n\n' if usage.include_usage else b"}\n\n"
        self._tail = b"]" + self._close
        self.needs_past = self.needs_past or usage.continuous_usage_stats

    def of(self, message: Message) -> bytes:
        event = message.event
        if self._usage.continuous_usage_stats:
            self._count(event)
        if event.type == "tokens":
            return self._spoken(event)
        if event.prompt_logprobs is not None:
            return b"id: %d\n%b" % (event.seq, self._prompt(orjson.dumps(prompt_logprobs(event.prompt_logprobs))))
        return self._ending(event) if event.is_terminal else b""

    def _count(self, event: Event) -> None:
        """Let what closes a chunk say the usage up to this event."""
        told = self._so_far
        if event.type == "started" and event.prompt_tokens is not None:
            told |= {"prompt_tokens": event.prompt_tokens, "cached_tokens": event.cached_tokens or 0}
        told["completion_tokens"] += len(event.token_ids)
        self._close = b',"usage":' + orjson.dumps(usage_shape(told)) + b"}\n\n"
        self._tail = b"]" + self._close

    @abstractmethod
    def _spoken(self, event: Event) -> bytes: ...

    @abstractmethod
    def _prompt(self, logprobs: bytes) -> bytes:
        """One chunk, before all text, with `prompt_logprobs` where a whole answer has them."""
        ...

    def _ending(self, event: Event) -> bytes:
        try:
            refuse_if_failed(event, self._job_id)
        except JobEnded as error:
            return error_frame(error)
        if not self._usage.include_usage:
            return DONE
        return self._head + b'],"usage":' + orjson.dumps(usage_shape(event.usage)) + b"}\n\n" + DONE


class ChatFrames(_OpenAIFrames):
    """`chat.completion.chunk`: a role first, then text, then the reason why it ended.

    Of a job with tools, whose first `started` says so, text becomes words and calls by all that came before it.
    """

    prefix, kind = "chatcmpl", "chat.completion.chunk"

    def __init__(self, heading: Heading, usage: UsageTerms, *, from_start: bool = False) -> None:
        self.needs_past = from_start
        super().__init__(heading, usage)
        self._calls: CallDeltas | None = None

    def of(self, message: Message) -> bytes:
        if self._calls is None and message.event.type == "started":
            terms = terms_of(message.event)
            self._calls = None if terms is None else CallDeltas(self._job_id, terms)
        return super().of(message)

    def _spoken(self, event: Event) -> bytes:
        logprobs = orjson.dumps(chat_logprobs(event.logprobs)) if event.logprobs else b"null"
        reason: str | None = event.finish_reason
        if self._calls is None:
            role = _ROLE
            deltas = [b'{"content":%b}' % orjson.dumps(event.text)] if event.text or event.logprobs else []
        else:
            role, deltas, reason = _ROLE_OF_TOOLS, self._calls.of(event), self._calls.ending(event)
            deltas = deltas or ([b"{}"] if event.logprobs else [])
        choices = [b'"delta":%b,"logprobs":null,"finish_reason":null' % role] if event.index == 0 else []
        for delta in deltas:
            choices.append(b'"delta":%b,"logprobs":%b,"finish_reason":null' % (delta, logprobs))
            logprobs = b"null"  # told once, with the first of what the event's tokens became
        if reason:
            choices.append(b'"delta":{},"logprobs":null,"finish_reason":' + orjson.dumps(reason))
        if not choices:
            return b""
        opening = b'%b{"index":%d,' % (self._head, event.choice)
        *early, last = (b"%b%b}%b" % (opening, choice, self._tail) for choice in choices)
        return b"%bid: %d\n%b" % (b"".join(early), event.seq, last)

    def _prompt(self, logprobs: bytes) -> bytes:
        # No choice: clients add deltas up, and the first one must bring the role.
        return b'%b],"prompt_logprobs":%b%b' % (self._head, logprobs, self._close)


class CompletionFrames(_OpenAIFrames):
    """`text_completion`. Token offsets count from the answer's first character, hence the need of the past."""

    prefix, kind = "cmpl", "text_completion"
    needs_past = True

    def __init__(self, heading: Heading, usage: UsageTerms) -> None:
        super().__init__(heading, usage)
        self._offsets: dict[int, int] = {}

    def _spoken(self, event: Event) -> bytes:
        logprobs = self._logprobs(event)
        if not (event.text or event.logprobs or event.finish_reason):
            return b""
        return b'id: %d\n%b{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}%b' % (
            event.seq,
            self._head,
            event.choice,
            orjson.dumps(event.text),
            logprobs,
            orjson.dumps(event.finish_reason),
            self._tail,
        )

    def _prompt(self, logprobs: bytes) -> bytes:
        choice = b'{"index":0,"text":"","logprobs":null,"finish_reason":null,"prompt_logprobs":%b}' % logprobs
        return self._head + choice + self._tail

    def _logprobs(self, event: Event) -> bytes:
        if not event.logprobs:
            return b"null"
        offset = self._offsets.get(event.choice, 0)
        self._offsets[event.choice] = offset + sum(len(entry["token"]) for entry in event.logprobs)
        return orjson.dumps(completion_logprobs(event.logprobs, offset))


def frames_for(
    stream_format: StreamFormat, heading: Heading, usage: UsageTerms = NO_USAGE, *, from_start: bool = False
) -> Frames:
    """The frames of a format. from_start: of a job with tools, whose chat must be read from its start."""
    if stream_format == "job":
        return JobFrames()
    if stream_format == "completion":
        return CompletionFrames(heading, usage)
    return ChatFrames(heading, usage, from_start=from_start)
