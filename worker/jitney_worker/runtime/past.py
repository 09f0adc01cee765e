"""What a job has said already: its log, read back by whoever goes on with it."""

from __future__ import annotations

from dataclasses import dataclass, field

from jitney.messages import Event, FinishReason


@dataclass(slots=True)
class PastChoice:
    """Tokens of one choice that are in the log, and how it ended if it did."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None


@dataclass(slots=True)
class Past:
    """Everything that earlier owners of a job have written.

    max_tokens: what the first one chose for a job that named no limit.
    """

    max_tokens: int | None = None
    _choices: dict[int, PastChoice] = field(default_factory=dict)

    def add(self, event: Event) -> None:
        """The next event of the log."""
        self.max_tokens = self.max_tokens or event.max_tokens
        choice = self.choice(event.choice)
        choice.token_ids.extend(event.token_ids)
        choice.finish_reason = event.finish_reason or choice.finish_reason

    def choice(self, number: int) -> PastChoice:
        return self._choices.setdefault(number, PastChoice())
