"""The jobs on board, by the fence of their claim: how their sequences get into the engine, and how they leave it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from jitney.keys import Fence, JobId
from jitney.logs import logger
from jitney_worker.runtime.bridge import Abort, Add, Bridge
from jitney_worker.runtime.heartbeat import Leases
from jitney_worker.runtime.running import RunningJob
from jitney_worker.runtime.wishes import text_options
from jitney_worker.text.rules import StopRules


class Aboard:
    """Read in and not yet over. has_left: called for every claim that is over; None if its job was not read in yet."""

    def __init__(
        self,
        leases: Leases,
        bridge: Bridge,
        stop_rules: StopRules,
        has_left: Callable[[Fence, RunningJob | None], None],
    ) -> None:
        self._leases = leases
        self._bridge = bridge
        self._stop_rules = stop_rules
        self._has_left = has_left
        self._jobs: dict[Fence, RunningJob] = {}
        self._log = logger(part="board")

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[RunningJob]:
        return iter(list(self._jobs.values()))

    def get(self, fence: Fence) -> RunningJob | None:
        return self._jobs.get(fence)

    def add(self, job: RunningJob) -> None:
        self._jobs[job.fence] = job

    def seat(self, job: RunningJob) -> None:
        """Its sequences join the batch at the next boundary that has room for them.

        Choices that ended in an earlier attempt do not: the engine could not tell one that a stop string ended.
        """
        stop, options = job.spec.sampling.stop, text_options(job.spec, job.prompt_ids)
        for choice in job.choices:
            if choice.finish_reason is None:
                request = choice.request
                end_ids = request.params.stop_token_ids
                self._stop_rules.register(request.id, stop, end_ids, options, choice.structure)
                self._bridge.send(Add(request))

    def seat_suspects(self) -> None:
        """Let the first suspect in as soon as all others have progressed: its end could not cost them an attempt."""
        first = next((job for job in self if job.is_held_back), None)
        if first is None or any(not job.has_progressed and not job.is_held_back for job in self):
            return
        first.is_held_back = False
        self.seat(first)

    def forget(self, fence: Fence) -> JobId | None:
        """The job is not ours: its sequences leave the engine at the next boundary. None if it was not here."""
        job_id = self._leases.drop(fence)
        job = self._jobs.pop(fence, None)
        for choice in job.choices if job is not None else ():
            self._stop_rules.forget(choice.request.id)
            if choice.finish_reason is None:
                self._bridge.send(Abort(choice.request.id))
        self._has_left(fence, job)
        return job_id

    def lose(self, fences: Iterable[Fence]) -> None:
        """Jobs that another claim owns, or that have been ended from outside: dropped without a word."""
        for fence in list(fences):
            job_id = self.forget(fence)
            if job_id is not None:
                self._log.info("job_lost", job=job_id)
