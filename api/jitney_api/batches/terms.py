"""What all jobs of a batch have in common, and the keys under which they are found again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from jitney.messages import JobSpec
from jitney_api.batches.lines import Line
from jitney_api.batches.records import Batch
from jitney_api.batches.settings import DAY_S

MAX_RESULT_TTL_S: Final = 30 * DAY_S


@dataclass(frozen=True, slots=True)
class Terms:
    """What all jobs of a batch have in common. deadline: Unix time. result_ttl_s: of a job, from its own end.

    All of it must be the same whenever the batch is taken up again, or its keys would answer for other jobs.
    """

    batch_id: str
    tenant: str
    deadline: float | None
    result_ttl_s: int

    def jobs_of(self, line: Line) -> list[tuple[str, JobSpec]]:
        """The jobs of a line, each with its idempotency key."""
        key = f"{self.batch_id}-{line.number}"
        return [(f"{key}-{n}" if n else key, self._own(spec)) for n, spec in enumerate(line.request.specs)]

    def _own(self, spec: JobSpec) -> JobSpec:
        limits = [limit for limit in (spec.deadline, self.deadline) if limit is not None]
        own: dict[str, Any] = {
            "band": "bulk",
            "tenant": self.tenant,
            "deadline": min(limits, default=None),
            "result_ttl_s": self.result_ttl_s,
            "on_disconnect": "continue",
        }
        return spec.model_copy(update=own)


def terms_of(batch: Batch) -> Terms:
    """Of the batch's jobs. A result outlives the window by a day: nobody may be there to collect it before."""
    life_s = round(batch.expires_at - batch.created_at) + DAY_S
    return Terms(batch.id, batch.tenant, batch.expires_at, min(life_s, MAX_RESULT_TTL_S))
