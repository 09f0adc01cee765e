"""A worker's side of the protocol, saying what a test tells it to. It claims, appends and finishes like a real one."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

from jitney.connection import Redis
from jitney.messages import Event, JobSpec, usage_of
from jitney.queue import Append, Delivery, Ending, Queue

PATIENCE_S = 20.0
_nonces = itertools.count(1)


class Turn:
    """One claimed job."""

    def __init__(self, queue: Queue, delivery: Delivery) -> None:
        self.queue = queue
        self.delivery = delivery
        self.spec = JobSpec.decode(delivery.body)
        self.seq = delivery.seq
        self.num_tokens = delivery.num_tokens
        self.next_index: dict[int, int] = defaultdict(int, {0: delivery.num_tokens})

    @property
    def id(self) -> str:
        return self.delivery.id

    async def start(self) -> None:
        """`started` together with a first token, as the contract wants it."""
        first = Event("tokens", self.seq + 2, token_ids=(0,), text="", index=self.next_index[0])
        await self._append([Event("started", self.seq + 1, attempt=1, prompt_tokens=3, cached_tokens=0), first])

    async def say(self, *texts: str, **fields: Any) -> None:
        """One event for each text, one token each, all in one append."""
        index = self.next_index[fields.get("choice", 0)]
        events = [
            Event("tokens", self.seq + 1 + n, index=index + n, token_ids=(n,), text=text, **fields)
            for n, text in enumerate(texts)
        ]
        await self._append(events)

    async def say_again(self, payloads: list[bytes]) -> None:
        """Events that were written before, byte for byte."""
        await self._append([Event.decode(payload) for payload in payloads])

    def next_event(self, text: str) -> Event:
        """What `say(text)` would write next, for a test that writes it in another way."""
        return Event("tokens", self.seq + 1, index=self.next_index[0], token_ids=(0,), text=text)

    async def finish(self, text: str = "", finish_reason: str = "stop") -> None:
        last = Event(
            "tokens",
            self.seq + 1,
            index=self.next_index[0],
            text=text,
            finish_reason=finish_reason,  # type: ignore[arg-type]
        )
        choices = ({"choice": 0, "finish_reason": finish_reason, "num_tokens": self.num_tokens},)
        usage = usage_of(3, self.num_tokens)
        await self._end([last, Event("finished", self.seq + 2, choices=choices, usage=usage)])

    async def fail(self, error: dict[str, Any]) -> None:
        await self._end([Event("failed", self.seq + 1, usage=usage_of(3, self.num_tokens), error=error)])

    async def _append(self, events: list[Event]) -> None:
        num_new = sum(len(event.token_ids) for event in events)
        refused = await self.queue.append(
            [
                Append(
                    id=self.delivery.id,
                    fence=self.delivery.fence,
                    first_seq=self.seq + 1,
                    num_tokens=self.num_tokens + num_new,
                    events=[event.encode() for event in events],
                )
            ]
        )
        assert refused == []
        self.seq += len(events)
        self.num_tokens += num_new
        for event in events:
            if event.type == "tokens":
                self.next_index[event.choice] = event.index + len(event.token_ids)

    async def _end(self, events: list[Event]) -> None:
        outcome = await self.queue.finish(
            Ending(
                id=self.delivery.id,
                fence=self.delivery.fence,
                first_seq=self.seq + 1,
                num_tokens=self.num_tokens,
                reason=events[-1].type,
                events=[event.encode() for event in events],
            )
        )
        assert outcome == "ok"
        self.seq += len(events)


class ScriptedWorker:
    """Claims the jobs of one queue."""

    def __init__(self, redis: Redis, queue_name: str) -> None:
        self.queue = Queue(redis, queue_name)

    async def claim(self, credit: int = 1) -> list[Turn]:
        claimed = await self.queue.claim("w1", f"w1n{next(_nonces)}", credit=credit, fingerprint="fp", lease_s=60.0)
        return [Turn(self.queue, delivery) for delivery in claimed.deliveries]

    async def take(self) -> Turn:
        """The one job that waits."""
        (turn,) = await self.claim()
        return turn

    async def serve(self, num_jobs: int, perform: Callable[[Turn], Awaitable[None]]) -> None:
        """Perform jobs as they come, until `num_jobs` have ended."""
        async with asyncio.timeout(PATIENCE_S * 4):
            left = num_jobs
            while left:
                turns = await self.claim(credit=64)
                await asyncio.gather(*(perform(turn) for turn in turns))
                left -= len(turns)


async def eventually(holds: Callable[[], Awaitable[bool]]) -> None:
    """Ask again and again, each time over the wire, until it holds; TimeoutError after PATIENCE_S."""
    async with asyncio.timeout(PATIENCE_S):
        while not await holds():
            pass
