"""A queue without lease, fence and log, for comparison alone: jobs in a list, events on channels, nothing kept.

What is published while nobody listens is missed, what a dead worker held is lost, and two writers would both be
heard. `make_bare` puts it in the place of the product's queue in the process that calls it; the product has no
switch for any of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jitney.keys import Fence, JobId
from jitney.queue import Append, Claimed, Credit, Delivery, Ending, Held, Queue, Swept

NUM_ID_BYTES = 22 + 1
"""Of a job's id without its queue's name, and the blank after it."""


def waiting(queue: Queue) -> str:
    """The list in which jobs wait."""
    return f"{queue.keys.prefix}:bare"


async def submit(queue: Queue, id: JobId, body: bytes) -> None:
    """The client's side: write a job down, wake a worker."""
    pipeline = queue.redis.pipeline(transaction=False)
    pipeline.rpush(waiting(queue), id.rpartition(".")[2].encode() + b" " + body)
    pipeline.rpush(queue.keys.bell, b"1")
    await pipeline.execute()


async def _claim(self: Queue, worker: str, nonce: str, *, credit: Credit, **_: Any) -> Claimed:
    taken: Any = await self.redis.lpop(waiting(self), credit.interactive) or []
    return Claimed(tuple(_delivery(self, raw, f"{nonce}.{number}") for number, raw in enumerate(taken, 1)))


def _delivery(queue: Queue, raw: bytes, fence: str) -> Delivery:
    tail, body = raw[: NUM_ID_BYTES - 1].decode(), raw[NUM_ID_BYTES:]
    return Delivery(
        id=JobId(f"{queue.name}.{tail}"),
        band="interactive",
        tenant="-",
        fence=Fence(fence),
        tries=1,
        strikes=0,
        seq=0,
        num_tokens=0,
        at_ms=0,
        virtual_time=0.0,
        fingerprints=(),
        body=body,
        prompt_ids=None,
    )


async def _append(self: Queue, appends: Sequence[Append]) -> list[Any]:
    pipeline = self.redis.pipeline(transaction=False)
    for append in appends:
        for event in append.events:
            pipeline.publish(self.keys.tokens(append.id), event)
    await pipeline.execute()
    return []


async def _finish(self: Queue, ending: Ending) -> str:
    pipeline = self.redis.pipeline(transaction=False)
    for event in ending.events:
        pipeline.publish(self.keys.tokens(ending.id), event)
    await pipeline.execute()
    return "ok"


async def _adopt(self: Queue, worker: str, nonce: str) -> tuple[Delivery, ...]:
    return ()


async def _renew(self: Queue, lease_s: float, held: Sequence[Held]) -> set[JobId]:
    return set()


async def _hand_back(self: Queue, id: JobId, fence: Fence, **_: Any) -> str:
    return "ok"


async def _sweep(self: Queue, **_: Any) -> Swept:
    return Swept(0, 0, 0, 0, 0, 0)


async def _fold(self: Queue, *_: Any, **__: Any) -> int:
    return 0


async def _epoch(self: Queue) -> str:
    return "bare"


BARE = {
    "claim": _claim,
    "adopt": _adopt,
    "renew": _renew,
    "append": _append,
    "finish": _finish,
    "release": _hand_back,
    "retry": _hand_back,
    "janitor": _sweep,
    "fold_ended": _fold,
    "epoch": _epoch,
}


def make_bare() -> None:
    """From now on every queue of this process is bare."""
    for name, method in BARE.items():
        if not hasattr(Queue, name):
            raise LookupError(f"Queue.{name} is no more: bare.py must follow")
        setattr(Queue, name, method)
