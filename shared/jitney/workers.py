"""What workers say of themselves: a hash that dies with them, found through one sorted set per queue."""

from __future__ import annotations

import time
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, ValidationError

from jitney.calls import is_wrong_kind
from jitney.connection import Redis
from jitney.keys import Keys
from jitney.metrics.readings import Readings


class SeatView(BaseModel):
    """One seat of the batch: who sits there, since which step, and how far it is.

    number: the lowest that was free when it joined, counted from 1; 0 from a worker that numbers none.
    max_output_tokens: where the answer ends at the latest; 0: not said.
    """

    model_config = ConfigDict(frozen=True)

    job: str
    choice: int
    joined_step: int
    num_prompt_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    number: int = 0
    max_output_tokens: int = 0

    @property
    def is_decoding(self) -> bool:
        """All but the last token are in the cache: each step says one more. Otherwise it reads, for the first time or
        again."""
        return 0 < self.num_prompt_tokens + self.num_output_tokens - 1 <= self.num_computed_tokens


class Move(BaseModel):
    """A seat that changed hands. step: in which it joined, was computed for the last time, or lost its blocks before.

    seat: its number; 0 when it was not known. at: when the worker noticed, at most a snapshot later, Unix seconds.
    """

    model_config = ConfigDict(frozen=True)

    kind: Literal["joined", "preempted", "left"]
    step: int
    job: str
    choice: int
    seat: int
    at: float


class Departure(BaseModel):
    """A sequence that left the batch."""

    model_config = ConfigDict(frozen=True)

    job: str
    choice: int
    joined_step: int
    left_step: int
    num_output_tokens: int
    reason: str


class WorkerView(BaseModel):
    """A worker's last word about itself.

    step: steps run so far. Counters (`num_generated_tokens` and so on) run from the worker's start; rates
    are differences of two views. state: `ready`, `draining` or `stuck`. num_prefill_tokens, num_decode_tokens: of the
    last step. blocks: what evenly spread KV blocks are, a letter each (free, cached, used, shared). moves: the last.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: str
    queue: str
    model: str
    fingerprint: str
    host: str
    pid: int
    state: str
    started_at: float
    written_at: float
    step: int = 0
    num_running: int = 0
    num_waiting: int = 0
    max_num_seqs: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_preemptions: int = 0
    num_generated_tokens: int = 0
    num_computed_tokens: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_cached_blocks: int = 0
    num_shared_blocks: int = 0
    blocks: str = ""
    seats: tuple[SeatView, ...] = ()
    moves: tuple[Move, ...] = ()
    departures: tuple[Departure, ...] = ()
    features: dict[str, Any] = {}


async def write_worker(redis: Redis, view: WorkerView, ttl_s: float, readings: Readings | None = None) -> None:
    """Publish the view; it vanishes by itself when it is not written again within `ttl_s`.

    By the server's clock alone: a worker whose own is wrong must neither vanish nor put others out.
    readings: its metrics, in a field of their own: pages that show the view do not pay for them.
    """
    keys = Keys(view.queue)
    now, _ = await redis.time()
    pipe = redis.pipeline(transaction=False)
    pipe.hset(keys.worker(view.id), "view", view.model_dump_json())
    if readings is not None:
        pipe.hset(keys.worker(view.id), "metrics", readings.encode())
    pipe.pexpire(keys.worker(view.id), round(ttl_s * 1_000))
    pipe.zadd(keys.workers, {view.id: now + ttl_s})
    pipe.zremrangebyscore(keys.workers, "-inf", f"({now - 1}")  # whoever was killed is not remembered for long
    await pipe.execute()


async def remove_worker(redis: Redis, queue: str, worker_id: str) -> None:
    """A worker that stops says so, instead of being waited for."""
    keys = Keys(queue)
    pipe = redis.pipeline(transaction=False)
    pipe.delete(keys.worker(worker_id))
    pipe.zrem(keys.workers, worker_id)
    await pipe.execute()


async def list_workers(redis: Redis, queue: str) -> list[WorkerView]:
    """The workers of one queue that are alive, oldest first. What is no view is passed over: anybody may write one."""
    found = [_view_of(raw) for raw in await _fields_of_workers(redis, queue, "view")]
    return sorted((view for view in found if view is not None), key=lambda view: (view.started_at, view.id))


async def list_readings(redis: Redis, queue: str) -> list[tuple[WorkerView, Readings | None]]:
    """The workers that are alive, oldest first, and what they have counted; None where nothing of that can be read."""
    found = list[tuple[WorkerView, Readings | None]]()
    for fields in await _fields_of_workers(redis, queue, "view", "metrics"):
        view = _view_of(fields if isinstance(fields, Exception) else fields[0])
        if view is not None:
            found.append((view, None if fields[1] is None else Readings.decode(fields[1])))
    return sorted(found, key=lambda one: (one[0].started_at, one[0].id))


async def _fields_of_workers(redis: Redis, queue: str, *names: str) -> list[Any]:
    """One answer for each worker: the field, a list of several, or an error."""
    keys = Keys(queue)
    members: Any = await redis.zrange(keys.workers, 0, -1)
    if not members:
        return []
    pipe = redis.pipeline(transaction=False)
    for member in members:
        key = keys.worker(member.decode("utf-8", "replace"))
        pipe.hmget(key, *names) if len(names) > 1 else pipe.hget(key, *names)
    return await pipe.execute(raise_on_error=False)


def _view_of(answer: object) -> WorkerView | None:
    if is_wrong_kind(answer):
        return None
    if isinstance(answer, Exception):
        raise answer
    try:
        return None if answer is None else WorkerView.model_validate_json(cast(bytes, answer))
    except ValidationError:
        return None


def unix_now() -> float:
    """Seconds, by this machine's clock: for stamps that people read, never for order or leases."""
    return time.time()
