"""What workers say of themselves: a hash that dies with them, found through one sorted set per queue."""

from __future__ import annotations

import time
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict

from jitney.connection import Redis
from jitney.keys import Keys


class SeatView(BaseModel):
    """One seat of the batch: who sits there, since which step, and how far it is."""

    model_config = ConfigDict(frozen=True)

    job: str
    choice: int
    joined_step: int
    num_prompt_tokens: int
    num_computed_tokens: int
    num_output_tokens: int


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
    are differences of two views. state: `ready`, `draining` or `stuck`.
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
    seats: tuple[SeatView, ...] = ()
    departures: tuple[Departure, ...] = ()
    features: dict[str, Any] = {}


async def write_worker(redis: Redis, view: WorkerView, ttl_s: float) -> None:
    """Publish the view; it vanishes by itself when it is not written again within `ttl_s`."""
    keys = Keys(view.queue)
    pipe = redis.pipeline(transaction=False)
    pipe.hset(keys.worker(view.id), "view", view.model_dump_json())
    pipe.pexpire(keys.worker(view.id), round(ttl_s * 1_000))
    pipe.zadd(keys.workers, {view.id: view.written_at})
    pipe.zremrangebyscore(keys.workers, "-inf", view.written_at - 86_400)
    await pipe.execute()


async def remove_worker(redis: Redis, queue: str, worker_id: str) -> None:
    """A worker that stops says so, instead of being waited for."""
    keys = Keys(queue)
    pipe = redis.pipeline(transaction=False)
    pipe.delete(keys.worker(worker_id))
    pipe.zrem(keys.workers, worker_id)
    await pipe.execute()


async def list_workers(redis: Redis, queue: str) -> list[WorkerView]:
    """The workers of one queue that are alive, oldest first."""
    keys = Keys(queue)
    members: Any = await redis.zrange(keys.workers, 0, -1)
    ids = [member.decode() for member in members]
    if not ids:
        return []
    pipe = redis.pipeline(transaction=False)
    for worker_id in ids:
        pipe.hget(keys.worker(worker_id), "view")
    views = [WorkerView.model_validate(orjson.loads(raw)) for raw in await pipe.execute() if raw is not None]
    return sorted(views, key=lambda view: (view.started_at, view.id))


def unix_now() -> float:
    """Seconds, by this machine's clock: for stamps that people read, never for order or leases."""
    return time.time()
