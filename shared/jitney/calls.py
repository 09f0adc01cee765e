"""How a queue's methods call their scripts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeVar

from redis.exceptions import (
    ClusterDownError,
    ConnectionError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TimeoutError,
    TryAgainError,
)

from jitney import scripts
from jitney.connection import Redis
from jitney.errors import QueueUnavailable
from jitney.keys import Keys
from jitney.topology import redirection

_Item = TypeVar("_Item")

_UNWILLING: Final = (OutOfMemoryError, ReadOnlyError, ClusterDownError, TryAgainError)
"""Refusals that redis-py knows, and whose code it strips; MASTERDOWN is a kind of CLUSTERDOWN there."""

_UNWILLING_WORDS: Final = ("OOM", "READONLY", "LOADING", "MISCONF", "NOREPLICAS", "MASTERDOWN", "CLUSTERDOWN", "BUSY")
"""How the others begin, and those that come behind an "ERR ", which is stripped as well."""

_OF_A_PIPELINE: Final = " of pipeline caused error: "
"""What redis-py puts before them, after the command; they themselves stand in brackets and quotes then."""


class ScriptedQueue:
    """One queue over one client: its name, its keys, its scripts. annex: as for `Keys`."""

    def __init__(self, redis: Redis, name: str, *, annex: str = "") -> None:
        self.redis = redis
        self.name = name
        self.keys = Keys(name, annex=annex)

    def _call(self, keys: Sequence[str], arguments: Sequence[scripts.Argument]) -> scripts.Call:
        return scripts.Call(keys, [self.keys.prefix, *arguments])

    async def _run(self, name: str, keys: Sequence[str], arguments: Sequence[scripts.Argument]) -> Any:
        return await scripts.run(self.redis, scripts.load(name), self._call(keys, arguments))

    async def _run_or_unavailable(self, name: str, keys: Sequence[str], arguments: Sequence[scripts.Argument]) -> Any:
        with or_unavailable():
            return await self._run(name, keys, arguments)


@contextlib.contextmanager
def or_unavailable() -> Iterator[None]:
    """QueueUnavailable for a server that does not answer, or not just now; other errors stay what they are."""
    try:
        yield
    except (ConnectionError, TimeoutError) as error:  # LOADING is a kind of the first
        raise QueueUnavailable(f"Redis does not answer: {error}") from error
    except ResponseError as error:
        if elsewhere := redirection(error):
            raise QueueUnavailable(f"Redis does not answer: {elsewhere}") from error
        if not (isinstance(error, _UNWILLING) or words_of(error).startswith(_UNWILLING_WORDS)):
            raise
        raise QueueUnavailable(f"Redis refuses just now: {error}") from error


def words_of(error: ResponseError) -> str:
    """What the server said, without what redis-py puts before it in a pipeline."""
    return str(error).rpartition(_OF_A_PIPELINE)[2].lstrip("('\"")


def is_wrong_kind(answer: object) -> bool:
    """Something of another kind stands where a value of ours belongs: no fault of the server, and it will not pass."""
    return isinstance(answer, ResponseError) and words_of(answer).startswith("WRONGTYPE")


def slices(items: Sequence[_Item], size: int) -> Iterator[Sequence[_Item]]:
    """All items in order, at most `size` at a time."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def milliseconds(seconds: float | None) -> int:
    """Milliseconds for a script; 0 stands for "none" there. A positive time never becomes 0."""
    return 0 if not seconds else max(1, round(seconds * 1_000))
