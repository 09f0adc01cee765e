"""A job on board: its sequences' tokens become events here. Pure values; nothing awaits.

The engine says what each sequence gained; this module says what the job's log gains, in order:
`started` with the first tokens of a claim, one `tokens` event per choice and write, one terminal event.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from jitney.call_formats import CallTerms
from jitney.keys import Band, Fence, JobId
from jitney.messages import Event, JobSpec, usage_of
from jitney.queue import Append, Delivery, Ending, pack_ids
from jitney.vectors import pack_embedding
from jitney_worker.engine.protocol import RowFailure, SequenceDelta, TokenLogprobs
from jitney_worker.runtime.choice import Choice, SpellsLogprobs
from jitney_worker.runtime.log_tail import LogTail

DEFAULT_KEEP_S = 3_600
BULK_KEEP_S = 86_400


@dataclass(slots=True)
class RunningJob:
    """A claimed job and its choices. next_seq: the seq that its next event will carry.

    calls: how its answers write calls of tools, for its readers.
    is_held_back: not in the engine yet, because a suspect waits until everybody else has said something.
    error: what the job ends with. dead_reason: why it is then kept among the dead letters.
    """

    delivery: Delivery
    spec: JobSpec
    prompt_ids: tuple[int, ...]
    choices: list[Choice]
    next_seq: int
    spell_logprobs: SpellsLogprobs
    fingerprint: str
    calls: CallTerms | None = None
    cached_tokens: int = 0
    is_started: bool = False
    is_seated: bool = False
    submitted_at: float = 0.0
    is_held_back: bool = False
    is_expired: bool = False
    error: dict[str, Any] | None = None
    dead_reason: str | None = None
    _prompt_logprobs: tuple[TokenLogprobs, ...] | None = field(init=False, default=None)
    _embedding: bytes | None = field(init=False, default=None)
    _tail: LogTail = field(init=False)
    _last_write: Append | Ending | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._tail = LogTail(self.next_seq)

    @property
    def id(self) -> JobId:
        return self.delivery.id

    @property
    def fence(self) -> Fence:
        return self.delivery.fence

    @property
    def band(self) -> Band:
        return self.delivery.band

    @property
    def num_seats(self) -> int:
        """Seats that its choices still need; at least one as long as it is here."""
        return max(1, sum(choice.finish_reason is None for choice in self.choices))

    @property
    def num_tokens(self) -> int:
        return sum([choice.num_tokens for choice in self.choices])

    @property
    def keep_s(self) -> int:
        return keep_s(self.spec)

    def gain(self, choice: Choice, delta: SequenceDelta) -> None:
        """Take in what one of its choices gained in a step."""
        self.is_seated = True
        if delta.num_cached_tokens and not self.is_started:
            self.cached_tokens = delta.num_cached_tokens
        if choice.request.params.num_prompt_logprobs is not None and self._prompt_logprobs is None:
            self._prompt_logprobs = delta.prompt_logprobs
        self._embedding = delta.embedding
        choice.gain(delta)
        if delta.error is not None:
            self.fail(_wire(delta.error, "structured_outputs" if self.calls is None else "tools"))

    def fail(self, error: dict[str, Any]) -> None:
        """The job ends with this error, after what it has said so far, held-back text included."""
        self.error = error
        self._flush()

    def bury(self, error: dict[str, Any]) -> None:
        """As `fail`, and the job is kept among the dead letters: it may run again once its cause is mended."""
        self.error, self.dead_reason = error, str(error["code"])
        self._flush()

    def silence(self, error: dict[str, Any], next_seq: int) -> None:
        """The job ends with this error alone: what it had to say since `next_seq` cannot be said."""
        self.error, self.next_seq = error, next_seq
        for choice in self.choices:
            choice.drop_pending()

    def expire(self) -> None:
        """The job's deadline has passed: it ends after what it has said so far, held-back text included."""
        self.is_expired = True
        self._flush()

    def _flush(self) -> None:
        try:
            for choice in self.choices:
                choice.flush()
        except Exception:  # the job ends for another reason: what cannot be spelled is not said, and stops nobody
            for choice in self.choices:
                choice.drop_pending()

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
        if self.is_expired or self.error is not None:
            return True
        for choice in self.choices:  # noqa: SIM110, asked several times a token: a generator takes thrice as long
            if choice.finish_reason is None:
                return False
        return True

    @property
    def is_urgent(self) -> bool:
        """True if somebody waits for its next write: for the first words of an answer, or for its end."""
        return not self.is_started or self.is_over

    def write(self) -> Append | Ending | None:
        """What the log gains now: nothing, some events, or the last ones with the terminal event."""
        written = self._next_write()
        if written is not None:
            self._tail.extend(written.first_seq, written.events)
            self._last_write = written
        return written

    def write_again(self, after_seq: int) -> Append | Ending | None:
        """All that this claim has written after `after_seq`, the last write included, byte for byte.

        None if that is not known: it was written before this claim, or is too long ago, or the log is longer.
        """
        events, last = self._tail.after(after_seq), self._last_write
        if not events or last is None:
            return None
        again = replace(last, first_seq=after_seq + 1, events=events, num_prompt_tokens=len(self.prompt_ids))
        # The prompt ids went in with the log's first events, and may be gone with them.
        return replace(again, prompt_ids=pack_ids(self.prompt_ids)) if isinstance(again, Append) else again

    def _next_write(self) -> Append | Ending | None:
        first_seq = self.next_seq
        is_first = self.delivery.prompt_ids is None and first_seq == self.delivery.seq + 1
        num_prompt_tokens = len(self.prompt_ids) if is_first else None
        events = [event.encode() for event in self._news()]
        if self.is_over:
            terminal = self._terminal()
            self.next_seq += 1
            return Ending(
                self.id,
                self.fence,
                first_seq,
                self.num_tokens,
                terminal.type,
                [*events, terminal.encode()],
                keep_s=self.keep_s,
                dead_reason=self.dead_reason,
                num_prompt_tokens=num_prompt_tokens,
            )
        if not events:
            return None
        return Append(
            self.id,
            self.fence,
            first_seq,
            self.num_tokens,
            events,
            prompt_ids=pack_ids(self.prompt_ids) if is_first else None,
            num_prompt_tokens=num_prompt_tokens,
        )

    def _news(self) -> list[Event]:
        events = []
        talking = [choice for choice in self.choices if choice.has_news]
        for choice in talking:
            choice.spell()  # all of them first: one that cannot be spelled must not take the words of the others along
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
            call_format=None if self.calls is None else self.calls.format,
            max_calls=None if self.calls is None else self.calls.max_calls,
            prompt_logprobs=self._spelled_prompt(),
        )
        self.next_seq += 1
        return event

    def _spelled_prompt(self) -> tuple[dict[str, Any] | None, ...] | None:
        """One entry for each token of the prompt; of the first one nothing can be said."""
        if self._prompt_logprobs is None:
            return None
        return (None, *self.spell_logprobs(self.prompt_ids[1:], self._prompt_logprobs))

    def _terminal(self) -> Event:
        usage = usage_of(len(self.prompt_ids), self.num_tokens, self.cached_tokens)
        if self.is_expired:
            return Event("expired", self.next_seq, usage=usage, fingerprints=self._several_builds())
        if self.error is not None:
            fingerprints = self._several_builds()
            return Event("failed", self.next_seq, error=self.error, usage=usage, fingerprints=fingerprints)
        return Event(
            "finished",
            self.next_seq,
            choices=tuple(
                {"choice": choice.number, "finish_reason": choice.finish_reason, "num_tokens": choice.num_tokens}
                for choice in self.choices
            ),
            usage=usage,
            fingerprints=self._several_builds(),
            embedding=None if self._embedding is None else pack_embedding(self._embedding),
        )

    def _several_builds(self) -> tuple[str, ...] | None:
        """The builds whose words are in the log, when there is more than one: two models in one answer are told."""
        builds = self.delivery.fingerprints
        if self.is_started and builds[-1:] != (self.fingerprint,):
            builds += (self.fingerprint,)
        return builds if len(builds) > 1 else None


def _wire(failure: RowFailure, structured_by: str) -> dict[str, Any]:
    """The error of a sequence that failed alone. A job whose own options leave it no token is no fault of ours.

    structured_by: the field that asked for its structure.
    """
    kind = "invalid_request_error" if failure.code in ("no_token_left", "structure_failed") else "server_error"
    param = structured_by if failure.code == "structure_failed" else None
    return {"type": kind, "code": failure.code, "message": failure.message, "param": param}


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
