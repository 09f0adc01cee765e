"""Replies of the scripts as values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from jitney.errors import IdempotencyConflict, Overloaded
from jitney.keys import Band, Fence, JobId
from jitney.records import Append, Backlog, Claimed, DeadJob, Delivery, Enqueued, JobState, JobStatus, Refusal

MIN_RETRY_S, MAX_RETRY_S = 1.0, 120.0
DEFAULT_OUTPUT_TOKENS = 128.0
DEFAULT_TOKENS_PER_S = 500.0
"""Before the first job has ended nothing is measured; a guess of the right order is enough for a pause."""


def text(value: Any) -> str:
    """A reply's string. What a stranger wrote need not be UTF-8."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def enqueued(reply: Sequence[Any]) -> Enqueued:
    """Raises IdempotencyConflict and Overloaded."""
    outcome = text(reply[0])
    if outcome == "conflict":
        raise IdempotencyConflict(
            f"the idempotency key or id belongs to job {text(reply[1])}, which has another body: use a new key"
        )
    if outcome == "full":
        raise overloaded(reply)
    return Enqueued(JobId(text(reply[1])), duplicate=outcome == "dup")


def overloaded(reply: Sequence[Any]) -> Overloaded:
    """The refusal with a pause: the time in which the backlog is worked off at the measured rate."""
    waiting = backlog(*reply[2:6])
    return Overloaded(
        text(reply[1]),
        waiting_jobs=waiting.num_jobs,
        waiting_tokens=waiting.num_tokens,
        retry_after_s=min(max(waiting.drain_s, MIN_RETRY_S), MAX_RETRY_S),
    )


def backlog(jobs: Any, tokens: Any, mean_output: Any, rate: Any) -> Backlog:
    """From counts, and the measured means as they stand in Redis (absent before the first job has ended)."""
    num_jobs, num_tokens = int(jobs or 0), int(tokens or 0)
    tokens_per_s = float(rate) if rate else None
    total = num_tokens + num_jobs * float(mean_output or DEFAULT_OUTPUT_TOKENS)
    return Backlog(num_jobs, num_tokens, tokens_per_s, total / max(tokens_per_s or DEFAULT_TOKENS_PER_S, 1e-3))


def delivery(row: Sequence[Any]) -> Delivery:
    time_left_ms = int(row[11])
    return Delivery(
        id=JobId(text(row[0])),
        band=cast(Band, text(row[1])),
        tenant=text(row[2]),
        fence=Fence(text(row[3])),
        tries=int(row[4]),
        strikes=int(row[5]),
        seq=int(row[6]),
        num_tokens=int(row[7]),
        at_ms=int(row[8]),
        virtual_time=float(row[9]),
        fingerprints=tuple(text(row[10]).split()),
        body=bytes(row[12]),
        prompt_ids=None if row[13] is None else bytes(row[13]),
        time_left_ms=None if time_left_ms < 0 else time_left_ms,
        is_reclaimed=bool(row[14]) if len(row) > 14 else False,
    )


def claimed(reply: Sequence[Any]) -> Claimed:
    taken, gone, num_moved, num_waiting, due_ms = reply
    return Claimed(
        deliveries=tuple(delivery(row) for row in taken),
        gone=tuple(JobId(text(id)) for id in gone),
        num_moved=int(num_moved),
        num_waiting=int(num_waiting),
        next_due_ms=None if int(due_ms) < 0 else int(due_ms),
    )


def refusals(appends: Sequence[Append], reply: Sequence[Any]) -> list[Refusal]:
    """Refused appends, without those whose earlier sending was accepted and whose reply was lost."""
    refused: list[Refusal] = []
    for number, reason, seq, message in reply:
        append = appends[int(number) - 1]
        if reason == b"seq" and int(seq) == append.first_seq + len(append.events) - 1:
            continue
        refused.append(Refusal(append.id, text(reason), int(seq), text(message)))  # type: ignore[arg-type]
    return refused


def job_status(id: JobId, fields: dict[bytes, bytes]) -> JobStatus:
    def word(name: str) -> str:
        return text(fields.get(name.encode(), b""))

    def number(name: str) -> float:
        return float(word(name) or 0)

    def time(name: str) -> float | None:
        return number(name) / 1e3 or None

    return JobStatus(
        id=id,
        state=cast(JobState, word("state")),
        band=word("band"),
        tenant=word("tenant"),
        seq=int(number("seq")),
        num_prompt_tokens=int(number("pt")),
        num_tokens=int(number("n")),
        tries=int(number("tries")),
        strikes=int(number("strikes")),
        reason=word("reason"),
        owner=word("owner"),
        created_at=number("at") / 1e3,
        started_at=time("started"),
        ended_at=time("ended"),
        deadline=time("deadline"),
    )


def _whole(value: bytes) -> int:
    """0 for what is no number: anybody may have written it."""
    return int(value) if value.isdigit() and len(value) < 16 else 0


def dead_job(entry_id: bytes, fields: dict[bytes, bytes]) -> DeadJob:
    words = {text(name): value for name, value in fields.items()}
    event = words.pop("e", b"")
    return DeadJob(
        entry_id=text(entry_id),
        id=text(words.pop("j", b"")),
        band=text(words.pop("b", b"")),
        tenant=text(words.pop("t", b"")),
        reason=text(words.pop("r", b"")),
        num_tokens=_whole(words.pop("n", b"0")),
        event=event,
        last_error=words.pop("le", b""),
        fields=words,
    )
