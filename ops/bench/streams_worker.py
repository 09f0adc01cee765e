"""`python -m ops.bench.streams_worker`: a worker that says what each job's prompt tells it to, at the pace it tells.

It claims, appends and finishes as every worker does, and computes nothing: what is measured is what lies between it
and a reader.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import orjson

from jitney.connection import connect, connect_blocking
from jitney.messages import Event, JobSpec, usage_of
from jitney.queue import Append, Delivery, Ending, Queue

FINGERPRINT = "scripted"
LEASE_S = 600.0
CREDIT = 64
TICK_S = 0.01


@dataclass(frozen=True, slots=True)
class Script:
    """What a job says. It travels as the prompt, so that worker and reader agree without talking to each other.

    every_s: from one event to the next. padding: characters added to each text. is_stamped: the texts say, in ns of
    the machine's monotonic clock, when the job was claimed and when the text was handed to Redis.
    """

    name: str
    num_events: int
    every_s: float = 0.0
    padding: int = 0
    is_stamped: bool = False

    @property
    def prompt(self) -> str:
        return orjson.dumps(asdict(self)).decode()

    @classmethod
    def of(cls, prompt: str) -> Script:
        return cls(**orjson.loads(prompt))

    def text(self, number: int) -> str:
        return f"{self.name}/{number};{'.' * self.padding}"

    @property
    def whole(self) -> str:
        """What a reader must have heard in the end."""
        return "".join(map(self.text, range(self.num_events)))


class Speaker:
    """A claimed job. `due`: when its next event is to be said, by the loop's clock."""

    def __init__(self, delivery: Delivery, now: float) -> None:
        self.delivery = delivery
        self.script = Script.of(_prompt_of(delivery))
        self.due = now
        self._claimed_ns = time.monotonic_ns()
        self._num_said = self._seq = 0

    @property
    def has_said_all(self) -> bool:
        return self._num_said == self.script.num_events

    def append(self) -> Append:
        """Its next event, after `started` when it is the first."""
        first, events = self._seq + 1, []
        if not self._seq:
            events.append(self._event(type="started", attempt=1, prompt_tokens=1, cached_tokens=0))
        events.append(self._event(type="tokens", index=self._num_said, token_ids=(7,), text=self._text()))
        self._num_said += 1
        self.due += self.script.every_s
        return Append(self.delivery.id, self.delivery.fence, first, self._num_said, events)

    def ending(self) -> Ending:
        first, number = self._seq + 1, self._num_said
        events = [
            self._event(type="tokens", index=number, token_ids=(2,), finish_reason="stop"),
            self._event(
                type="finished",
                choices=({"choice": 0, "finish_reason": "stop", "num_tokens": number + 1},),
                usage=usage_of(1, number + 1),
            ),
        ]
        return Ending(self.delivery.id, self.delivery.fence, first, number + 1, "finished", events)

    def _event(self, **fields: Any) -> bytes:
        self._seq += 1
        return Event(seq=self._seq, **fields).encode()

    def _text(self) -> str:
        if self.script.is_stamped:
            return f"{self._claimed_ns} {time.monotonic_ns()} "
        return self.script.text(self._num_said)


def _prompt_of(delivery: Delivery) -> str:
    messages = JobSpec.decode(delivery.body).messages
    assert messages, "jobs of this bench are chats"
    return str(messages[-1]["content"])


async def say(queue: Queue, speakers: list[Speaker]) -> list[Speaker]:
    """One event of each; those that have more to say. A job that was cancelled is dropped."""
    refused = {refusal.id for refusal in await queue.append([one.append() for one in speakers])}
    speakers = [one for one in speakers if one.delivery.id not in refused]
    for one in speakers:
        if one.has_said_all:
            await queue.finish(one.ending())
    return [one for one in speakers if not one.has_said_all]


async def serve(redis_url: str, name: str) -> None:
    """Until the process is ended."""
    queue, blocking = Queue(connect(redis_url, name="scripted"), name), connect_blocking(redis_url, block_s=1.0)
    clock, waiting = asyncio.get_running_loop().time, list[Speaker]()

    async def claim() -> None:
        while True:
            nonce = secrets.token_hex(8)
            claimed = await queue.claim("w1", nonce, credit=CREDIT, fingerprint=FINGERPRINT, lease_s=LEASE_S)
            if claimed.deliveries:
                waiting.extend(await say(queue, [Speaker(one, clock()) for one in claimed.deliveries]))
            else:
                await queue.wait_bell(blocking, FINGERPRINT, 1.0)

    async def pace() -> None:
        while True:
            now = clock()
            due = [one for one in waiting if one.due <= now]
            waiting[:] = [one for one in waiting if one.due > now]
            waiting.extend(await say(queue, due) if due else [])
            await asyncio.sleep(TICK_S)

    print("ready", file=sys.stderr, flush=True)
    await asyncio.gather(claim(), pace())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="streams_worker")
    parser.add_argument("--redis-url", required=True)
    parser.add_argument("--queue", required=True)
    given = parser.parse_args()
    asyncio.run(serve(given.redis_url, given.queue))
