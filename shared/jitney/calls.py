"""How a queue's methods call their scripts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

from redis.exceptions import BusyLoadingError, ConnectionError, ReadOnlyError, RedisError, ResponseError, TimeoutError

from jitney import scripts
from jitney.connection import Redis
from jitney.errors import QueueUnavailable
from jitney.keys import Keys

_REFUSED_WRITES: Final = (
    "OOM",
    "READONLY",
    "LOADING",
    "MISCONF",
    "NOREPLICAS",
    "MASTERDOWN",
    "CLUSTERDOWN",
    "BUSY",
    "TRYAGAIN",
)


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
    """QueueUnavailable for a server that does not answer, or refuses to write; other errors stay what they are."""
    try:
        yield
    except (ConnectionError, TimeoutError, ReadOnlyError, BusyLoadingError) as error:
        raise QueueUnavailable(f"Redis does not take the job: {error}") from error
    except ResponseError as error:
        if not _refuses_writes(error):
            raise
        raise QueueUnavailable(f"Redis refuses to write: {error}") from error


def _refuses_writes(error: RedisError) -> bool:
    """redis-py strips the code of some errors and keeps it on others."""
    return type(error).__name__ == "OutOfMemoryError" or str(error).startswith(_REFUSED_WRITES)


def milliseconds(seconds: float | None) -> int:
    """Milliseconds for a script; 0 stands for "none" there. A positive time never becomes 0."""
    return 0 if not seconds else max(1, round(seconds * 1_000))
