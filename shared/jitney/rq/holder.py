"""The held jobs of one process: awaited beside each other, on one event loop in a thread of its own.

The main thread stays RQ's: it takes jobs, and brings them to their end by RQ's own methods. What has ended here is
handed over to it through one queue.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from queue import Queue as Inbox
from typing import Any

from rq.executions import Execution
from rq.job import Job, _current_job
from rq.queue import Queue
from rq.timeouts import JobTimeoutException

from jitney.async_client import AsyncClient
from jitney.loop_thread import LoopThread
from jitney.rq.held import Perform, begin
from jitney.rq.progress import Progress


@dataclass(eq=False, slots=True)
class Holding:
    """One execution of a job. See `Held`.

    timeout_s: None = no limit. is_stopped: somebody has sent RQ's stop command. result, error: once it has ended; the
    error is CancelledError for what was stopped or withdrawn.
    """

    client: AsyncClient
    progress: Progress
    job: Job
    rq_queue: Queue
    execution: Execution
    timeout_s: float | None
    is_stopped: bool = False
    result: Any = None
    error: BaseException | None = None
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    async def save_meta(self, **fields: Any) -> None:
        """See `Held`."""
        self.job.meta.update(fields)
        self.progress.note(self.job)


class Holder:
    """Awaits held jobs. Its methods are for other threads than the loop's.

    url: of the client that the jobs share, as in `AsyncClient`. ended: where each Holding is put when it has ended.
    """

    def __init__(self, url: str | None, ended: Inbox[Holding]) -> None:
        self._ended = ended
        self._thread = LoopThread("jitney-held")
        self._client, self._progress, self._storing = self._thread.run(lambda: _open(url))

    def hold(
        self, job: Job, rq_queue: Queue, execution: Execution, perform: Perform, *, timeout_s: float | None
    ) -> Holding:
        """Await the job from now on."""
        holding = Holding(self._client, self._progress, job, rq_queue, execution, timeout_s)
        self._thread.soon(lambda: self._start(holding, perform))
        return holding

    def cancel(self, holding: Holding) -> None:
        """Let it end now. Nothing for one that has ended."""
        self._thread.soon(lambda: _cancel(holding))

    def close(self) -> None:
        """End the loop. Only once every job has ended, or it is cancelled."""
        self._thread.close(lambda: _shut(self._client, self._storing))

    def _start(self, holding: Holding, perform: Perform) -> None:
        holding.task = asyncio.ensure_future(self._await(holding, perform))

    async def _await(self, holding: Holding, perform: Perform) -> None:
        _current_job.set(holding.job)  # what rq.get_current_job() answers, for this task alone
        try:
            async with asyncio.timeout(holding.timeout_s) as limit:
                holding.result = await begin(perform, holding)
        except TimeoutError as error:
            holding.error = _out_of_time(holding) if limit.expired() else error
        except (Exception, asyncio.CancelledError) as error:
            holding.error = error
        await self._progress.settle(holding.job)
        self._ended.put(holding)


def _cancel(holding: Holding) -> None:
    assert holding.task is not None
    # After its first step: a task that is cancelled before it never runs, and would not say that it has ended.
    asyncio.get_running_loop().call_soon(holding.task.cancel)


async def _open(url: str | None) -> tuple[AsyncClient, Progress, asyncio.Task[None]]:
    client, progress = AsyncClient(url, name="jitney-rq"), Progress()
    return client, progress, asyncio.ensure_future(progress.run())


async def _shut(client: AsyncClient, storing: asyncio.Task[None]) -> None:
    storing.cancel()
    await client.aclose()


def _out_of_time(holding: Holding) -> JobTimeoutException:
    return JobTimeoutException(f"Task exceeded maximum timeout value ({holding.timeout_s:g} seconds)")
