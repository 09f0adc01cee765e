"""The window: so many jobs of a batch are on their way at once, and no more; the rest waits in its file.

A line comes in under a key of its own. Whoever works on the batch after a crash comes in under the same keys, and finds
the jobs that are running, or have ended, instead of making others.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Final

from jitney import AsyncClient, AsyncJob
from jitney.connection import pause_s
from jitney.errors import (
    InvalidJob,
    JitneyError,
    JobCancelled,
    JobExpired,
    JobNotFound,
    Overloaded,
    QueueUnavailable,
    StreamLost,
)
from jitney.logs import logger
from jitney.messages import JobSpec
from jitney.tasks import end_tasks
from jitney_api.batches.lines import Line
from jitney_api.batches.output import NotRun, Outcome, answered, failed, not_run
from jitney_api.batches.patience import patiently
from jitney_api.batches.requests import LineRequest
from jitney_api.batches.terms import Terms
from jitney_api.prompts import count_prompt
from jitney_api.service import answering
from jitney_api.together import together
from jitney_api.tokenizers import Tokenizers

MAX_OVERLOAD_WAIT_S: Final = 30.0
MAX_LOSSES: Final = 8
"""A job that Redis lost with its last second is asked for again; one that is lost so often is somebody's fault."""

MAX_BYTES: Final = 16 << 20
"""Of the lines on their way: with the largest ones a window would be the whole file."""

HOLD_BYTES: Final = 4 << 20
HOLD_LINES: Final = 1_000
MIN_HOLD_S: Final = 1.0

Keep = Callable[[Sequence[Outcome]], Awaitable[None]]
"""Write outcomes down for good. What it was not given yet is collected again after a crash."""


class _Stopped(Exception):
    """The batch ends before this line has come in."""


