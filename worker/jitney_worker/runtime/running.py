"""A job on board: its sequences' tokens become events here. Pure values; nothing awaits.

The engine says what each sequence gained; this module says what the job's log gains, in order:
`started` with the first tokens of a claim, one `tokens` event per choice and write, one terminal event.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from jitney.keys import Fence, JobId
from jitney.messages import Event, FinishReason, JobSpec, usage_of
from jitney.queue import Append, Delivery, Ending, pack_ids
from jitney_worker.engine.protocol import SequenceDelta, TokenLogprobs
from jitney_worker.engine.sequence import SequenceId, SequenceRequest
from jitney_worker.text.spelling import Speller

DEFAULT_KEEP_S = 3_600
BULK_KEEP_S = 86_400


class SpellsLogprobs(Protocol):
    """Turns token ids with their log probabilities into what stands in an event."""

    def __call__(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> list[dict[str, Any]]: ...


def sequence_id(delivery: Delivery, choice: int) -> SequenceId:
    """`<job id>/<choice>/<fence>`: one choice of one handing-out.

    A job that comes back to this worker is another sequence: the engine may still be speaking of the first one.
    """
    return SequenceId(f"{delivery.id}/{choice}/{delivery.fence}")


def job_id_of(sequence: SequenceId) -> JobId:
    return JobId(sequence.split("/")[0])


def choice_of(sequence: SequenceId) -> int:
    return int(sequence.split("/")[1])


def fence_of(sequence: SequenceId) -> Fence:
    return Fence(sequence.split("/")[2])


@dataclass(slots=True)
class Choice:
    """One sequence of a job, as its reader sees it.

    num_logged: tokens that are in the log. The pending lists are what the next event will say.
    """

    request: SequenceRequest
    speller: Speller
    num_logged: int
    num_tokens: int
    pending_ids: list[int] = field(default_factory=list)
    pending_logprobs: list[TokenLogprobs] = field(default_factory=list)
    pending_text: str = ""
    finish_reason: FinishReason | None = None
    finish_is_logged: bool = False

    @property
    def number(self) -> int:
        return self.request.params.choice

    def gain(self, delta: SequenceDelta) -> None:
        """Spell what the engine gave; at the end, flush what was held back."""
        for token_id in delta.token_ids:
            self.pending_text += self.speller.push(token_id).text
        self.pending_ids += delta.token_ids
        self.pending_logprobs += delta.logprobs
        self.num_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.pending_text += self.speller.flush()

    @property
    def has_news(self) -> bool:
        return bool(self.pending_ids or self.pending_text) or (
            self.finish_reason is not None and not self.finish_is_logged
        )

    def event(self, seq: int, spell_logprobs: SpellsLogprobs) -> Event:
        """The pending tokens as one event; nothing is pending afterwards."""
        logprobs = None
        if self.request.params.num_logprobs is not None and self.pending_ids:
            logprobs = tuple(spell_logprobs(self.pending_ids, self.pending_logprobs))
        event = Event(
            "tokens",
            seq,
            choice=self.number,
            index=self.num_logged,
            token_ids=tuple(self.pending_ids),
            text=self.pending_text,
            logprobs=logprobs,
            finish_reason=self.finish_reason,
        )
        self.num_logged += len(self.pending_ids)
        self.finish_is_logged = self.finish_reason is not None
        self._forget_pending()
        return event

    def flush(self) -> None:
        """Nothing more will come: what was held back is text now."""
        if self.finish_reason is None and not self.speller.stopped:
            self.pending_text += self.speller.flush()

    def drop_pending(self) -> None:
        """What is pending will not be said, so it does not count either."""
        self.num_tokens = self.num_logged
        self._forget_pending()

    def _forget_pending(self) -> None:
        self.pending_ids, self.pending_logprobs, self.pending_text = [], [], ""


@dataclass(slots=True)
class RunningJob:
    """A claimed job and its choices. next_seq: the seq that its next event will carry.

    is_held_back: not in the engine yet, because a suspect waits until everybody else has said something.
    """

    delivery: Delivery
    spec: JobSpec
    prompt_ids: tuple[int, ...]
    choices: list[Choice]
    next_seq: int
    spell_logprobs: SpellsLogprobs
    cached_tokens: int = 0
    is_started: bool = False
    is_seated: bool = False
    submitted_at: float = 0.0
    is_held_back: bool = False
    is_expired: bool = False
    error: dict[str, Any] | None = None

    @property
    def id(self) -> JobId:
        return self.delivery.id

    @property
    def fence(self) -> Fence:
        return self.delivery.fence

    @property
    def num_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def keep_s(self) -> int:
        return keep_s(self.spec)

    def gain(self, delta: SequenceDelta) -> None:
        """Take one sequence's step in."""
        choice = self.choices[choice_of(delta.id)]
        self.is_seated = True
        if delta.num_cached_tokens:
            self.cached_tokens = delta.num_cached_tokens
        choice.gain(delta)
        if delta.error is not None:
            self.fail({"type": "server_error", "code": delta.error.code, "message": delta.error.message, "param": None})

    def fail(self, error: dict[str, Any]) -> None:
        """The job ends with this error, after what it has said so far."""
        self.error = error

    def silence(self, error: dict[str, Any], next_seq: int) -> None:
        """The job ends with this error alone: what it had to say since `next_seq` cannot be said."""
        self.error, self.next_seq = error, next_seq
        for choice in self.choices:
            choice.drop_pending()

    def expire(self) -> None:
        """The job's deadline has passed: it ends after what it has said so far, held-back text included."""
        self.is_expired = True
        for choice in self.choices:
            choice.flush()

    @property
    def has_progressed(self) -> bool:
        """True if this claim has added to the log: whoever claims next will not hold it for a suspect."""
        return self.next_seq > self.delivery.seq + 1

    @property
    def is_suspect(self) -> bool:
        """True while it is not known whether it was this job that ended its last claimer."""
        return self.delivery.strikes > 0 and not self.has_progressed

    @property
    def is_over(self) -> bool:
        return (
            self.is_expired
            or self.error is not None
            or all(choice.finish_reason is not None for choice in self.choices)
        )

    def write(self) -> Append | Ending | None:
        """What the log gains now: nothing, some events, or the last ones with the terminal event."""
        first_seq = self.next_seq
        is_first = self.delivery.prompt_ids is None and first_seq == self.delivery.seq + 1
        num_prompt_tokens = len(self.prompt_ids) if is_first else None
        events = self._news()
        if self.is_over:
            events.append(self._terminal())
            self.next_seq += 1
            return Ending(
                self.id,
                self.delivery.fence,
                first_seq,
                self.num_tokens,
                events[-1].type,
                [event.encode() for event in events],
                keep_s=self.keep_s,
                num_prompt_tokens=num_prompt_tokens,
            )
        if not events:
            return None
        return Append(
            self.id,
            self.delivery.fence,
            first_seq,
            self.num_tokens,
            [event.encode() for event in events],
            prompt_ids=pack_ids(self.prompt_ids) if is_first else None,
            num_prompt_tokens=num_prompt_tokens,
        )

    def _news(self) -> list[Event]:
        events = []
        talking = [choice for choice in self.choices if choice.has_news]
        if talking and not self.is_started:
            events.append(self._started())
        for choice in talking:
            events.append(choice.event(self.next_seq, self.spell_logprobs))
            self.next_seq += 1
        return events

    def _started(self) -> Event:
        """Written with the first tokens of a claim, so that it is no progress by itself."""
        self.is_started = True
        resumed = sum(choice.num_logged for choice in self.choices)
        event = Event(
            "started",
            self.next_seq,
            attempt=self.delivery.tries,
            prompt_tokens=len(self.prompt_ids),
            cached_tokens=self.cached_tokens,
            resumed_tokens=resumed or None,
            max_tokens=self.choices[0].request.params.max_tokens if self.spec.sampling.max_tokens is None else None,
        )
        self.next_seq += 1
        return event

    def _terminal(self) -> Event:
        usage = usage_of(len(self.prompt_ids), self.num_tokens, self.cached_tokens)
        if self.is_expired:
            return Event("expired", self.next_seq, usage=usage)
        if self.error is not None:
            return Event("failed", self.next_seq, error=self.error, usage=usage)
        return Event(
            "finished",
            self.next_seq,
            choices=tuple(
                {"choice": choice.number, "finish_reason": choice.finish_reason, "num_tokens": choice.num_tokens}
                for choice in self.choices
            ),
            usage=usage,
        )


def keep_s(spec: JobSpec | None) -> int:
    """How long a job and its log are kept after the end."""
    if spec is None:
        return DEFAULT_KEEP_S
    return spec.result_ttl_s or (BULK_KEEP_S if spec.band == "bulk" else DEFAULT_KEEP_S)


def refusal(delivery: Delivery, spec: JobSpec | None, error: dict[str, Any], *, is_dead: bool = False) -> Ending:
    """The ending of a job that never reached the engine."""
    event = Event("failed", delivery.seq + 1, error=error, usage=usage_of(0, delivery.num_tokens))
    return Ending(
        delivery.id,
        delivery.fence,
        delivery.seq + 1,
        delivery.num_tokens,
        "failed",
        [event.encode()],
        keep_s=keep_s(spec),
        dead_reason=error["code"] if is_dead else None,
    )
