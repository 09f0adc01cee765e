"""What the worker shows of itself, for pages, `top`, probes and its peers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import redis.exceptions

from jitney.cards import QueueCard
from jitney.logs import logger
from jitney.metrics.readings import Readings
from jitney.queue import Queue
from jitney.workers import list_workers, remove_worker, write_worker
from jitney_worker.runtime.board import Board
from jitney_worker.runtime.meters import Meters
from jitney_worker.runtime.registration import Packs, register_queue
from jitney_worker.runtime.roster import Roster
from jitney_worker.runtime.server_time import ServerTime
from jitney_worker.settings import WorkerSettings


class View:
    """Writes the worker's hash. state: `ready`, `draining` or `stuck`, as of now.

    card: of the queue that is served. tokenizer: what the card's digest names. clock: asked how late it is by the way.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        queue: Queue,
        roster: Roster,
        board: Board,
        meters: Meters,
        clock: ServerTime,
        *,
        state: Callable[[], str],
        card: Callable[[], QueueCard],
        tokenizer: Packs,
    ) -> None:
        self._ttl_s = settings.lease.duration_s
        self._every_s = settings.worker.snapshot_every_s
        self._queue = queue
        self._roster = roster
        self._board = board
        self._meters = meters
        self._clock = clock
        self._state = state
        self._card = card
        self._tokenizer = tokenizer
        self._epoch: str | None = None
        self._log = logger(part="view", queue=queue.name)

    async def run(self) -> None:
        """For ever: when there is a new snapshot, and at least every third of a lease."""
        came = self._board.reports.snapshot_came
        while True:
            came.clear()
            try:
                await self._mind_epoch()
                view = self._roster.view(self._board.reports.snapshot, self._state())
                await write_worker(self._queue.redis, view, self._ttl_s, self.readings())
                await self._clock.ask(self._queue.redis)
                await self._give_back_unseated()
            except (redis.exceptions.RedisError, OSError) as error:
                self._log.warning("view_not_written", error=type(error).__name__)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._ttl_s / 3):
                    await came.wait()
            await asyncio.sleep(self._every_s)

    def readings(self) -> Readings:
        """The worker's metrics as of now."""
        reports = self._board.reports
        return self._meters.read(reports.snapshot, reports.capacity, self._roster.max_num_seqs)

    async def remove(self) -> None:
        await remove_worker(self._queue.redis, self._queue.name, self._roster.worker_id)

    async def _mind_epoch(self) -> None:
        """Redis came back empty: the leases are gone, which renewing tells; what we published must be again."""
        epoch = await self._queue.epoch()
        if self._epoch not in (None, epoch):
            self._log.error("data_set_replaced")
            await register_queue(self._queue.redis, self._queue.name, self._card(), self._tokenizer)
        self._epoch = epoch

    async def _give_back_unseated(self) -> None:
        """A job claimed ahead must not wait behind our full seats while a peer has a free one, nor keep others out."""
        jobs = self._board.unseated()
        if not jobs or len(await list_workers(self._queue.redis, self._queue.name)) <= 1:
            jobs = self._board.in_the_way()
        if jobs:
            await self._board.release_unseated(jobs)
