"""What an API says of a Redis that does not do its part: whether waiting helps, and nothing of hosts or passwords."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    ClusterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,
)

from jitney.calls import words_of
from jitney.errors import QueueUnavailable


@dataclass(frozen=True, slots=True)
class Trouble:
    """message: for whoever asked. retry_after_s: None when it does not pass before somebody mends it."""

    message: str
    retry_after_s: float | None


SILENT: Final = Trouble("the queue does not answer just now; try again", 1.0)
_LATE: Final = Trouble("the queue did not answer in time; try again", 1.0)
_STARTING: Final = Trouble("the queue's server is starting and reads its data; try again", 1.0)
_FAILING_OVER: Final = Trouble("the queue's server is a replica just now (a failover?); try again", 1.0)
_FULL: Final = Trouble("the queue's server has no memory left for new jobs; try again later", 10.0)
_DISK: Final = Trouble("the queue's server cannot write to its disk and takes no new jobs; try again later", 10.0)
_LOCKED_OUT: Final = Trouble(
    "the queue's server refuses this API: redis_url names no user with the right password and rights", None
)

_BY_KIND: Final[tuple[tuple[type[RedisError], Trouble], ...]] = (
    (BusyLoadingError, _STARTING),
    (AuthenticationError, _LOCKED_OUT),
    (AuthorizationError, _LOCKED_OUT),
    (NoPermissionError, _LOCKED_OUT),
    (ReadOnlyError, _FAILING_OVER),
    (ClusterDownError, _FAILING_OVER),  # MASTERDOWN is one of these
    (OutOfMemoryError, _FULL),
    (TimeoutError, _LATE),
)
_BY_WORD: Final = (
    ("LOADING", _STARTING),
    ("NOAUTH", _LOCKED_OUT),
    ("NOPERM", _LOCKED_OUT),
    ("READONLY", _FAILING_OVER),
    ("MASTERDOWN", _FAILING_OVER),
    ("OOM", _FULL),
    ("MISCONF", _DISK),
)
"""Where redis-py knows no kind, or another server's words came through a script."""


def trouble_of(error: QueueUnavailable) -> Trouble:
    """What stands behind it, by the error that Redis or its client raised."""
    cause: BaseException | None = error.__cause__
    while cause is not None and not isinstance(cause, RedisError):
        cause = cause.__cause__
    for kind, trouble in _BY_KIND:
        if isinstance(cause, kind):
            return trouble
    said = words_of(cause) if isinstance(cause, ResponseError) else ""
    for word, trouble in _BY_WORD:
        if said.startswith(word):
            return trouble
    return SILENT
