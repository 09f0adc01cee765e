"""The queue's contract: one typed method per script. Every script does one guarded, atomic thing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from jitney.connection import Redis
from jitney.keys import Band, Fence, JobId, Keys


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what may wait, checked in the same script as the write. 0 = no bound."""

    max_waiting_jobs: int = 100_000
    max_waiting_tokens: int = 0
    max_tenant_jobs: int = 0
    max_later_jobs: int = 100_000


@dataclass(frozen=True, slots=True)
class Enqueued:
    """What `enqueue` answered: the job's id (an earlier job's, when an idempotency key matched)."""

    id: JobId
    duplicate: bool


@dataclass(frozen=True, slots=True)
class Delivery:
    """One handing-out of a job.

    fence: nonce of this claim; every later write must carry it. tries: claims so far, this one included.
    strikes: claims in a row that ended without progress (> 0: a suspect, to be run alone).
    seq: last event in the log, 0 for a job that has said nothing. num_tokens: completion tokens so far.
    at_ms: enqueue time by the server's clock. virtual_time: the tenant's service when it was picked.
    body: the job's bytes as somebody wrote them. prompt_ids: stored by the first append of an earlier claim.
    """

    id: JobId
    band: Band
    tenant: str
    fence: Fence
    tries: int
    strikes: int
    seq: int
    num_tokens: int
    at_ms: int
    virtual_time: float
    fingerprint: str
    body: bytes
    prompt_ids: bytes | None


@dataclass(frozen=True, slots=True)
class Claimed:
    """Deliveries, and what else the claim found out.

    gone: jobs ended or dropped on the way (expired, dead, body lost). num_moved: jobs of another
    fingerprint moved to their own waiting place. num_waiting: jobs still waiting in the queue.
    next_due_ms: until the next delayed job is due, None when there is none.
    """

    deliveries: tuple[Delivery, ...]
    gone: tuple[JobId, ...] = ()
    num_moved: int = 0
    num_waiting: int = 0
    next_due_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Held:
    """A job that this worker holds, for `renew`."""

    id: JobId
    fence: Fence
    band: Band


@dataclass(frozen=True, slots=True)
class Append:
    """Events of one job in one step. first_seq: seq of events[0]; num_tokens: completion tokens after them.

    prompt_ids and fingerprint: given once, with a claim's first append (prompt ids packed as in `pack_ids`).
    """

    id: JobId
    fence: Fence
    first_seq: int
    num_tokens: int
    events: Sequence[bytes]
    prompt_ids: bytes | None = None
    num_prompt_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """An append that wrote nothing. `seq` is the log's last seq when the reason is `seq`."""

    id: JobId
    reason: Literal["fence", "seq", "nolog", "error"]
    seq: int = 0
    text: str = ""


@dataclass(frozen=True, slots=True)
class Ending:
    """The last events of a job, the terminal one last, all of them written with its state in one script."""

    id: JobId
    fence: Fence
    first_seq: int
    num_tokens: int
    reason: str
    events: Sequence[bytes]
    keep_s: int = 3_600


class Queue:
    """One queue over one client. Methods may be awaited concurrently."""

    def __init__(self, redis: Redis, name: str) -> None:
        self.redis = redis
        self.name = name
        self.keys = Keys(name)
