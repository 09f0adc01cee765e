"""Which failures are worth another attempt, and how long to wait for it. Pure."""

from __future__ import annotations

import random
from typing import Final

from jitney.errors import (
    IdempotencyConflict,
    InvalidJob,
    JitneyError,
    JobEnded,
    JobNotFound,
    LeaseLost,
    Overloaded,
    QueueUnavailable,
    StreamLost,
)
from jitney.messages import RetryPolicy

LASTING: Final = (InvalidJob, IdempotencyConflict, JobEnded, JobNotFound, LeaseLost, StreamLost)
"""The job itself is wrong, has ended, or is another worker's: whoever tries again meets the same."""

PASSING: Final = (Overloaded, QueueUnavailable)

MAX_WAIT_S: Final = 600.0
"""Doubling stops here, unless the job itself asked for longer waits."""

_MAX_DOUBLINGS: Final = 32


def retryable(error: BaseException) -> bool:
    """True if another attempt, here or on another worker, may do better.

    What is no JitneyError (memory, Redis, torch, a lost worker) befell the job and was not caused by it; the
    limit on attempts is what stops a job that does cause it. Of ours, only errors known to last are not
    tried again: a wrong setting or a damaged model file is this worker's, and the next one may have neither.
    """
    if isinstance(error, PASSING) or not isinstance(error, JitneyError):
        return True
    return not isinstance(error, LASTING)


def backoff_s(policy: RetryPolicy, attempt: int, rng: random.Random) -> float:
    """Seconds to wait after failed attempt number `attempt` (from 1).

    The wait doubles with each attempt, up to MAX_WAIT_S or the policy's own first wait if that is longer.
    `jitter` is the share of it that is drawn at random: 1 = anything between nothing and the whole, so that
    jobs that failed together do not come back together.

    Source: exponential backoff with full jitter, M. Brooker, "Exponential Backoff And Jitter", 2015.
    """
    if attempt < 1:
        raise ValueError(f"attempt={attempt}: attempts count from 1")
    longest = max(MAX_WAIT_S, policy.backoff_s)
    whole = min(longest, policy.backoff_s * 2.0 ** min(attempt - 1, _MAX_DOUBLINGS))
    return whole * (1.0 - policy.jitter * rng.random())
