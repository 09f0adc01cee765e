"""One pub/sub connection per process, shared by any number of followers.

The channel is the fast path, the log is the truth. A follower subscribes, waits for the confirmation,
reads the log from its cursor and then follows. It reads the log again at a gap, after a silence, when its
buffer was too small, and whenever a subscription is confirmed anew: that last one is the only sign of a
connection that was lost, and messages with it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any

import redis.asyncio as aredis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from jitney.connection import connect, connect_once, pause_s
from jitney.errors import InvalidJob, JitneyError, QueueUnavailable, StreamLost
from jitney.follower import Follower, Message
from jitney.joblog import LogPage, LogReader
from jitney.keys import Keys, queue_of
from jitney.logs import logger
from jitney.subscription import Subscription
from jitney.tasks import end_tasks

__all__ = ["ChannelReader", "Follower", "Message"]

QUIET_S = 2.0
PING_EVERY_S = 5.0
OPEN_TIMEOUT_S = 5.0
MAX_OUTAGE_S = 300.0
MAX_MESSAGES = 1_024
MAX_BYTES = 1 << 20
NUM_LOG_CONNECTIONS = 8
_BURST = 64

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
        max_messages: int = MAX_MESSAGES,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._log_redis = connect(url, name="jitney-log", max_connections=NUM_LOG_CONNECTIONS)
        self._logs = LogReader(self._log_redis)
        self._channel_redis = connect_once(url, name="jitney-channel")
        self._quiet_s = quiet_s
        self._open_timeout_s = open_timeout_s
        self._max_outage_s = max_outage_s
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._wanted: dict[bytes, Subscription] = {}
        self._sent: set[bytes] = set()
        self._live: set[bytes] = set()
        self._changed = asyncio.Event()
        self._has_sent = asyncio.Event()
        self._is_closed = False
        self._trouble: BaseException | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._reads: set[asyncio.Task[LogPage | None]] = set()

    # --- what callers use ----------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def follow(self, job_id: str, cursor: int = 0) -> AsyncIterator[Follower]:
        """The job's events after `cursor` (the last seq already seen), up to the terminal one.

        Raises InvalidJob for what is no job id, QueueUnavailable when the channel cannot be opened. Iterating
        raises JobNotFound for an unknown job, StreamLost when the log vanishes meanwhile.
        """
        if self._is_closed:
            raise QueueUnavailable("the channel reader was closed")
        if not isinstance(cursor, int) or cursor < 0:
            raise InvalidJob(f"cursor={cursor!r:.40} must be the seq of an event, or 0 for all of them", param="cursor")
        follower = Follower(
            job_id,
            cursor,
            self._start_read,
            max_messages=self._max_messages,
            max_bytes=self._max_bytes,
            max_outage_s=self._max_outage_s,
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
        await self._channel_redis.aclose()
        await self._log_redis.aclose()

    async def __aenter__(self) -> ChannelReader:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()

    # --- subscriptions -------------------------------------------------------------------------

    def _join(self, follower: Follower) -> bytes:
        channel = Keys(queue_of(follower.job_id)).tokens(follower.job_id).encode()
        subscription = self._wanted.get(channel)
        if subscription is None:
            subscription = self._wanted[channel] = Subscription(follower.job_id)
            if channel in self._live:
                subscription.confirmed.set()
        subscription.followers.add(follower)
        self._changed.set()
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._serve()), asyncio.create_task(self._watch())]
            for task in self._tasks:
                task.add_done_callback(self._on_end)
        return channel

    async def _opened(self, channel: bytes) -> None:
        try:
            async with asyncio.timeout(self._open_timeout_s):
                await self._wanted[channel].confirmed.wait()
        except TimeoutError:
            raise QueueUnavailable(
                f"no subscription within {self._open_timeout_s:g} s: {self._trouble or 'Redis does not answer'}"
            ) from None

    def _leave(self, channel: bytes, follower: Follower) -> None:
        """Without an await, so that neither a cancellation nor the end of a generator can skip it."""
        subscription = self._wanted.get(channel)
        if subscription is None:
            return
        subscription.followers.discard(follower)
        if not subscription.followers:
            del self._wanted[channel]
            self._changed.set()

    def _on_end(self, task: asyncio.Task[None]) -> None:
        """Neither task ends by itself: an error in one is told to everybody, instead of a silence for ever."""
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("channel_reader_failed", error=repr(error))
            self._fail_all(QueueUnavailable(f"the channel reader failed: {error!r}"))

    def _fail_all(self, error: JitneyError, *, queue: str | None = None) -> None:
        for subscription in self._wanted.values():
            if queue is None or queue_of(subscription.job_id) == queue:
                for follower in subscription.followers:
                    follower.fail(error)

    # --- the connection ------------------------------------------------------------------------

    async def _serve(self) -> None:
        """Keep a subscribed connection for as long as the reader lives."""
        clock = asyncio.get_running_loop().time
        attempt, down_since = 0, clock()
        while True:
            try:
                await self._live_once()
            except (RedisError, OSError) as error:
                self._trouble = error
            if self._live:  # the connection that just ended had worked
                attempt, down_since = 0, clock()
                _log.warning("channel_connection_lost", error=str(self._trouble))
            self._sent.clear()
            self._live.clear()
            if clock() - down_since > self._max_outage_s:
                self._fail_all(QueueUnavailable(f"Redis has not answered for {self._max_outage_s:g} s"))
            await asyncio.sleep(pause_s(attempt))
            attempt += 1

    async def _live_once(self) -> None:
        """One connection, until it breaks. The next one subscribes anew, and each confirmation means: read the log."""
        self._has_sent.clear()
        async with contextlib.aclosing(self._channel_redis.pubsub()) as pubsub:
            both = {asyncio.create_task(self._send(pubsub)), asyncio.create_task(self._listen(pubsub))}
            try:
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await end_tasks(both)
            # Of both, though the first will do: an error that nobody looks at is reported as forgotten.
            for error in [task.exception() for task in both if not task.cancelled()]:
                if error is not None:
                    raise error

    async def _send(self, pubsub: aredis.client.PubSub) -> None:
        """Subscribe and unsubscribe, so that what is sent equals what is wanted."""
        while True:
            fresh, stale = self._wanted.keys() - self._sent, self._sent - self._wanted.keys()
            if not (fresh or stale):
                self._changed.clear()
                await self._changed.wait()
                continue
            if stale:
                self._sent -= stale
                self._live -= stale
                await pubsub.unsubscribe(*stale)
            if fresh:
                self._sent |= fresh
                await pubsub.subscribe(*fresh)
                self._has_sent.set()

    async def _listen(self, pubsub: aredis.client.PubSub) -> None:
        is_pinged, num_read = False, 0
        while True:
            if not pubsub.subscribed:  # reading would raise, or return at once and for ever
                self._has_sent.clear()
                await self._has_sent.wait()
            message = await pubsub.get_message(timeout=PING_EVERY_S)
            if message is not None:
                is_pinged = False
                self._on_message(message)
            elif is_pinged:
                raise RedisConnectionError(f"no answer to a ping for {PING_EVERY_S:g} s")
            else:
                is_pinged = True
                await pubsub.ping()
            num_read += 1
            if num_read % _BURST == 0:
                await asyncio.sleep(0)  # a full socket is read without ever yielding to the followers

    def _on_message(self, message: dict[str, Any]) -> None:
        channel, kind = message["channel"], message["type"]
        subscription = self._wanted.get(channel)
        if kind == "subscribe" and channel in self._sent:
            self._live.add(channel)
            if subscription is not None:
                subscription.confirmed.set()
                subscription.look()
        elif kind == "message" and subscription is not None:
            subscription.heard_at = asyncio.get_running_loop().time()
            subscription.deliver(message["data"])

    # --- the log -------------------------------------------------------------------------------

    def _start_read(self, job_id: str, cursor: int) -> asyncio.Task[LogPage | None]:
        """A task of its own, so that it ends well even when its follower has left."""
        reading = asyncio.create_task(self._logs.read(job_id, cursor))
        self._reads.add(reading)
        reading.add_done_callback(self._end_read)
        return reading

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
        lost = await self._logs.changed_epochs({queue_of(one.job_id) for one in self._wanted.values()})
        for queue in lost:
            self._fail_all(StreamLost(f"the data of queue {queue!r} was replaced"), queue=queue)
        moved = await self._logs.news({one.job_id: one.newest for one in quiet if one.followers})
        for one in quiet:
            one.heard_at = asyncio.get_running_loop().time()
            if one.job_id in moved:
                one.look()
