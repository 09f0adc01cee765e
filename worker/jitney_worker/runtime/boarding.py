"""The way of a delivery onto the board: read in, or refused with its reason."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from functools import partial

from redis.exceptions import RedisError

from jitney.calls import is_wrong_kind
from jitney.connection import pause_s
from jitney.errors import InvalidJob, JitneyError
from jitney.keys import Band, Fence
from jitney.logs import logger
from jitney.messages import JobSpec
from jitney.queue import Delivery
from jitney.tasks import end_tasks
from jitney_worker.runtime.intake import Intake
from jitney_worker.runtime.publisher import Publisher
from jitney_worker.runtime.running import RunningJob, refusal


class Boarding:
    """Deliveries on their way in, each in a task of its own: the claimer does not wait for tokenising.

    is_held: whether a claim is still believed good. admit: receives each job that is ready. leave: is told the
    claim of each delivery that will not become one. settled: called when one is no more on its way, either way.
    """

    def __init__(
        self,
        intake: Intake,
        publisher: Publisher,
        *,
        is_held: Callable[[Fence], bool],
        admit: Callable[[RunningJob], Awaitable[None]],
        leave: Callable[[Fence], object],
        settled: Callable[[], None],
    ) -> None:
        self._intake = intake
        self._publisher = publisher
        self._is_held = is_held
        self._admit = admit
        self._leave = leave
        self._settled = settled
        self._tasks: dict[asyncio.Task[None], Delivery] = {}
        self._log = logger(part="boarding")

    def __len__(self) -> int:
        return len(self._tasks)

    def num_of(self, bands: Collection[Band]) -> int:
        """How many of these bands are on their way."""
        return sum(delivery.band in bands for delivery in self._tasks.values())

    @property
    def has_suspect(self) -> bool:
        """True while one that may have ended its last claimer is read in: that alone may be what did it."""
        return any(delivery.strikes for delivery in self._tasks.values())

    def begin(self, delivery: Delivery) -> None:
        task = asyncio.create_task(self._board(delivery), name=f"boarding of {delivery.id}")
        self._tasks[task] = delivery
        task.add_done_callback(partial(self._end, delivery))

    async def stop(self) -> None:
        """Cut short what is under way."""
        await end_tasks(self._tasks)

    def _end(self, delivery: Delivery, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.error("boarding_broke", job=delivery.id, error=type(error).__name__)
            self._leave(delivery.fence)  # its lease runs out, and the attempt counts
        self._settled()

    async def _board(self, delivery: Delivery) -> None:
        spec: JobSpec | None = None
        try:
            spec = JobSpec.decode(delivery.body)
            job = await self._prepare(delivery, spec)
        except JitneyError as error:
            await self._refuse(delivery, spec, error)
        except Exception as error:
            self._log.exception("intake_failed", job=delivery.id)
            await self._refuse(delivery, spec, JitneyError(f"the job could not be read in: {type(error).__name__}"))
        else:
            if job is not None:
                await self._admit(job)

    async def _prepare(self, delivery: Delivery, spec: JobSpec) -> RunningJob | None:
        """The job; None when it is not ours any more. An outage of Redis is no reason to end it: it is waited out."""
        failures = 0
        while self._is_held(delivery.fence):
            try:
                job = await self._intake.prepare(delivery, spec)
            except (RedisError, OSError) as error:
                if is_wrong_kind(error):
                    raise  # somebody put something else in the log's place: it will not pass
                self._log.warning("intake_delayed", job=delivery.id, error=type(error).__name__)
                await asyncio.sleep(pause_s(failures))
                failures += 1
            else:
                return job if self._is_held(delivery.fence) else None
        return None

    async def _refuse(self, delivery: Delivery, spec: JobSpec | None, error: JitneyError) -> None:
        self._log.info("job_refused", job=delivery.id, code=error.code)
        undecodable = isinstance(error, InvalidJob) and error.code == "undecodable"
        await self._publisher.write([refusal(delivery, spec, error.wire(), is_dead=undecodable)])
        self._leave(delivery.fence)
