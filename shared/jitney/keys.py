"""Every Redis key and channel by name. All keys of one queue share a hash tag: one slot in a cluster."""

from __future__ import annotations

import hashlib
import re
import secrets
from typing import Final, Literal, NewType

from jitney.errors import InvalidJob

Band = Literal["interactive", "standard", "bulk"]
BANDS: Final[tuple[Band, ...]] = ("interactive", "standard", "bulk")
"""In the order in which they are claimed."""

JobId = NewType("JobId", str)
Fence = NewType("Fence", str)

QUEUES: Final = "jitney:queues"
ALIASES: Final = "jitney:aliases"
TOKENIZERS: Final = "jitney:tokenizers"
API_KEYS: Final = "jitney:keys"
BATCHES: Final = "jitney:{batches}"
"""Before every key of batches and their files: they belong to no queue, and lie in one slot."""

_QUEUE_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,47}")
_TENANT_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_ID_TAIL = re.compile(r"[0-9A-Za-z]{22}")
_BASE62 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def check_queue_name(name: str) -> str:
    """`name`, or InvalidJob."""
    if not _QUEUE_NAME.fullmatch(name):
        raise InvalidJob(
            f"queue name {name[:64]!r} must match [a-z0-9][a-z0-9._-]{{0,47}}",
            param="queue",
            code="invalid_queue",
        )
    return name


def queue_name_for(model: str) -> str:
    """The default queue of a model name or path: its last part, lower case, other characters as '-'."""
    last = model.rstrip("/").rsplit("/", 1)[-1].lower()
    return check_queue_name(re.sub(r"[^a-z0-9._-]+", "-", last).lstrip("._-")[:48] or "default")


def check_tenant(tenant: str) -> str:
    """`tenant`, or InvalidJob: it becomes part of key names."""
    if not _TENANT_NAME.fullmatch(tenant):
        raise InvalidJob(f"tenant {tenant[:64]!r} must match [A-Za-z0-9_.-]{{1,64}}", param="tenant")
    return tenant


def new_job_id(queue: str) -> JobId:
    """`<queue>.<22 base62 characters>`: 128 random bits, never taken from a user's text."""
    return JobId(f"{check_queue_name(queue)}.{new_tail()}")


def new_tail() -> str:
    """128 random bits as 22 base62 characters: what makes an id one of its own."""
    number, tail = secrets.randbits(128), ""
    for _ in range(22):
        number, digit = divmod(number, 62)
        tail = _BASE62[digit] + tail
    return tail


def queue_of(job_id: str) -> str:
    """The queue that an id names. Raises InvalidJob for anything that is not a job id."""
    queue, _, tail = job_id.rpartition(".")
    if not (_ID_TAIL.fullmatch(tail) and _QUEUE_NAME.fullmatch(queue)):
        raise InvalidJob(f"{job_id[:80]!r} is not a job id (<queue>.<22 letters and digits>)", param="id")
    return queue


def settled_key(task: str) -> str:
    """Whether somebody has recorded how that task of another queue ended. No queue's name begins with a dash."""
    return f"{{jitney:-}}:settled:{task}"


