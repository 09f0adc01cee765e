"""One reader of one job: from its cursor, in order, without repeats and without gaps."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from jitney.errors import JitneyError, JobNotFound, StreamLost
from jitney.joblog import LOG_PAGE, LogPage
from jitney.messages import Event


@dataclass(frozen=True, slots=True)
class Message:
    """An event and the very bytes it travelled in."""

    event: Event
    payload: bytes


ReadLog = Callable[[str, int], Awaitable[LogPage | None]]
"""(job id, cursor) -> the next page of at most LOG_PAGE events; None when neither log nor job exists."""


def parse(payload: bytes) -> Message | None:
    """The message in one payload; None for bytes that are no event (anybody may publish)."""
    try:
        event = Event.decode(payload)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return Message(event, payload) if type(event.seq) is int else None


class Follower:
    """Iterate over non-empty lists of messages, in the order of `seq`, up to the terminal one.

    What is published is kept until it is asked for, up to `max_messages` and `max_bytes`. Beyond that it
    is dropped and read from the log instead, so that a slow reader costs no memory and loses nothing.
    An await that is cancelled loses nothing either: the next one goes on from `cursor`.

    cursor: seq of the last event given out. ended: nothing more will come.
    """

    def __init__(
        self,
        job_id: str,
        cursor: int,
        read_log: ReadLog,
        *,
        max_messages: int,
        max_bytes: int,
    ) -> None:
        self.job_id = job_id
        self.cursor = cursor
        self.ended = False
        self._read_log = read_log
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._kept: deque[Message] = deque()
        self._kept_bytes = 0
        self._is_behind = True
        self._is_known = False
        self._error: JitneyError | None = None
        self._woken = asyncio.Event()

    # --- what the channel's reader calls -------------------------------------------------------

    @property
    def newest(self) -> int:
        """The highest seq given out or kept."""
        return max(self.cursor, self._kept[-1].event.seq) if self._kept else self.cursor

    def offer(self, messages: Iterable[Message]) -> None:
        """Keep what was published, unless the log will be read anyway."""
        if self._is_behind:
            return
        for message in messages:
            self._kept.append(message)
            self._kept_bytes += len(message.payload)
        if len(self._kept) > self._max_messages or self._kept_bytes > self._max_bytes:
            self.look()
        self._woken.set()

    def look(self) -> None:
        """Read the log before anything else: something may have been missed."""
        self._is_behind = True
        self._forget()
        self._woken.set()

    def fail(self, error: JitneyError) -> None:
        """Raise `error` in the reader."""
        self._error = error
        self._woken.set()

    # --- what its owner calls ------------------------------------------------------------------

    async def read(self, timeout_s: float | None = None) -> list[Message]:
        """Whatever has arrived, at least one message; nothing when the time is over or the stream has `ended`.

        Raises JobNotFound, StreamLost, QueueUnavailable.
        """
        try:
            async with asyncio.timeout(timeout_s) as waiting:
                return await self._next()
        except TimeoutError:
            if not waiting.expired():
                raise
            return []

    def __aiter__(self) -> Follower:
        return self

    async def __anext__(self) -> list[Message]:
        messages = await self._next()
        if not messages:
            raise StopAsyncIteration
        return messages

    async def _next(self) -> list[Message]:
        while not self.ended:
            if self._error is not None:
                raise self._error
            messages = await self._catch_up() if self._is_behind else self._drain()
            if messages:
                return messages
            if not (self._is_behind or self._kept or self.ended):
                self._woken.clear()
                await self._woken.wait()
        return []

    async def _catch_up(self) -> list[Message]:
        # Lowered first: what is published during the read is kept, and repeats fall out by seq.
        self._is_behind = False
        page = None
        try:
            page = await self._read_log(self.job_id, self.cursor)
        finally:
            if page is None:
                self._is_behind = True
        if page is None:
            raise self._lost()
        self._is_known = True
        if len(page.payloads) >= LOG_PAGE:
            self.look()
        taken, has_gap = self._take([self._readable(payload) for payload in page.payloads])
        if has_gap:
            self._error = StreamLost(f"the log of {self.job_id} has a hole after event {self.cursor}")
        if page.over:
            self.ended = True
        return taken

    def _drain(self) -> list[Message]:
        messages = list(self._kept)
        self._forget()
        taken, has_gap = self._take(messages)
        if has_gap:
            self.look()
        return taken

    def _take(self, messages: list[Message]) -> tuple[list[Message], bool]:
        """Those that follow the cursor without a gap, and whether there was one."""
        taken: list[Message] = []
        for message in messages:
            seq = message.event.seq
            if seq <= self.cursor:
                continue
            if seq > self.cursor + 1:
                return taken, True
            taken.append(message)
            self.cursor = seq
            if message.event.is_terminal:
                self.ended = True
                break
        return taken, False

    def _readable(self, payload: bytes) -> Message:
        message = parse(payload)
        if message is None:
            raise StreamLost(f"the log of {self.job_id} holds something unreadable after event {self.cursor}")
        return message

    def _lost(self) -> JitneyError:
        if not self._is_known:
            return JobNotFound(f"no job {self.job_id}: it never existed, or its record has expired")
        return StreamLost(f"the log of {self.job_id} is gone; events up to {self.cursor} were read")

    def _forget(self) -> None:
        self._kept.clear()
        self._kept_bytes = 0
