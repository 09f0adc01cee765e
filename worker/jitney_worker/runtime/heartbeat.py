"""The heartbeat: leases are renewed from a thread of its own, over a connection of its own.

A long forward pass, a busy event loop or a full connection pool must never cost a lease. A stuck engine
must: with work to do and no step finished for `stall_after_s`, renewing stops and the jobs go elsewhere.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import redis.exceptions

from jitney.connection import connect_once
from jitney.keys import JobId
from jitney.logs import logger
from jitney.queue import Held, Queue
from jitney_worker.settings import LeaseSection


@dataclass(frozen=True, slots=True)
class _Grant:
    held: Held
    renewed_at: float


class Leases:
    """The jobs this worker holds, and when each lease was last good. Shared by loop and heartbeat thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._grants: dict[JobId, _Grant] = {}

    def take(self, held: Held) -> None:
        with self._lock:
            self._grants[held.id] = _Grant(held, time.monotonic())

    def drop(self, job_id: JobId) -> None:
        with self._lock:
            self._grants.pop(job_id, None)

    def has(self, job_id: JobId) -> bool:
        return job_id in self._grants

    def held(self) -> list[Held]:
        with self._lock:
            return [grant.held for grant in self._grants.values()]

    def renewed(self, helds: list[Held], asked_at: float) -> None:
        """Good from the moment the renewal was asked for: the reply may have been slow."""
        with self._lock:
            for held in helds:
                grant = self._grants.get(held.id)
                if grant is not None and grant.held.fence == held.fence:
                    self._grants[held.id] = _Grant(held, asked_at)

    def older_than(self, age_s: float) -> set[JobId]:
        """Jobs whose lease was not renewed for so long."""
        oldest = time.monotonic() - age_s
        with self._lock:
            return {job_id for job_id, grant in self._grants.items() if grant.renewed_at < oldest}


class Heartbeat(threading.Thread):
    """Renews every third of a lease. `on_lost` is called on this thread with jobs that are not ours any more."""

    def __init__(
        self,
        redis_url: str,
        queue_name: str,
        leases: Leases,
        settings: LeaseSection,
        *,
        is_stuck: Callable[[], bool],
        on_lost: Callable[[set[JobId]], None],
    ) -> None:
        super().__init__(name="jitney-heartbeat", daemon=True)
        self._redis_url = redis_url
        self._queue_name = queue_name
        self._leases = leases
        self._settings = settings
        self._is_stuck = is_stuck
        self._on_lost = on_lost
        self._ended = threading.Event()
        self._log = logger(part="heartbeat", queue=queue_name)

    def stop(self) -> None:
        self._ended.set()

    def run(self) -> None:
        asyncio.run(self._beat())

    async def _beat(self) -> None:
        # Shorter than a third of a lease, so that a hanging call is noticed while the lease still lives.
        redis = connect_once(self._redis_url, name="jitney-heartbeat", timeout_s=self._settings.renew_every_s)
        queue = Queue(redis, self._queue_name)
        try:
            while not self._ended.is_set():
                await self._renew(queue)
                await asyncio.to_thread(self._ended.wait, self._settings.renew_every_s)
        finally:
            await redis.aclose()

    async def _renew(self, queue: Queue) -> None:
        if self._is_stuck():
            self._log.error("engine_stuck", stall_after_s=self._settings.stall_after_s)
        else:
            await self._renew_all(queue)
        given_up = self._leases.older_than(self._settings.give_up_after_s)
        if given_up:
            self._log.warning("leases_given_up", num_jobs=len(given_up))
            self._on_lost(given_up)

    async def _renew_all(self, queue: Queue) -> None:
        helds = self._leases.held()
        if not helds:
            return
        asked_at = time.monotonic()
        try:
            lost = await queue.renew(self._settings.duration_s, helds)
        except (redis.exceptions.RedisError, OSError) as error:
            self._log.warning("renew_failed", error=type(error).__name__)
            return
        self._leases.renewed([held for held in helds if held.id not in lost], asked_at)
        if lost:
            self._log.warning("leases_lost", num_jobs=len(lost))
            self._on_lost(lost)
