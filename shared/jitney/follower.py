"""One reader of one job: from its cursor, in order, without repeats and without gaps."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

from redis.exceptions import RedisError

from jitney.connection import pause_s
from jitney.errors import JitneyError, JobNotFound, QueueUnavailable, StreamLost
from jitney.joblog import PASSING_ERRORS, LogPage
from jitney.position import Message, Position, Step, parse
from jitney.queue import LOG_PAGE

__all__ = ["Follower", "Message", "StartRead", "parse"]


StartRead = Callable[[str, int], "asyncio.Task[LogPage | None]"]
"""(job id, cursor) -> the reading of the log from its event `cursor` on; its result is None when log or job is gone."""


class Follower:
    """Iterate over non-empty lists of messages, in the order of `seq`, up to the terminal one.

    What is published is kept until it is asked for, up to `max_messages` and `max_bytes`. Beyond that it
    is dropped and read from the log instead, so that a slow reader costs no memory and loses nothing.
    An await that is cancelled loses nothing either: the next one goes on from `cursor`.

    cursor: seq of the last event given out. ended: nothing more will come. regrowth_s: how long a log that has
    become shorter than what was read may take to reach it again, while a worker holds the job.
    """

    def __init__(
        self,
        job_id: str,
        cursor: int,
        start_read: StartRead,
        *,
        max_messages: int,
        max_bytes: int,
        max_outage_s: float,
        regrowth_s: float,
    ) -> None:
        self.job_id = job_id
        self._position = Position(cursor)
        self.ended = False
        self._start_read = start_read
        self._max_outage_s = max_outage_s
        self._regrowth_s = regrowth_s
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._kept: deque[Message] = deque()
        self._kept_bytes = 0
        self._is_behind = True
        self._is_known = False
        self._page: asyncio.Task[LogPage | None] | None = None
        self._num_failures = 0
        self._failing_since = 0.0
        self._num_short = 0
        self._short_since = 0.0
        self._error: JitneyError | None = None
        self._woken = asyncio.Event()

    @property
    def cursor(self) -> int:
        return self._position.cursor

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
        if self._page is not None:
            self._page.cancel()
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
            if self._page is not None or self._is_behind:
                messages = await self._catch_up()
            elif self._kept:
                messages = self._drain()
            else:
                self._woken.clear()
                await self._woken.wait()
                continue
            if messages:
                return messages
        return []

    async def _catch_up(self) -> list[Message]:
        page = await self._read_page()
        if page is None:
            return []
        messages = [self._readable(payload) for payload in page.payloads]
        if self.cursor and not messages:
            await self._await_regrowth(page)
            return []
        self._num_short = 0
        if len(page.payloads) > LOG_PAGE:
            self.look()
        step = self._take_of_log(messages)
        if step.objection is not None:
            self._error = StreamLost(f"the log of {self.job_id} {step.objection}")
        elif page.over:
            self.ended = True
        return step.taken

    async def _await_regrowth(self, page: LogPage) -> None:
        """The log ends before what was read: Redis came back without its latest moments.

        The worker that wrote them, if it lives, writes them once more; a loss told at once would be no loss.
        """
        now = asyncio.get_running_loop().time()
        if self._num_short == 0:
            self._short_since = now
        left_s = self._short_since + self._regrowth_s - now
        if left_s <= 0 or not page.is_running:
            shorter = f"no longer reaches event {self.cursor}, which was read: it ends at {page.last}"
            self._error = StreamLost(f"the log of {self.job_id} {shorter}")
            return
        self._num_short += 1
        self.look()
        await asyncio.sleep(min(left_s, pause_s(self._num_short)))

    async def _read_page(self) -> LogPage | None:
        """The log's next page; None if it has to be asked for again. Raises when the job is gone."""
        if self._page is None:
            # Lowered first: what is published during the read is kept, and repeats fall out by seq.
            self._is_behind = False
            self._page = self._start_read(self.job_id, self.cursor)
        # Waited for, not awaited: a cancelled reader must not break a Redis call off in the middle, which
        # would cost the connection and, at a bad moment, the pool's place for it.
        await asyncio.wait({self._page})
        reading, self._page = self._page, None
        try:
            page = None if reading.cancelled() else reading.result()
        except PASSING_ERRORS as error:
            self._is_behind = True
            await self._pause(error)
            return None
        except RedisError as error:
            self._is_behind = True  # or whoever reads on all the same would wait for what is in the log already
            raise QueueUnavailable(f"the log of {self.job_id} cannot be read: {error}") from error
        if page is None and not reading.cancelled():
            raise self._lost()
        self._is_behind |= page is None
        self._is_known, self._num_failures = True, 0
        return page

    async def _pause(self, error: Exception) -> None:
        now = asyncio.get_running_loop().time()
        if self._num_failures == 0:
            self._failing_since = now
        if now - self._failing_since > self._max_outage_s:
            raise QueueUnavailable(f"the log of {self.job_id} cannot be read: {error}") from error
        self._num_failures += 1
        await asyncio.sleep(pause_s(self._num_failures))

    def _drain(self) -> list[Message]:
        messages = list(self._kept)
        self._forget()
        step = self._take(messages)
        if step.objection is not None:
            self.look()  # whether a message was lost, or the log is another one: the log itself will say
        return step.taken

    def _take_of_log(self, messages: list[Message]) -> Step:
        objection = self._position.recognise(messages)
        return Step([], objection) if objection is not None else self._take(messages)

    def _take(self, messages: list[Message]) -> Step:
        step = self._position.take(messages)
        if step.taken and step.taken[-1].event.is_terminal:
            self.ended = True
        return step

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
