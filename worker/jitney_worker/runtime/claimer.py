"""Claims only what there is room for, and waits on the bell when there is nothing to claim.

A worker whose seats all hold bulk has room for other jobs. It listens to no bell, for it would take rings from workers
that are idle: it looks again when it is called, and whenever its room may have changed.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable

import redis.exceptions

from jitney.connection import Redis, connect_blocking, pause_s
from jitney.logs import logger
from jitney.queue import Claimed, Credit, Delivery, Queue
from jitney.tasks import end_tasks
from jitney_worker.settings import WorkerSettings

MAX_WAIT_S = 1.0


class Claimer:
    """One loop: room? claim; nothing there? wait for the bell.

    claims: a queue over a client that never repeats a call; a claim whose reply was lost is looked up
    with `adopt` instead. credit: how many jobs could be taken now; room: set when that may have grown, or a job
    has come that goes before bulk.
    take: receives each delivery.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        worker_id: str,
        fingerprint: str,
        claims: Queue,
        *,
        room: asyncio.Event,
        credit: Callable[[], Credit],
        take: Callable[[Delivery], None],
    ) -> None:
        self._settings = settings
        self._worker_id = worker_id
        self._fingerprint = fingerprint
        self._queue = claims
        self._credit = credit
        self._take = take
        self._incarnation = uuid.uuid4().hex[:12]
        self._num_claims = 0
        self._unanswered: str | None = None
        self._log = logger(part="claimer", worker=worker_id, queue=claims.name)
        self._room = room
        self._claiming: asyncio.Task[Claimed | None] | None = None

    async def run(self) -> None:
        """Until `stop`."""
        wait_s = min(MAX_WAIT_S, self._settings.lease.duration_s / 3)
        bell = connect_blocking(self._settings.redis_url, block_s=wait_s, name="jitney-bell")
        try:
            await self._loop(bell, wait_s)
        finally:
            await bell.aclose()

    async def _loop(self, bell: Redis, wait_s: float) -> None:
        failures = 0
        while True:
            self._room.clear()
            credit = self._credit()
            if credit.interactive <= 0:
                await self._room.wait()
                continue
            try:
                # Shielded: a claim that reached Redis has given out leases, whoever stops listening.
                self._claiming = asyncio.create_task(self._claim_and_take(credit), name="claim")
                claimed = await asyncio.shield(self._claiming)
                if claimed is not None:
                    await self._wait(bell, wait_s, credit, claimed)
                failures = 0
            except (redis.exceptions.RedisError, OSError) as error:
                failures += 1
                self._log.warning("claim_failed", error=type(error).__name__, failures=failures)
                await asyncio.sleep(pause_s(failures))

    async def until_settled(self) -> None:
        """After the end of `run`: until a claim that was in progress has brought its jobs, or has failed."""
        if self._claiming is not None:
            await asyncio.wait([self._claiming])

    async def stop(self) -> None:
        """Cut short what is still in progress."""
        if self._claiming is not None:
            await end_tasks([self._claiming])

    async def _claim_and_take(self, credit: Credit) -> Claimed | None:
        """What a claim gave; None after an adoption, which says nothing of what else there is to claim."""
        claimed = None
        if self._unanswered is None:
            claimed = await self._claim(credit)
        # Until it is known what the lost claim gave, no other one: `adopt` knows the last claim alone.
        deliveries = await self._adopt(self._unanswered) if self._unanswered is not None else ()
        for delivery in claimed.deliveries if claimed is not None else deliveries:
            self._take(delivery)
        return claimed

    async def _claim(self, credit: Credit) -> Claimed | None:
        """None if the reply was lost."""
        self._num_claims += 1
        self._unanswered = nonce = f"{self._incarnation}.{self._num_claims}"
        try:
            claimed = await self._queue.claim(
                self._worker_id,
                nonce,
                credit=credit,
                fingerprint=self._fingerprint,
                lease_s=self._settings.lease.duration_s,
                max_strikes=self._settings.worker.max_attempts,
                max_tries=self._settings.worker.max_tries,
            )
        except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError):
            return None
        self._unanswered = None
        return claimed

    async def _adopt(self, nonce: str) -> tuple[Delivery, ...]:
        deliveries = await self._queue.adopt(self._worker_id, nonce)
        self._unanswered = None
        return deliveries

    async def _wait(self, bell: Redis, wait_s: float, credit: Credit, claimed: Claimed) -> None:
        """Until work may have come that we could take. A ring eaten by a dying worker costs one period, never a job."""
        num_taken, next_due_ms = len(claimed.deliveries), claimed.next_due_ms
        if num_taken >= credit.interactive:
            return  # there may be more of it
        if num_taken >= credit.bulk:
            await self._room.wait()
            return
        due_s = wait_s if next_due_ms is None else min(wait_s, next_due_ms / 1_000)
        await self._queue.wait_bell(bell, self._fingerprint, max(0.01, due_s))
