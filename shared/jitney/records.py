"""The values that the queue's methods take and give. Times ending in `_ms` are the server's clock."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from jitney.keys import Band, Fence, JobId

JobState = Literal["waiting", "later", "running", "returned", "done"]
"""Where a job is: in its tenant's stream, delayed, held by a worker, given back, ended."""

FinishOutcome = Literal["ok", "done", "fence", "gone", "seq"]
"""ok: ended by this call or an earlier sending of it. done: somebody else ended it. fence: another claim
owns it. gone: no such job. seq: events between the log's last one and these are missing."""

ReleaseOutcome = Literal["ok", "done", "fence", "gone"]
RetryOutcome = Literal["ok", "dead", "done", "fence", "gone"]
"""dead: that was the last attempt; the job has ended as `failed` and lies in `:dead`."""


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian 32-bit words."""
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def unpack_ids(packed: bytes) -> tuple[int, ...]:
    """The inverse of `pack_ids`. Raises struct.error for bytes of another length."""
    return struct.unpack(f"<{len(packed) // 4}I", packed)


@dataclass(frozen=True, slots=True)
class Entry:
    """A job on its way into the queue.

    digest: of the canonical body before a seed was drawn; tells a repeated submission from another job.
    num_prompt_tokens: an estimate, for bounds and fairness; a worker's first append settles it.
    not_before, deadline: Unix seconds. timeout_s: from then (or now) to the end. queue_timeout_s: to the first event.
    max_attempts: without progress; fewer than the workers allow, None = as many.
    keep_body: the body lives as long as the result, not only until the job's end.
    hook: who is told of the end, `Webhook.hook`; '': nobody.
    """

    id: JobId
    body: bytes
    digest: str
    band: Band = "interactive"
    tenant: str = "-"
    num_prompt_tokens: int = 1
    max_tokens: int | None = None
    not_before: float | None = None
    deadline: float | None = None
    timeout_s: float | None = None
    queue_timeout_s: float | None = None
    idempotency_key: str | None = None
    result_ttl_s: int = 3_600
    max_attempts: int | None = None
    keep_body: bool = False
    hook: str = ""


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
    fingerprints: of the builds that wrote the log so far, in order; usually none or one.
    body: the job's bytes as somebody wrote them. prompt_ids: stored by the first append of an earlier claim.
    time_left_ms: until the job's deadline at the moment of the claim, None when it has none.
    is_reclaimed: its last owner let the lease run out. For counting alone: `adopt` cannot tell any more.
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
    fingerprints: tuple[str, ...]
    body: bytes
    prompt_ids: bytes | None
    time_left_ms: int | None = None
    is_reclaimed: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class Credit:
    """How many jobs a claim may take: of each band and all more urgent ones together, so no number is above the first.

    interactive, standard, bulk: a worker whose seats hold bulk takes none of that, and others in its place.
    """

    interactive: int
    standard: int
    bulk: int

    @classmethod
    def of(cls, num_jobs: int) -> Credit:
        """So many, whatever their band."""
        return cls(num_jobs, num_jobs, num_jobs)


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

    prompt_ids (packed as in `pack_ids`) and num_prompt_tokens: given once, with a claim's first append.
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
    """An append that did not happen: drop the job (`fence`), send again from `seq` + 1 (`seq`), or end it.

    seq: the log's last seq. nolog: the log is gone though it had begun. error: the server's own, in `text`.
    """

    id: JobId
    reason: Literal["fence", "seq", "nolog", "error"]
    seq: int = 0
    text: str = ""


@dataclass(frozen=True, slots=True)
class Ending:
    """The last events of a job, the terminal one last, all of them written with its state in one script.

    reason: short word for status and ledger, by default the terminal event's type.
    keep_s: life of the result, None = as the job asked. dead_reason: bury the job in `:dead` under this reason.
    num_prompt_tokens: when no append has told it.
    """

    id: JobId
    fence: Fence
    first_seq: int
    num_tokens: int
    reason: str
    events: Sequence[bytes]
    keep_s: int | None = None
    dead_reason: str | None = None
    num_prompt_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Cancelled:
    """What `cancel` found. was: the state before it, or the reason of the earlier end; '' for `notfound`."""

    outcome: Literal["cancelled", "done", "notfound"]
    was: str = ""


@dataclass(frozen=True, slots=True)
class JobStatus:
    """A job's record. Times are Unix seconds by the server's clock, None for what has not happened."""

    id: JobId
    state: JobState
    band: str
    tenant: str
    seq: int
    num_prompt_tokens: int
    num_tokens: int
    tries: int
    strikes: int
    reason: str
    owner: str
    created_at: float
    started_at: float | None
    ended_at: float | None
    deadline: float | None


@dataclass(frozen=True, slots=True)
class Backlog:
    """What waits in a queue. num_tokens: of the prompts. tokens_per_s: of prompts and answers, while anybody worked.

    None before it was measured. drain_s: until all is worked off at that rate (or at a guess), answers included.
    """

    num_jobs: int
    num_tokens: int
    tokens_per_s: float | None
    drain_s: float


@dataclass(frozen=True, slots=True)
class Swept:
    """What a janitor call did: delayed jobs made due, late ones expired, orphans ended or freed, tenants tidied.

    And what waits now. num_repaired: as `sweep` says.
    """

    num_due: int = 0
    num_expired: int = 0
    num_orphans: int = 0
    num_tidied: int = 0
    num_waiting_jobs: int = 0
    num_waiting_tokens: int = 0
    num_repaired: int = 0

    def and_then(self, later: Swept) -> Swept:
        """Both of them together: what was done adds up, what waits is as the later one found it."""
        return replace(
            later,
            num_due=self.num_due + later.num_due,
            num_expired=self.num_expired + later.num_expired,
            num_orphans=self.num_orphans + later.num_orphans,
            num_tidied=self.num_tidied + later.num_tidied,
        )


@dataclass(frozen=True, slots=True)
class DeadJob:
    """A buried entry.

    id: '' for an entry that named no job. num_tokens: completion tokens that its log holds. event: the job's
    terminal event. last_error: JSON, of an attempt before the one that ended it. `fields`: what else was kept.
    """

    entry_id: str
    id: str
    band: str
    tenant: str
    reason: str
    num_tokens: int = 0
    event: bytes = b""
    last_error: bytes = b""
    fields: dict[str, bytes] = field(default_factory=dict)

    @property
    def buried_at(self) -> float:
        """Unix seconds, by the server's clock."""
        return int(self.entry_id.partition("-")[0]) / 1e3
