"""The outbox: announcements that wait to be told, and those that were given up. One typed method per script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from jitney import replies, scripts
from jitney.calls import milliseconds, or_unavailable
from jitney.connection import Redis
from jitney.errors import InvalidJob
from jitney.keys import Keys, queue_of

BATCHES: Final = "{jitney:-}"
"""Prefix of the outbox for what belongs to no queue. No queue can have this name."""

Outcome = Literal["told", "later", "dead"]


@dataclass(frozen=True, slots=True)
class Announcement:
    """One that was taken from an outbox to be told now.

    id: of the job or batch. at_ms: when it ended, by the server's clock. number: of this attempt, ever; attempt: the
    same since somebody last asked for it to be tried anew.
    """

    id: str
    object: str
    ending: str
    url: str
    at_ms: int
    number: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Kept:
    """One that lies in an outbox, for people to see. when: of its next attempt, or when it was given up; Unix s."""

    id: str
    state: Literal["waiting", "dead"]
    object: str
    ending: str
    url: str
    when: float
    num_attempts: int
    trouble: str


class Announcements:
    """One outbox: a queue's own, whose endings are put into it by the script that ends a job, or that of batches.

    Methods raise QueueUnavailable.
    """

    def __init__(self, redis: Redis, prefix: str) -> None:
        self._redis = redis
        self._prefix = prefix

    @classmethod
    def of(cls, redis: Redis, id: str) -> Announcements:
        """The outbox in which an announcement of that id lies."""
        try:
            return cls(redis, Keys(queue_of(id)).prefix)
        except InvalidJob:
            return cls(redis, BATCHES)

    async def add(self, id: str, object: str, ending: str, url: str) -> bool:
        """Put one in. False if one of that id is there already."""
        return replies.text(await self._run("hook_add", id, object, ending, url)) == "ok"

    async def claim(self, limit: int, lease_s: float) -> list[Announcement]:
        """Take at most `limit` whose time has come; nobody else sees them for `lease_s`."""
        rows = await self._run("hook_claim", limit, milliseconds(lease_s))
        return [_announcement([replies.text(word) for word in row]) for row in rows]

    async def settle(self, one: Announcement, outcome: Outcome, *, delay_s: float = 0.0, trouble: str = "") -> bool:
        """Record how the attempt went. False if another one has begun since, and the record is its affair."""
        told = await self._run("hook_settle", one.id, one.number, outcome, milliseconds(delay_s), trouble)
        return replies.text(told) == "ok"

    async def retry(self, id: str) -> bool:
        """Try one that was given up anew. False if there is none of that id."""
        return replies.text(await self._run("hook_retry", id)) == "ok"

    async def drop(self, id: str) -> bool:
        """Forget one, given up or not. False if there is none of that id."""
        return replies.text(await self._run("hook_drop", id)) == "ok"

    async def kept(self, limit: int) -> list[Kept]:
        """At most `limit` that were given up, the youngest first, and as many that wait, the soonest first."""
        with or_unavailable():
            dead: Any = await self._redis.zrange(self._key("hooks:dead"), 0, limit - 1, desc=True, withscores=True)
            waiting: Any = await self._redis.zrange(self._key("hooks"), 0, limit - 1, withscores=True)
            found: list[tuple[Literal["waiting", "dead"], str, float]] = [
                *(("dead", replies.text(id), score) for id, score in dead),
                *(("waiting", replies.text(id), score) for id, score in waiting),
            ]
            pipeline = self._redis.pipeline(transaction=False)
            for _, id, _ in found:
                pipeline.hgetall(self._key(f"hook:{id}"))
            records = await pipeline.execute()
        return [_kept(*one, record) for one, record in zip(found, records, strict=True) if record]

    def _key(self, rest: str) -> str:
        return f"{self._prefix}:{rest}"

    async def _run(self, name: str, *arguments: scripts.Argument) -> Any:
        call = scripts.Call([self._key("counts")], [self._prefix, *arguments])
        with or_unavailable():
            return await scripts.run(self._redis, scripts.load(name), call)


def _announcement(row: Sequence[str]) -> Announcement:
    id, object, ending, url, at_ms, number, forgiven = row
    return Announcement(id, object, ending, url, int(at_ms), int(number), int(number) - int(forgiven))


def _kept(state: Literal["waiting", "dead"], id: str, score: float, record: dict[bytes, bytes]) -> Kept:
    fields = {replies.text(name): replies.text(value) for name, value in record.items()}
    return Kept(
        id,
        state,
        fields.get("object", ""),
        fields.get("ending", ""),
        fields.get("url", ""),
        score / 1e3,
        int(fields.get("tries", 0)),
        fields.get("trouble", ""),
    )
