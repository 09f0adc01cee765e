"""A model that takes its time, and remembers for whom: what "generation stops" is counted with."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field

from tests.engine.scripted_model import HashModel
from tests.runtime.harness import LIVENESS_S

from jitney_worker.engine.protocol import ModelOutput, SchedulerOutput


@dataclass
class Paced:
    """A runner in front of the hash model.

    steps: the jobs of every step, in order. step_s: what a forward pass takes. preempted: sequences put back.
    """

    step_s: float = 0.002
    model: HashModel = field(default_factory=HashModel)
    steps: list[frozenset[str]] = field(default_factory=list)
    _never: threading.Event = field(default_factory=threading.Event)

    def execute(self, scheduled: SchedulerOutput) -> ModelOutput:
        self._never.wait(self.step_s)
        self.steps.append(frozenset(one.sequence.id.split("/")[0] for one in scheduled.scheduled))
        return self.model.execute(scheduled)

    async def until_step(self, number: int) -> None:
        """Until so many steps have been computed."""
        async with asyncio.timeout(LIVENESS_S):
            while len(self.steps) < number:  # noqa: ASYNC110 (the engine's thread sets no event of ours)
                await asyncio.sleep(0)

    @property
    def num_preempted(self) -> int:
        return len(self.model.preempted)

    def num_steps_of(self, job_id: str, since: int = 0) -> int:
        """In how many steps the job had a part, from step number `since` on."""
        return sum(job_id in step for step in self.steps[since:])
