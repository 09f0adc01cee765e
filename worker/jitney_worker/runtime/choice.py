"""One choice of a job: an engine sequence as its reader sees it. Pure values; nothing awaits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from jitney.keys import Fence, JobId
from jitney.messages import Event, FinishReason
from jitney.queue import Delivery
from jitney_worker.engine.protocol import SequenceDelta, TokenLogprobs
from jitney_worker.engine.sequence import SequenceId, SequenceRequest
from jitney_worker.text.spelling import Speller
from jitney_worker.text.structures import Structure


class SpellsLogprobs(Protocol):
    """Turns token ids with their log probabilities into what stands in an event."""

    def __call__(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> list[dict[str, Any]]: ...


def sequence_id(delivery: Delivery, choice: int) -> SequenceId:
    """`<job id>/<choice>/<fence>`: one choice of one handing-out.

    A job that comes back to this worker is another sequence: the engine may still be speaking of the first one.
    """
    return SequenceId(f"{delivery.id}/{choice}/{delivery.fence}")


class Named(NamedTuple):
    """The parts of a sequence's id."""

    job_id: JobId
    choice: int
    fence: Fence


@lru_cache(maxsize=1_024)
def named(sequence: SequenceId) -> Named:
    """The inverse of `sequence_id`. Asked for every seat at every step, so the answers are kept."""
    job_id, choice, fence = sequence.split("/")
    return Named(JobId(job_id), int(choice), Fence(fence))


@dataclass(slots=True)
class Choice:
    """One sequence of a job, as its reader sees it.

    num_logged: tokens that are in the log. The pending lists are what the next event will say; of pending_ids the
    last num_unspelled have no text in pending_text yet.
    echo: text that stands before the first token's. structure: its state when the choice comes in; the engine thread's
    from then on. gained_at: monotonic seconds of its last token here, 0 before the first.
    """

    request: SequenceRequest
    speller: Speller
    num_logged: int
    num_tokens: int
    pending_ids: list[int] = field(default_factory=list)
    pending_logprobs: list[TokenLogprobs] = field(default_factory=list)
    pending_text: str = ""
    num_unspelled: int = 0
    finish_reason: FinishReason | None = None
    finish_is_logged: bool = False
    echo: str = ""
    structure: Structure | None = None
    gained_at: float = 0.0

    @property
    def number(self) -> int:
        return self.request.params.choice

    def gain(self, delta: SequenceDelta) -> None:
        """Spell what the engine gave; at the end, flush what was held back."""
        if delta.token_ids and self.echo:
            self.pending_text, self.echo = self.echo, ""
        self.pending_ids += delta.token_ids
        self.num_unspelled += len(delta.token_ids)
        self.pending_logprobs += delta.logprobs
        self.num_tokens += len(delta.token_ids)
        if delta.embedding is not None:
            self.finish_is_logged = True  # it stands in the terminal event; there is nothing to say before that
        if delta.finish_reason is not None:
            self.spell()
            self.finish_reason = delta.finish_reason
            self.pending_text += self.speller.flush()

    def spell(self) -> None:
        """Make text of the pending tokens that have none yet."""
        if self.num_unspelled:  # together, because the way to each costs as much as its text
            unspelled, self.num_unspelled = self.pending_ids[-self.num_unspelled :], 0
            self.pending_text += self.speller.push_all(unspelled)

    @property
    def has_news(self) -> bool:
        return bool(self.pending_ids or self.pending_text) or (
            self.finish_reason is not None and not self.finish_is_logged
        )

    def event(self, seq: int, spell_logprobs: SpellsLogprobs) -> Event:
        """The pending tokens as one event; nothing is pending afterwards."""
        self.spell()
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
        self.spell()
        if self.finish_reason is None and not self.speller.stopped:
            self.pending_text += self.speller.flush()

    def drop_pending(self) -> None:
        """What is pending will not be said, so it does not count either."""
        self.num_tokens = self.num_logged
        self._forget_pending()

    def _forget_pending(self) -> None:
        self.pending_ids, self.pending_logprobs, self.pending_text = [], [], ""
        self.num_unspelled = 0
