"""Reading job logs for followers: page by page, and which of many quiet jobs have news."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from redis.exceptions import ClusterDownError, ReadOnlyError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from jitney.calls import is_wrong_kind, or_unavailable, slices
from jitney.connection import Redis
from jitney.errors import QueueUnavailable
from jitney.keys import JobId, Keys, queue_of
from jitney.queue import LOG_PAGE, Queue

PASSING_ERRORS = (RedisConnectionError, RedisTimeoutError, ClusterDownError, ReadOnlyError, QueueUnavailable, OSError)
"""What a restart or a failover looks like from here; LOADING is a kind of the first, MASTERDOWN of the third."""

_CHECKED_AT_ONCE = 512


@dataclass(frozen=True, slots=True)
class LogPage:
    """A job's log from a cursor on: the event at the cursor itself first (unless that is 0), then those after it.

    An empty page of a cursor above 0 means: the log does not reach the cursor. The rest is told only when there
    is nothing new: over: the job has ended with the event at the cursor. last: seq of the log's last
    event by the job's record. is_running: a worker holds the job, and may still write what it has said.
    """

    payloads: list[bytes]
    over: bool = False
    last: int = 0
    is_running: bool = False


class LogReader:
    """Logs of any queue of one server. Methods raise what Redis raises."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def read(self, job_id: str, cursor: int) -> LogPage | None:
        """The page at a cursor, at most LOG_PAGE events after it; None when log or job are gone."""
        with or_unavailable():  # a failover answers MASTERDOWN, a long script BUSY: they pass like a lost connection
            return await self._read(job_id, cursor)

    async def _read(self, job_id: str, cursor: int) -> LogPage | None:
        queue = Queue(self._redis, queue_of(job_id))
        payloads = await self._page(queue, job_id, cursor)
        if payloads is None or len(payloads) > min(cursor, 1):
            return None if payloads is None else LogPage(payloads)
        state, seq = await self._redis.hmget(queue.keys.job(job_id), ["state", "seq"])
        if state is None:
            return None  # a log whose job record is gone will never grow again
        last = _seq(seq)
        if state != b"done" or last < cursor:
            return LogPage(payloads, last=last, is_running=state == b"running")
        if last == cursor and len(payloads) == min(cursor, 1):
            return LogPage(payloads, over=True, last=last)
        # It ended between the two questions, or its log is lost.
        payloads = await self._page(queue, job_id, cursor)
        return LogPage(payloads) if payloads else None

    async def _page(self, queue: Queue, job_id: str, cursor: int) -> list[bytes] | None:
        return await queue.read_log(JobId(job_id), max(0, cursor - 1), count=LOG_PAGE + 1)

    async def news(self, seen: Mapping[str, int]) -> set[str]:
        """Those of the jobs whose log no longer ends at the seq seen, or that are over or gone.

        One pipeline for up to 512 jobs.
        """
        moved: set[str] = set()
        for some in slices(list(seen.items()), _CHECKED_AT_ONCE):
            async with self._redis.pipeline(transaction=False) as pipe:
                for job_id, _ in some:
                    pipe.hmget(Keys(queue_of(job_id)).job(job_id), ["state", "seq"])
                answers = await pipe.execute(raise_on_error=False)
            moved |= {
                job_id for (job_id, newest), answer in zip(some, answers, strict=True) if _is_news(answer, newest)
            }
        return moved

    async def epochs(self, queues: Collection[str]) -> dict[str, bytes | None]:
        """The identity of each queue's data set; None where nobody has given it one yet."""
        names = sorted(queues)
        async with self._redis.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.get(Keys(name).epoch)
            answers = await pipe.execute() if names else []
        return dict(zip(names, answers, strict=True))


def _is_news(answer: Any, newest: int) -> bool:
    """State and seq of a record, against the seq seen. A record that is none is news for its own readers alone."""
    if is_wrong_kind(answer):
        return True
    if isinstance(answer, Exception):
        raise answer
    state, seq = answer
    return state is None or state == b"done" or _seq(seq) != newest


def _seq(value: bytes | str | None) -> int:
    """0 for what is no number: anybody may have written it."""
    return int(value) if value is not None and value.isdigit() and len(value) < 16 else 0