class Window:
    """Works on the lines of one batch. Belongs to one event loop; `run` is called once.

    size: jobs on their way at once. max_hold_s: so long may an outcome wait for others to be kept together with.
    """

    def __init__(
        self, client: AsyncClient, tokenizers: Tokenizers, terms: Terms, *, size: int, max_hold_s: float
    ) -> None:
        self._client = client
        self._tokenizers = tokenizers
        self._terms = terms
        self._size = size
        self._max_hold_s = max_hold_s
        self._aboard: dict[int, Sequence[AsyncJob]] = {}
        self._num_bytes = 0
        self._has_room = asyncio.Event()
        self._outcomes: asyncio.Queue[Outcome | None] = asyncio.Queue(size)
        self._why: NotRun | None = None
        self._stopped = asyncio.Event()

    def stop(self, why: NotRun) -> None:
        """Let nobody else in, and cancel who is on the way. `run` goes on: what is done by then is kept."""
        if self._why is None:
            self._why = why
            self._stopped.set()

    @property
    def is_stopped(self) -> bool:
        return self._why is not None

    async def run(self, lines: AsyncGenerator[Line, None], keep: Keep) -> None:
        """Every line comes in, and its outcome is kept, in whatever order they end.

        Raises what `lines` and `keep` raise.
        """
        tasks = [
            asyncio.create_task(part) for part in (self._let_all_in(lines), self._keep_all(keep), self._clear_at_stop())
        ]
        try:
            await asyncio.gather(*tasks[:2])
        except ExceptionGroup as group:
            raise group.exceptions[0] from None  # in a group nobody would know it: neither a shell nor RQ's retries
        finally:
            await end_tasks(tasks)

    # --- in, along, out ------------------------------------------------------------------------

    async def _let_all_in(self, lines: AsyncGenerator[Line, None]) -> None:
        async with contextlib.aclosing(lines), asyncio.TaskGroup() as rides:
            async for line in lines:
                await self._room()
                entered = await self._enter(line)
                if isinstance(entered, Outcome):
                    await self._outcomes.put(entered)
                else:
                    self._aboard[line.number] = entered
                    self._num_bytes += line.num_bytes
                    rides.create_task(self._ride(line))
        await self._outcomes.put(None)

    async def _room(self) -> None:
        while sum(map(len, self._aboard.values())) >= self._size or self._num_bytes >= MAX_BYTES:
            self._has_room.clear()
            await self._has_room.wait()

    async def _ride(self, line: Line) -> None:
        try:
            await self._outcomes.put(await self._outcome(line))
        finally:
            del self._aboard[line.number]
            self._num_bytes -= line.num_bytes
            self._has_room.set()

    async def _keep_all(self, keep: Keep) -> None:
        """Many outcomes at a time. The wait grows with the batch's age: a day's worth are some hundreds of chunks."""
        clock = asyncio.get_running_loop().time
        began = clock()
        is_open = True
        while is_open:
            held = [await self._outcomes.get()]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(self._max_hold_s, max(MIN_HOLD_S, (clock() - began) / 100))):
                    while _has_room(held):
                        held.append(await self._outcomes.get())
            is_open = held[-1] is not None
            outcomes = [one for one in held if one is not None]
            if outcomes:
                await keep(outcomes)

    # --- in ------------------------------------------------------------------------------------

    async def _enter(self, line: Line) -> list[AsyncJob] | Outcome:
        """The line's jobs; or its outcome, if it is refused, or comes too late."""
        jobs: list[AsyncJob] = []
        try:
            for key, spec in self._terms.jobs_of(line):
                jobs.append(await self._enqueue(line, key, spec))
        except _Stopped:
            return await self._known(line) or not_run(self._terms.batch_id, line, self._reason)
        except JitneyError as error:
            await self._cancel(jobs)
            return failed(self._terms.batch_id, line, error)
        if self._why is not None:  # while Redis was answering
            await self._cancel(jobs)
        return jobs

    async def _enqueue(self, line: Line, key: str, spec: JobSpec) -> AsyncJob:
        """In, however long it takes: a full queue and a silent one are waited out. Raises _Stopped."""
        num_failures = 0
        while self._why is None:
            try:
                return await self._ask(line.request, key, spec)
            except Overloaded as error:
                await self._pause(min(error.retry_after_s, MAX_OVERLOAD_WAIT_S) * random.uniform(0.5, 1.0))
            except QueueUnavailable:
                await self._pause(pause_s(num_failures))
                num_failures += 1
        raise _Stopped

    async def _ask(self, request: LineRequest, key: str, spec: JobSpec) -> AsyncJob:
        """As the API enqueues, after the same checks. Raises InvalidJob under the caller's names, and its kin."""
        with request.naming():
            _, card = await self._client.card(request.model)
            num_tokens = await count_prompt(self._tokenizers, card, spec, limit=request.limit_name)
            return await self._client.enqueue_spec(
                spec, queue=request.model, idempotency_key=key, num_prompt_tokens=num_tokens
            )

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopped.wait()

    async def _known(self, line: Line) -> list[AsyncJob]:
        """The line's jobs if somebody has let all of them in before, cancelled now where they had not ended."""
        try:
            queue, _ = await patiently(lambda: self._client.card(line.request.model))
        except InvalidJob:
            return []
        wanted = self._terms.jobs_of(line)
        ids = await patiently(lambda: self._ids_of(queue, [key for key, _ in wanted]))
        jobs = [self._client.job(job_id) for job_id in ids]
        await self._cancel(jobs)
        return jobs if len(jobs) == len(wanted) else []

    async def _ids_of(self, queue: str, keys: list[str]) -> list[str]:
        async with answering():
            found = [await self._client.queue(queue).job_of_key(self._terms.tenant, key) for key in keys]
        return [job_id for job_id in found if job_id is not None]

    # --- along ---------------------------------------------------------------------------------

    async def _outcome(self, line: Line) -> Outcome:
        """What becomes of a line that has come in."""
        batch_id, num_failures, num_losses = self._terms.batch_id, 0, 0
        while True:
            jobs = self._aboard[line.number]
            try:
                body, usage = await line.request.answer(self._client, jobs)
                return answered(batch_id, line, jobs[0].id, body, usage)
            except QueueUnavailable:
                await asyncio.sleep(pause_s(num_failures))
                num_failures += 1
            except (JobNotFound, StreamLost) as error:
                num_losses += 1
                if num_losses > MAX_LOSSES:
                    return failed(batch_id, line, error)
                await asyncio.sleep(pause_s(num_losses))
                entered = await self._enter_anew(line)
                if isinstance(entered, Outcome):
                    return entered
                self._aboard[line.number] = entered
            except JitneyError as error:
                await self._cancel(jobs)  # of several, those that have not ended
                return self._ended(line, error)
            except Exception as error:  # one line that nobody can answer is no reason to give up all others
                logger().error("batch_line_failed", batch=batch_id, line=line.number, exc_info=error)
                return failed(batch_id, line, JitneyError("internal error; the log of whoever assembles has the rest"))

    async def _enter_anew(self, line: Line) -> list[AsyncJob] | Outcome:
        """After its job was lost. A batch that ends has no use for another one."""
        if self._why is not None:
            return not_run(self._terms.batch_id, line, self._why)
        return await self._enter(line)

    def _ended(self, line: Line, error: JitneyError) -> Outcome:
        """A job that ended otherwise than `finished`, or whose answer cannot be told."""
        batch_id = self._terms.batch_id
        if self._why is not None and isinstance(error, JobCancelled | JobExpired):
            return not_run(batch_id, line, self._why)
        if isinstance(error, JobExpired) and self._terms.deadline is not None and not line.request.has_own_limit:
            return not_run(batch_id, line, "batch_expired")
        return failed(batch_id, line, error)

    # --- out before the end --------------------------------------------------------------------

    async def _clear_at_stop(self) -> None:
        await self._stopped.wait()
        await self._cancel([job for jobs in list(self._aboard.values()) for job in jobs])

    async def _cancel(self, jobs: Sequence[AsyncJob]) -> None:
        async def cancel(job: AsyncJob) -> None:
            with contextlib.suppress(JobNotFound):
                await patiently(job.cancel)

        if jobs:
            await together(cancel, jobs)

    @property
    def _reason(self) -> NotRun:
        assert self._why is not None
        return self._why


def _has_room(held: Sequence[Outcome | None]) -> bool:
    """Whether more outcomes may be kept together with these. The last one of all is None."""
    num_bytes = sum(len(one.text) for one in held if one is not None)
    return held[-1] is not None and len(held) < HOLD_LINES and num_bytes < HOLD_BYTES
