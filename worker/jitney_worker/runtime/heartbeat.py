"""The heartbeat: leases are renewed from a thread of its own, over a connection of its own.

A long forward pass, a busy event loop or a full connection pool must never cost a lease. A stuck engine
must: while it is stuck nothing is renewed, whatever the event loop does about it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import redis.exceptions

from jitney.connection import connect_once
from jitney.keys import Fence, JobId
from jitney.logs import logger
from jitney.queue import Held, Queue
from jitney.tasks import end_tasks
from jitney_worker.settings import LeaseSection

TRIES_PER_BEAT = 4
"""How much sooner a renewal that failed is tried again."""


@dataclass(frozen=True, slots=True)
class _Grant:
    held: Held
    renewed_at: float


class Leases:
    """The jobs this worker holds, and when each lease was last good. Shared by loop and heartbeat thread.

    By fence, never by job: the same job may come back under another claim while the end of the first one
    is still on its way.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._grants: dict[Fence, _Grant] = {}

    def take(self, held: Held) -> None:
        with self._lock:
            self._grants[held.fence] = _Grant(held, time.monotonic())

    def drop(self, fence: Fence) -> JobId | None:
        """The job that was held under the claim; None if none was."""
        with self._lock:
            grant = self._grants.pop(fence, None)
        return grant.held.id if grant is not None else None

    def has(self, fence: Fence) -> bool:
        return fence in self._grants

    def held(self) -> list[Held]:
        with self._lock:
            return [grant.held for grant in self._grants.values()]

    def renewed(self, helds: list[Held], asked_at: float) -> None:
        """Good from the moment the renewal was asked for: the reply may have been slow."""
        with self._lock:
            for held in helds:
                if held.fence in self._grants:
                    self._grants[held.fence] = _Grant(held, asked_at)

    def older_than(self, age_s: float) -> set[Fence]:
        """Claims whose lease was not renewed for so long."""
        oldest = time.monotonic() - age_s
        with self._lock:
            return {fence for fence, grant in self._grants.items() if grant.renewed_at < oldest}


class Heartbeat(threading.Thread):
    """Renews every third of a lease.

    Called on this thread: `on_lost` with claims that are not good any more, `on_broken` when the thread
    ends otherwise than by `stop`.
    """

    def __init__(
        self,
        redis_url: str,
        queue_name: str,
        leases: Leases,
        settings: LeaseSection,
        *,
        is_stuck: Callable[[], bool],
        on_lost: Callable[[set[Fence]], None],
        on_broken: Callable[[Exception], None],
    ) -> None:
        super().__init__(name="jitney-heartbeat", daemon=True)
        self._redis_url = redis_url
        self._queue_name = queue_name
        self._leases = leases
        self._settings = settings
        self._is_stuck = is_stuck
        self._on_lost = on_lost
        self._on_broken = on_broken
        self._loop: asyncio.AbstractEventLoop
        self._ended = asyncio.Event()
        self._log = logger(part="heartbeat", queue=queue_name)

    def start(self) -> None:
        self._loop = asyncio.new_event_loop()  # here, so that `stop` finds it at any moment
        super().start()

    def stop(self) -> None:
        """Ends the thread at once: a renewal under way is not waited for."""
        with contextlib.suppress(RuntimeError):  # the thread has ended already, and closed its loop
            self._loop.call_soon_threadsafe(self._ended.set)

    def run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._live())
        except Exception as error:
            self._on_broken(error)

    async def _live(self) -> None:
        beating = asyncio.create_task(self._beat())
        ended = asyncio.create_task(self._ended.wait())
        await asyncio.wait({beating, ended}, return_when=asyncio.FIRST_COMPLETED)
        await end_tasks([ended])
        if beating.done():
            await beating  # it never ends by itself: this raises
        await end_tasks([beating])

    async def _beat(self) -> None:
        # Shorter than a third of a lease, so that a hanging call is noticed while the lease still lives.
        every_s = self._settings.renew_every_s
        redis = connect_once(self._redis_url, name="jitney-heartbeat", timeout_s=every_s)
        queue = Queue(redis, self._queue_name)
        try:
            while True:
                is_done = await self._renew(queue)
                await asyncio.sleep(every_s if is_done else every_s / TRIES_PER_BEAT)
        finally:
            await redis.aclose()

    async def _renew(self, queue: Queue) -> bool:
        """False if it failed and should be tried again soon."""
        is_done = True if self._is_stuck() else await self._renew_all(queue)
        given_up = self._leases.older_than(self._settings.give_up_after_s)
        if given_up:
            self._log.warning("leases_given_up", num_jobs=len(given_up))
            self._on_lost(given_up)
        return is_done

    async def _renew_all(self, queue: Queue) -> bool:
        helds = self._leases.held()
        if not helds:
            return True
        asked_at = time.monotonic()
        try:
            lost = await queue.renew(self._settings.duration_s, helds)
        except (redis.exceptions.RedisError, OSError) as error:
            self._log.warning("renew_failed", error=type(error).__name__)
            return False
        self._leases.renewed([held for held in helds if held.id not in lost], asked_at)
        if lost:
            self._log.warning("leases_lost", num_jobs=len(lost))
            self._on_lost({held.fence for held in helds if held.id in lost})
        return True