class Keys:
    """Names of one queue's keys, as in ARCHITECTURE.md.

    annex: a word between the queue's name and the rest: keys that lie in the same slot and under the same
    rights as the queue's own, but that nobody looks at.
    """

    def __init__(self, queue: str, *, annex: str = "") -> None:
        self.queue = check_queue_name(queue)
        self.prefix = f"{{jitney:{queue}}}" + (f":{annex}" if annex else "")
        self.counts = f"{self.prefix}:counts"
        self.bell = f"{self.prefix}:bell"
        self.call = f"{self.prefix}:call"
        self.epoch = f"{self.prefix}:epoch"
        self.later = f"{self.prefix}:later"
        self.deadlines = f"{self.prefix}:deadlines"
        self.dead = f"{self.prefix}:dead"
        self.usage = f"{self.prefix}:usage"
        self.ended = f"{self.prefix}:ended"
        self.virtual_time = f"{self.prefix}:vt"
        self.weights = f"{self.prefix}:weights"
        self.fingerprints = f"{self.prefix}:fps"
        self.workers = f"{self.prefix}:workers"
        self.sync = f"{self.prefix}:sync"
        self.sweep = f"{self.prefix}:sweep"
        self.looked = f"{self.prefix}:looked"
        self.history = f"{self.prefix}:history"
        self.hooks = f"{self.prefix}:hooks"
        self.dead_hooks = f"{self.prefix}:hooks:dead"

    def jobs(self, band: str, tenant: str) -> str:
        return f"{self.prefix}:jobs:{band}:{tenant}"

    def fair(self, band: str) -> str:
        return f"{self.prefix}:fair:{band}"

    def idle(self, band: str) -> str:
        return f"{self.prefix}:idle:{band}"

    def leases(self, band: str) -> str:
        return f"{self.prefix}:leases:{band}"

    def held(self, band: str, fingerprint: str) -> str:
        return f"{self.prefix}:held:{band}:{fingerprint}"

    def job(self, job_id: str) -> str:
        return f"{self.prefix}:job:{job_id}"

    def body(self, job_id: str) -> str:
        return f"{self.prefix}:body:{job_id}"

    def ids(self, job_id: str) -> str:
        return f"{self.prefix}:ids:{job_id}"

    def tokens(self, job_id: str) -> str:
        """The job's log (a stream), and the channel on which the same events are published."""
        return f"{self.prefix}:tokens:{job_id}"

    def result(self, job_id: str) -> str:
        return f"{self.prefix}:result:{job_id}"

    def hook(self, id: str) -> str:
        """An announcement: of a job by its id."""
        return f"{self.prefix}:hook:{id}"

    def bell_for(self, fingerprint: str) -> str:
        return f"{self.prefix}:bell:{fingerprint}"

    def last(self, worker: str) -> str:
        return f"{self.prefix}:last:{worker}"

    def ctl(self, worker: str) -> str:
        return f"{self.prefix}:ctl:{worker}"

    def worker(self, worker: str) -> str:
        return f"{self.prefix}:worker:{worker}"

    def idempotency(self, tenant: str, key: str) -> str:
        """A user's own text never becomes a key name: tenant and key are hashed together."""
        return f"{self.prefix}:idem:{_digest(tenant, key)}"


class BatchKeys:
    """Names of the keys of batches and their files, as in ARCHITECTURE.md. The scripts write the same ones."""

    active = f"{BATCHES}:active"
    ended = f"{BATCHES}:ended"
    expiring = f"{BATCHES}:expiring"
    loose = f"{BATCHES}:loose"
    restoring = f"{BATCHES}:restoring"

    @staticmethod
    def batch(batch_id: str) -> str:
        return f"{BATCHES}:batch:{batch_id}"

    @staticmethod
    def done(batch_id: str) -> str:
        return f"{BATCHES}:done:{batch_id}"

    @staticmethod
    def chunks(batch_id: str) -> str:
        return f"{BATCHES}:chunks:{batch_id}"

    @staticmethod
    def file(file_id: str) -> str:
        return f"{BATCHES}:file:{file_id}"

    @staticmethod
    def batches_of(tenant: str) -> str:
        return f"{BATCHES}:batches:{tenant}"

    @staticmethod
    def files_of(tenant: str) -> str:
        return f"{BATCHES}:files:{tenant}"

    @staticmethod
    def idempotency(tenant: str, key: str) -> str:
        """A user's own text never becomes a key name: tenant and key are hashed together."""
        return f"{BATCHES}:idem:{_digest(tenant, key)}"


def _digest(tenant: str, key: str) -> str:
    return hashlib.sha256(f"{tenant}\0{key}".encode("utf-8", "surrogatepass")).hexdigest()[:40]
