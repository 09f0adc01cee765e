"""Which failures are tried again, and after how long."""

from __future__ import annotations

import asyncio
import random

import pytest
import redis.exceptions

from jitney import errors
from jitney.messages import RetryPolicy
from jitney.retrying import MAX_WAIT_S, backoff_s, retryable


class Drawn(random.Random):
    """Draws what a test wants."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def random(self) -> float:
        return self.value


LOWEST, HIGHEST = Drawn(0.0), Drawn(1.0 - 2**-53)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("CUDA out of memory"),
        redis.exceptions.ConnectionError(),
        redis.exceptions.TimeoutError(),
        OSError(),
        asyncio.CancelledError(),
        errors.QueueUnavailable("x"),
        errors.NotDurable("x", job_id="j"),
        errors.Overloaded("x", waiting_jobs=1, waiting_tokens=1, retry_after_s=1.0),
        errors.ModelError("this worker's file is damaged"),
        errors.SettingsError("x"),
        errors.JitneyError("x"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_befell_a_job_is_tried_again(error: BaseException) -> None:
    assert retryable(error)


@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidJob("x"),
        errors.PromptTooLong(9, 8, what="the prompt"),
        errors.UnknownQueue("x", []),
        errors.IdempotencyConflict("x"),
        errors.JobCancelled("x", job_id="j"),
        errors.JobExpired("x", job_id="j"),
        errors.JobFailed("x", job_id="j"),
        errors.JobNotFound("x"),
        errors.LeaseLost("x"),
        errors.StreamLost("x"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_would_happen_again_is_not(error: BaseException) -> None:
    assert not retryable(error)


def test_the_wait_doubles_from_the_policys_own() -> None:
    policy = RetryPolicy(backoff_s=1.5, jitter=0.0)
    assert [backoff_s(policy, attempt, LOWEST) for attempt in (1, 2, 3, 4)] == [1.5, 3.0, 6.0, 12.0]


def test_the_wait_is_bounded_whatever_the_attempt() -> None:
    policy = RetryPolicy(backoff_s=1.0, jitter=0.0)
    assert backoff_s(policy, 10, LOWEST) == 512.0
    assert [backoff_s(policy, attempt, LOWEST) for attempt in (11, 100, 10**9)] == [MAX_WAIT_S] * 3


def test_a_longer_wait_that_the_job_asked_for_is_kept_but_does_not_grow() -> None:
    policy = RetryPolicy(backoff_s=5_000.0, jitter=0.0)
    assert [backoff_s(policy, attempt, LOWEST) for attempt in (1, 2, 9)] == [5_000.0] * 3


def test_full_jitter_draws_between_nothing_and_the_whole_wait() -> None:
    policy = RetryPolicy(backoff_s=8.0, jitter=1.0)
    assert backoff_s(policy, 2, LOWEST) == 16.0
    assert 0.0 <= backoff_s(policy, 2, HIGHEST) < 1e-12
    assert backoff_s(policy, 2, Drawn(0.25)) == 12.0


def test_half_jitter_keeps_half_of_the_wait() -> None:
    policy = RetryPolicy(backoff_s=8.0, jitter=0.5)
    assert backoff_s(policy, 1, LOWEST) == 8.0
    assert backoff_s(policy, 1, Drawn(0.5)) == 6.0
    assert backoff_s(policy, 1, HIGHEST) == pytest.approx(4.0)


def test_jobs_that_failed_together_come_back_apart() -> None:
    waits = {backoff_s(RetryPolicy(), 3, random.Random(seed)) for seed in range(100)}
    assert len(waits) == 100
    assert all(2.0 <= wait <= 4.0 for wait in waits)


def test_no_wait_stays_no_wait() -> None:
    assert backoff_s(RetryPolicy(backoff_s=0.0), 7, LOWEST) == 0.0


@pytest.mark.parametrize("attempt", [0, -1])
def test_attempts_count_from_one(attempt: int) -> None:
    with pytest.raises(ValueError, match="from 1"):
        backoff_s(RetryPolicy(), attempt, LOWEST)
