"""What jobs gained, into their logs; a log that has lost its end gets it back."""

from __future__ import annotations

import time
from collections.abc import Iterable

from jitney.errors import JitneyError, StreamLost
from jitney.keys import Fence
from jitney.logs import logger
from jitney.queue import Append, Ending
from jitney_worker.runtime.aboard import Aboard
from jitney_worker.runtime.publisher import Publisher
from jitney_worker.runtime.reports import silence
from jitney_worker.runtime.returns import Returns
from jitney_worker.runtime.running import RunningJob

TORN = "the end of the log was lost; the tokens that stood there are computed again"
CLOSED = "the log of the job is gone, or takes nothing more"


class LogWriter:
    """Writes for the jobs on board. Who has ended, or is not ours any more, leaves."""

    def __init__(self, publisher: Publisher, aboard: Aboard, returns: Returns) -> None:
        self._publisher = publisher
        self._aboard = aboard
        self._returns = returns
        self._log = logger(part="log")

    async def write(self, jobs: Iterable[RunningJob]) -> None:
        writes = self._next_writes(jobs)
        while writes:
            unwritten = await self._publisher.write(writes)
            for write in writes:
                if isinstance(write, Ending) and not unwritten.has(write.fence):
                    self._say_ended(write)
                    self._aboard.forget(write.fence)
            self._aboard.lose(unwritten.lost)
            closed = self._jobs_of(unwritten.closed)
            self._bury(closed, StreamLost(CLOSED))
            writes = [*await self._mend(unwritten.torn), *self._next_writes(closed)]

    def _say_ended(self, ending: Ending) -> None:
        job = self._aboard.get(ending.fence)
        if job is not None:  # otherwise it was lost while its end was written, which is said elsewhere
            self._log.info(
                "job_ended",
                job=job.id,
                outcome=ending.reason,
                attempt=job.delivery.tries,
                num_prompt_tokens=len(job.prompt_ids),
                num_tokens=ending.num_tokens,
                on_board_s=round(time.monotonic() - job.submitted_at, 3),
            )

    async def bury(self, jobs: Iterable[RunningJob], error: JitneyError) -> None:
        """End them and keep them as dead letters: whoever tried again would meet the same. What they said is kept."""
        jobs = list(jobs)
        self._bury(jobs, error)
        await self.write(jobs)

    def _bury(self, jobs: Iterable[RunningJob], error: JitneyError) -> None:
        for job in jobs:
            self._log.warning(
                "job_buried", job=job.id, attempt=job.delivery.tries, error=str(error), is_retryable=False
            )
            job.bury(error.wire())

    def _next_writes(self, jobs: Iterable[RunningJob]) -> list[Append | Ending]:
        return [write for job in jobs if (write := self._next_write(job)) is not None]

    def _next_write(self, job: RunningJob) -> Append | Ending | None:
        next_seq = job.next_seq
        try:
            return job.write()
        except Exception as error:
            silence(job, next_seq, error)
            return job.write()

    async def _mend(self, torn: dict[Fence, int]) -> list[Append | Ending]:
        """What gives logs their lost ends back, byte for byte, so that no reader notices. What is too old goes back."""
        writes, beyond = list[Append | Ending](), list[RunningJob]()
        for job in self._jobs_of(torn):
            again = job.write_again(torn[job.fence])
            if again is None:
                beyond.append(job)
            else:
                writes.append(again)
                self._log.warning("log_mended", job=job.id, after_seq=torn[job.fence], num_events=len(again.events))
        await self._returns.retry(beyond, JitneyError(TORN))
        return writes

    def _jobs_of(self, fences: Iterable[Fence]) -> list[RunningJob]:
        return [job for fence in fences if (job := self._aboard.get(fence)) is not None]
