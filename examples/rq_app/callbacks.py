"""What RQ calls, in its worker, when a ticket has its label or did not get one."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from redis import Redis
from rq.job import Job

LABELS = "rq_app:labels"
FAILURES = "rq_app:failures"


def keep_label(job: Job, connection: Redis, answer: dict[str, Any]) -> None:
    """on_success: the label under the ticket's number."""
    connection.hset(LABELS, job.meta["ticket"], answer["text"].strip())


def count_failure(
    job: Job, connection: Redis, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """on_failure: at each attempt that failed."""
    connection.hincrby(FAILURES, job.meta["ticket"], 1)
