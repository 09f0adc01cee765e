"""Many who want the same thing at once ask for it once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from jitney.errors import QueueUnavailable
from jitney.tasks import end_tasks

T = TypeVar("T")


class SingleFlight(Generic[T]):
    """At most one call for each key at a time; whoever comes meanwhile shares its outcome, its error too.

    With a lock instead, a hundred callers of a server that hangs would wait for it one after the other.
    The call is nobody's own: a caller that is cancelled does not end it for the others.
    """

    def __init__(self) -> None:
        self._flying: dict[str, asyncio.Task[T]] = {}
        self._is_closed = False

    async def ask(self, key: str, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The outcome of the call that is under way for `key`, or of this one."""
        flying = self._flying.get(key)
        if flying is None:
            flying = self._flying[key] = asyncio.create_task(call())
            flying.add_done_callback(lambda task: self._landed(key, task))
        try:
            return await asyncio.shield(flying)
        except asyncio.CancelledError:
            if self._is_closed and flying.cancelled():
                raise QueueUnavailable("closed while the answer was on its way") from None
            raise

    def _landed(self, key: str, task: asyncio.Task[T]) -> None:
        del self._flying[key]
        if not task.cancelled():
            task.exception()  # seen: perhaps nobody waits any more, and asyncio would report it as forgotten

    async def aclose(self) -> None:
        """End what is under way. Whoever still waits for it gets QueueUnavailable."""
        self._is_closed = True
        await end_tasks(list(self._flying.values()))
