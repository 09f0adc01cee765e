"""How a job ended, handed to the task that Celery then runs to record it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Final

STREAMING: Final = "STREAMING"
"""State of a task whose job speaks; `AsyncResult.info` is then `Partial.shape()`."""

Outcome = Callable[[], dict[str, Any]]
"""Returns the answer, or raises what came instead."""

_here: ContextVar[Outcome | None] = ContextVar("jitney_outcome", default=None)


def outcome_here() -> Outcome | None:
    """None in a pool's process, where the task itself has to wait for the job."""
    return _here.get()


@contextlib.contextmanager
def recording(outcome: Outcome) -> Iterator[None]:
    """Within it, on this thread, the task has ended so."""
    token = _here.set(outcome)
    try:
        yield
    finally:
        _here.reset(token)


def answered(answer: dict[str, Any]) -> Outcome:
    return lambda: answer


def failed(error: Exception) -> Outcome:
    def fail() -> dict[str, Any]:
        raise error

    return fail
