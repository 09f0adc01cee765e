"""Reading job logs for followers: page by page, and which of many quiet jobs have news."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from jitney.connection import Redis
from jitney.errors import QueueUnavailable
from jitney.keys import JobId, Keys, queue_of
from jitney.queue import Queue

LOG_PAGE = 256
"""Events read from a log in one call."""

PASSING_ERRORS = (RedisConnectionError, RedisTimeoutError, QueueUnavailable, OSError)
"""What a restart or a failover looks like from here."""

_CHECKED_AT_ONCE = 512


@dataclass(frozen=True, slots=True)
class LogPage:
    """What a job's log holds after a cursor. `over`: the job has ended, at or before the cursor.

    last: seq of the log's last event, told when there is nothing after the cursor.
    """

    payloads: list[bytes]
    over: bool = False
    last: int | None = None


class LogReader:
    """Logs of any queue of one server. Methods raise what Redis raises."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._queues: dict[str, Queue] = {}
        self._epochs: dict[str, bytes | None] = {}

    async def read(self, job_id: str, cursor: int) -> LogPage | None:
        """The next page, at most LOG_PAGE events; None when nothing will come any more, for want of log or job."""
        queue = self._queue(queue_of(job_id))
        if queue.name not in self._epochs:
            await self.changed_epochs({queue.name})
        payloads = await queue.read_log(JobId(job_id), cursor, count=LOG_PAGE)
        if payloads is None:
            return None
        if payloads:
            return LogPage(payloads)
        state, seq = await self._redis.hmget(queue.keys.job(job_id), ["state", "seq"])
        if state is None:
            return None  # a log whose job record is gone will never grow again
        last = int(seq or 0)
        if state != b"done":
            return LogPage([], last=last)
        if last <= cursor:
            return LogPage([], over=True, last=last)
        # It ended between the two questions, or its log is lost.
        payloads = await queue.read_log(JobId(job_id), cursor, count=LOG_PAGE)
        return LogPage(payloads) if payloads else None

    async def news(self, seen: Mapping[str, int]) -> set[str]:
        """Those of the jobs whose log no longer ends at the seq seen, or that are over or gone.

        One pipeline for up to 512 jobs.
        """
        moved: set[str] = set()
        jobs = list(seen.items())
        for start in range(0, len(jobs), _CHECKED_AT_ONCE):
            some = jobs[start : start + _CHECKED_AT_ONCE]
            async with self._redis.pipeline(transaction=False) as pipe:
                for job_id, _ in some:
                    pipe.hmget(Keys(queue_of(job_id)).job(job_id), ["state", "seq"])
                answers = await pipe.execute()
            for (job_id, newest), (state, seq) in zip(some, answers, strict=True):
                if state is None or state == b"done" or int(seq or 0) != newest:
                    moved.add(job_id)
        return moved

    async def changed_epochs(self, queues: set[str]) -> set[str]:
        """Those of the queues whose data set is another one than when it was first looked at."""
        if not queues:
            return set()
        names = sorted(queues)
        async with self._redis.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.get(Keys(name).epoch)
            answers = await pipe.execute()
        changed = set()
        for name, epoch in zip(names, answers, strict=True):
            known, self._epochs[name] = self._epochs.get(name), epoch
            if known is not None and epoch != known:
                changed.add(name)
        return changed

    def _queue(self, name: str) -> Queue:
        if name not in self._queues:
            self._queues[name] = Queue(self._redis, name)
        return self._queues[name]
