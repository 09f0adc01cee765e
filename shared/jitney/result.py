"""From events to a result: what every reader of a whole answer does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from jitney.call_formats import CALL_FORMATS, CallTerms
from jitney.call_reader import read_answer
from jitney.errors import JobCancelled, JobEnded, JobExpired, JobFailed
from jitney.keys import JobId
from jitney.messages import Event
from jitney.tool_calls import ToolCall
from jitney.vectors import unpack_embedding


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the answers to a job. `token_ids` holds the sampled end token too, `text` does not.

    logprobs: parallel to `token_ids`; None when none were asked for. tool_calls: the calls that the text writes, for a
    job with tools. content: the text without them; None if it is nothing but calls.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    logprobs: tuple[dict[str, Any], ...] | None = None
    content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """A finished job. `text`, `token_ids` and `finish_reason` are those of choice 0.

    prompt_logprobs: one entry for each token of the prompt, None for the first; None when none were asked for.
    packed_embedding: of a job with `pooling`, as it stands in the log: float32, little-endian, in base64.
    """

    id: JobId
    choices: tuple[Choice, ...]
    usage: dict[str, int]
    prompt_logprobs: tuple[dict[str, Any] | None, ...] | None = None
    packed_embedding: str | None = None

    @property
    def embedding(self) -> tuple[float, ...] | None:
        """The prompt's embedding, of length one; None for a job without `pooling`."""
        return None if self.packed_embedding is None else unpack_embedding(self.packed_embedding)

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        return self.choices[0].finish_reason


_ENDINGS: Final[dict[str, type[JobEnded]]] = {"failed": JobFailed, "cancelled": JobCancelled, "expired": JobExpired}


@dataclass(slots=True)
class _Growing:
    """A choice while its events come in."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    has_logprobs: bool = False
    finish_reason: str | None = None

    def add(self, event: Event) -> None:
        self.text.append(event.text)
        self.token_ids.extend(event.token_ids)
        if event.logprobs is not None:
            self.has_logprobs = True
            self.logprobs.extend(event.logprobs)
        self.finish_reason = event.finish_reason or self.finish_reason

    def choice(self, job_id: JobId, index: int, terms: CallTerms | None) -> Choice:
        logprobs = tuple(self.logprobs) if self.has_logprobs else None
        text = "".join(self.text)
        content, calls = (text, ()) if terms is None else read_answer(terms, job_id, index, text)
        return Choice(index, text, tuple(self.token_ids), self.finish_reason, logprobs, content, calls)


def terms_of(started: Event) -> CallTerms | None:
    """How a job writes calls, as its first `started` says; None for a job without tools.

    A form that a newer worker knows and this process does not is text: it is shown as it is.
    """
    if started.call_format is None or started.call_format not in CALL_FORMATS:
        return None
    return CallTerms(started.call_format, started.max_calls)


class Collector:
    """Adds up a job's events, from the first to the terminal one."""

    def __init__(self, job_id: JobId) -> None:
        self.job_id = job_id
        self._choices: dict[int, _Growing] = {0: _Growing()}
        self._prompt_logprobs: tuple[dict[str, Any] | None, ...] | None = None
        self._call_terms: CallTerms | None = None

    @property
    def text(self) -> str:
        """What choice 0 has said so far."""
        return "".join(self._choices[0].text)

    def add(self, event: Event) -> Result | None:
        """The result once `event` is `finished`. Raises JobFailed, JobCancelled or JobExpired at another ending."""
        if event.type == "started":
            self._prompt_logprobs = event.prompt_logprobs or self._prompt_logprobs
            self._call_terms = self._call_terms or terms_of(event)
        elif event.type == "tokens":
            self._choices.setdefault(event.choice, _Growing()).add(event)
        elif event.type == "finished":
            return self._result(event)
        elif event.is_terminal:
            raise self._ended(event)
        return None

    def _result(self, event: Event) -> Result:
        for ended in event.choices or ():
            growing = self._choices.setdefault(ended["choice"], _Growing())
            growing.finish_reason = ended.get("finish_reason") or growing.finish_reason
        choices = tuple(
            self._choices[index].choice(self.job_id, index, self._call_terms) for index in sorted(self._choices)
        )
        return Result(self.job_id, choices, event.usage or {}, self._prompt_logprobs, event.embedding)

    def _ended(self, event: Event) -> JobEnded:
        said = (event.error or {}).get("message")
        verb = "was cancelled" if event.type == "cancelled" else event.type
        message = f"job {self.job_id} {verb}"
        return _ENDINGS[event.type](
            f"{message}: {said}" if said else message, job_id=self.job_id, text=self.text, error=event.error
        )
