"""Is anybody there? Work that is given up when its client leaves, or takes nothing any more."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Never, TypeVar

from starlette.types import Message, Receive, Send

from jitney.tasks import end_tasks
from jitney_api.frames import KEEP_ALIVE

T = TypeVar("T")


class ClientGone(Exception):
    """Nobody is listening any more."""


class SlowReader(Exception):
    """The client is there, but has taken nothing for too long."""


async def unless(work: Coroutine[Any, Any, T], *watches: Coroutine[Any, Any, Never]) -> T:
    """The outcome of `work`, unless one of the watches raises first; then what it raised.

    Everything is over when this returns. A cancellation from outside passes through.
    """
    working, *_ = tasks = [asyncio.create_task(one) for one in (work, *watches)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        # Work first: a response that is complete looks to its watch like a client that left.
        ended = working if working in done else done.pop()
        outcome: T = ended.result()
        return outcome
    finally:
        await end_tasks(tasks)
        for task in tasks:
            if not task.cancelled():
                task.exception()  # seen: asyncio reports what nobody has looked at


async def client_leaves(receive: Receive) -> Never:
    """Raises ClientGone when the client disconnects. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientGone


class Pen:
    """Writes one streamed response, and knows for how long it has been silent, or stuck.

    No timer is set for a write: hundreds of streams write fifty times a second each.
    """

    def __init__(self, send: Send, *, keep_alive_s: float, write_timeout_s: float) -> None:
        self._send = send
        self._keep_alive_s = keep_alive_s
        self._write_timeout_s = write_timeout_s
        self._clock = asyncio.get_running_loop().time
        self._moved_at = self._clock()
        self._is_writing = False
        self._started = asyncio.Event()

    @property
    def has_started(self) -> bool:
        """The status is out: from now on what goes wrong must be said in the body."""
        return self._started.is_set()

    async def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        self._started.set()

    async def write(self, body: bytes) -> None:
        await self._say({"type": "http.response.body", "body": body, "more_body": True})

    async def finish(self, last_words: bytes = b"") -> None:
        await self._say({"type": "http.response.body", "body": last_words, "more_body": False})

    async def _say(self, message: Message) -> None:
        self._is_writing, self._moved_at = True, self._clock()
        await self._send(message)
        self._is_writing, self._moved_at = False, self._clock()

    async def keep_alive(self) -> Never:
        """A comment after every silence. Raises SlowReader when a write has been stuck for too long."""
        await self._started.wait()
        while True:
            limit_s = self._write_timeout_s if self._is_writing else self._keep_alive_s
            left_s = self._moved_at + limit_s - self._clock()
            if left_s > 0:
                # Never longer than the shorter limit: which of the two counts may change meanwhile.
                await asyncio.sleep(min(left_s, self._write_timeout_s))
            elif self._is_writing:
                raise SlowReader
            else:
                await self.write(KEEP_ALIVE)
