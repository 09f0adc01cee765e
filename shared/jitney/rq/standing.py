"""Whose an RQ job is while it is held: somebody may have cancelled or deleted it, or taken it for abandoned. Pure."""

from __future__ import annotations

from typing import Literal

from rq.job import JobStatus

Standing = Literal["ours", "withdrawn", "lost"]
"""withdrawn: nobody wants its result any more. lost: RQ took its worker for dead, and somebody else has it."""


def standing(status: bytes | None, started_until: float | None) -> Standing:
    """status: in the job's record, None if that is gone. started_until: of this execution, in RQ's started registry."""
    if status is None or status == JobStatus.CANCELED.value.encode():
        return "withdrawn"
    if status != JobStatus.STARTED.value.encode() or started_until is None:
        return "lost"
    return "ours"
