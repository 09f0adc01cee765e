"""What a worker remembers of a job for the sake of its metrics, from the claim to the end."""

from __future__ import annotations

from dataclasses import dataclass

from jitney.queue import Delivery
from jitney_worker.runtime.running import RunningJob


@dataclass(slots=True)
class Ride:
    """One claim of a job. Moments are monotonic seconds, None before they have come.

    num_tokens: in the job's log, as far as this worker has written it or found it there.
    """

    delivery: Delivery
    claimed_at: float
    num_tokens: int
    job: RunningJob | None = None
    joined_at: float | None = None
    first_token_at: float | None = None
    is_written: bool = False
    prompt_is_counted: bool = False

    @property
    def last_token_at(self) -> float | None:
        """Of any of its choices, here."""
        if self.job is None or self.first_token_at is None:
            return None
        return max([self.first_token_at, *(choice.gained_at for choice in self.job.choices)])

    @property
    def is_first_claim(self) -> bool:
        """Nobody had it before: how long it has waited is not the time of an earlier attempt."""
        return self.delivery.tries == 1 and self.delivery.seq == 0

    @property
    def asked_at(self) -> float:
        """Unix seconds by the server's clock: the enqueueing, or what the job itself wanted to wait for."""
        not_before = self.job.spec.not_before if self.job is not None else None
        return max(self.delivery.at_ms / 1_000, not_before or 0.0)
