"""One pub/sub connection per process, shared by any number of followers.

The channel is the fast path, the log is the truth. A follower subscribes, waits for the confirmation,
reads the log from its cursor and then follows. It reads the log again at a gap, after a silence, when its
buffer was too small, and whenever a subscription is confirmed anew: that last one is the only sign of a
connection that was lost, and messages with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import AsyncIterator, Coroutine
from types import TracebackType
from typing import Any

from redis.exceptions import RedisError

from jitney.connection import connect
from jitney.errors import JitneyError, QueueUnavailable, StreamLost
from jitney.follower import Follower, Message
from jitney.joblog import LogPage, LogReader
from jitney.keys import Keys, queue_of
from jitney.listening import Listener
from jitney.logs import logger
from jitney.position import check_cursor
from jitney.subscription import Subscription
from jitney.tasks import end_tasks

__all__ = ["ChannelReader", "Follower", "Message"]

QUIET_S = 2.0
OPEN_TIMEOUT_S = 5.0
MAX_OUTAGE_S = 300.0
REGROWTH_S = 60.0
"""A worker notices a rolled-back log with its next append, and writes what is missing. That may take as long as its
engine may go without a step (`stall_after_s`); a job that nobody holds any more is given up sooner."""

MAX_MESSAGES = 1_024
MAX_BYTES = 1 << 20
NUM_LOG_CONNECTIONS = 8
LOG_TIMEOUT_S = 2.0
"""Less than other calls have: a stream stands still meanwhile, and to read again on a fresh connection is harmless."""


_log = logger()


class ChannelReader:
    """Follow jobs of any queue of one server: `async with reader.follow(job_id) as stream`.

    Belongs to the event loop in which it is first used. A lost connection is made again with backoff and
    jitter while followers wait; they go on from the log.
    """

    def __init__(
        self,
        url: str,
        *,
        quiet_s: float = QUIET_S,
        open_timeout_s: float = OPEN_TIMEOUT_S,
        max_outage_s: float = MAX_OUTAGE_S,
        regrowth_s: float = REGROWTH_S,
        max_messages: int = MAX_MESSAGES,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._log_redis = connect(url, name="jitney-log", timeout_s=LOG_TIMEOUT_S, max_connections=NUM_LOG_CONNECTIONS)
        self._logs = LogReader(self._log_redis)
        self._quiet_s = quiet_s
        self._open_timeout_s = open_timeout_s
        self._max_outage_s = max_outage_s
        self._regrowth_s = regrowth_s
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._wanted: dict[bytes, Subscription] = {}
        self._listener = Listener(url, self._wanted)
        self._is_closed = False
        self._tasks: list[asyncio.Task[None]] = []
        self._reads: set[asyncio.Task[LogPage | None]] = set()

    # --- what callers use ----------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def follow(self, job_id: str, cursor: int = 0) -> AsyncIterator[Follower]:
        """The job's events after `cursor` (the last seq already seen), up to the terminal one.

        Raises InvalidJob for what is no job id, QueueUnavailable when the channel cannot be opened. Iterating
        raises JobNotFound for an unknown job, StreamLost when the log vanishes meanwhile, or is another one than
        was read: shorter, or with other events.
        """
        if self._is_closed:
            raise QueueUnavailable("the channel reader was closed")
        check_cursor(cursor)
        follower = Follower(
            job_id,
            cursor,
            self._start_read,
            max_messages=self._max_messages,
            max_bytes=self._max_bytes,
            max_outage_s=self._max_outage_s,
            regrowth_s=self._regrowth_s,
        )
        channel = self._join(follower)
        try:
            await self._opened(channel)
            yield follower
        finally:
            self._leave(channel, follower)

    async def aclose(self) -> None:
        """End every follower and close the connections."""
        self._is_closed = True
        await end_tasks(self._tasks)
        self._fail_all(QueueUnavailable("the channel reader was closed"))
        await asyncio.gather(*self._reads, return_exceptions=True)
        await self._listener.aclose()
        await self._log_redis.aclose()

    async def __aenter__(self) -> ChannelReader:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()

    # --- subscriptions -------------------------------------------------------------------------

    def _join(self, follower: Follower) -> bytes:
        channel = self._channel_of(follower.job_id)
        subscription = self._wanted.get(channel)
        if subscription is None:
            subscription = self._wanted[channel] = Subscription(follower.job_id)
            if channel in self._listener.live:
                subscription.confirmed.set()
        subscription.followers.add(follower)
        self._listener.renew()
        if not self._tasks:
            self._tasks = [self._start(self._listen()), self._start(self._watch())]
        return channel

    def _start(self, forever: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        # In a context of its own: it outlives the request that was the first to follow, and must not log under its id.
        task = asyncio.create_task(forever, context=contextvars.Context())
        task.add_done_callback(self._on_end)
        return task

    @staticmethod
    def _channel_of(job_id: str) -> bytes:
        return Keys(queue_of(job_id)).tokens(job_id).encode()

    async def _opened(self, channel: bytes) -> None:
        try:
            async with asyncio.timeout(self._open_timeout_s):
                await self._wanted[channel].confirmed.wait()
        except TimeoutError:
            why = self._listener.trouble or "Redis does not answer"
            raise QueueUnavailable(f"no subscription within {self._open_timeout_s:g} s: {why}") from None

    def _leave(self, channel: bytes, follower: Follower) -> None:
        """Without an await, so that neither a cancellation nor the end of a generator can skip it."""
        subscription = self._wanted.get(channel)
        if subscription is None:
            return
        subscription.followers.discard(follower)
        if not subscription.followers:
            del self._wanted[channel]
            self._listener.renew()

    def _on_end(self, task: asyncio.Task[None]) -> None:
        """Neither task ends by itself: an error in one is told to everybody, instead of a silence for ever."""
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("channel_reader_failed", error=repr(error))
            self._fail_all(QueueUnavailable(f"the channel reader failed: {error!r}"))
            for other in self._tasks:
                other.cancel()
            self._tasks = []  # the next follower starts both anew

    async def _listen(self) -> None:
        async for away_s in self._listener.outages():
            if away_s > self._max_outage_s:
                self._fail_all(QueueUnavailable(f"Redis has not answered for {self._max_outage_s:g} s"))

    def _fail_all(self, error: JitneyError) -> None:
        for subscription in self._wanted.values():
            subscription.fail(error)

    # --- the log -------------------------------------------------------------------------------

    def _start_read(self, job_id: str, cursor: int) -> asyncio.Task[LogPage | None]:
        """A task of its own, so that it ends well even when its follower has left."""
        reading = asyncio.create_task(self._read(job_id, cursor))
        self._reads.add(reading)
        reading.add_done_callback(self._end_read)
        return reading

    async def _read(self, job_id: str, cursor: int) -> LogPage | None:
        subscription = self._wanted.get(self._channel_of(job_id))
        if subscription is not None and subscription.epoch is None:
            # Per job: this process may have read the same queue in another life of the server.
            subscription.epoch = (await self._logs.epochs({queue_of(job_id)}))[queue_of(job_id)]
        return await self._logs.read(job_id, cursor)

    def _end_read(self, reading: asyncio.Task[LogPage | None]) -> None:
        self._reads.discard(reading)
        if not reading.cancelled():
            reading.exception()  # asked for here, or one that nobody waits for would be reported as forgotten

    # --- the quiet ones ------------------------------------------------------------------------

    async def _watch(self) -> None:
        """A last message that was lost leaves no gap: look after those that have heard nothing for a while."""
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(self._quiet_s / 2)
            quiet = [one for one in self._wanted.values() if clock() - one.heard_at >= self._quiet_s]
            try:
                await self._look_after(quiet)
            except (RedisError, OSError) as error:
                _log.debug("quiet_jobs_not_checked", error=str(error))  # the next round will

    async def _look_after(self, quiet: list[Subscription]) -> None:
        dated = [(one, one.epoch) for one in self._wanted.values() if one.epoch is not None]
        epochs = await self._logs.epochs({queue_of(one.job_id) for one, _ in dated})
        for one, epoch in dated:
            if epochs[queue := queue_of(one.job_id)] != epoch:
                one.fail(StreamLost(f"the data of queue {queue!r} was replaced"))
        moved = await self._logs.news({one.job_id: one.newest for one in quiet if one.followers})
        for one in quiet:
            one.heard_at = asyncio.get_running_loop().time()
            if one.job_id in moved:
                one.look()
