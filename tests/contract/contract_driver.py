"""Short words for tests of the contract: enqueue, claim, say something, end; and what lies in Redis afterwards."""

from __future__ import annotations

import hashlib
import itertools
from typing import Any

from jitney.keys import Band, JobId, new_job_id
from jitney.messages import Event, usage_of
from jitney.queue import Append, Claimed, Delivery, Ending, Enqueued, Entry, Held, Limits, Queue, Refusal

LEASE_S = 1_000.0
"""No lease ends by itself in a test: tests end them."""


def digest_of(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


class Driver:
    """A client and any number of workers of one queue. Claims get fresh nonces."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self.keys = queue.keys
        self.redis = queue.redis
        self._nonces = itertools.count(1)

    def entry(self, body: bytes = b'{"v":1,"prompt":"hi"}', **fields: Any) -> Entry:
        return Entry(id=fields.pop("id", new_job_id(self.queue.name)), body=body, digest=digest_of(body), **fields)

    async def enqueue(self, *, limits: Limits | None = None, **fields: Any) -> JobId:
        return (await self.submit(self.entry(**fields), limits=limits)).id

    async def submit(self, entry: Entry, *, limits: Limits | None = None) -> Enqueued:
        return await self.queue.enqueue(entry, limits or Limits())

    def nonce(self) -> str:
        return f"n{next(self._nonces)}"

    async def claim(self, worker: str = "w", *, credit: int = 100, fingerprint: str = "fp", **options: Any) -> Claimed:
        return await self.queue.claim(
            worker, self.nonce(), credit=credit, fingerprint=fingerprint, lease_s=LEASE_S, **options
        )

    async def claim_one(self, worker: str = "w", **options: Any) -> Delivery:
        claimed = await self.claim(worker, credit=1, **options)
        assert len(claimed.deliveries) == 1, claimed
        return claimed.deliveries[0]

    async def say(self, job: Delivery, *texts: str, seq: int | None = None) -> list[Refusal]:
        """Append one token event per text, each of one token, after the delivery's seq."""
        first = job.seq + 1 if seq is None else seq
        events = [
            Event("tokens", first + i, index=job.num_tokens + i, token_ids=(i,), text=text).encode()
            for i, text in enumerate(texts)
        ]
        return await self.queue.append([Append(job.id, job.fence, first, job.num_tokens + len(texts), events)])

    def ending(self, job: Delivery, *, seq: int | None = None, num_tokens: int = 0, **fields: Any) -> Ending:
        """The end of a job whose log is at seq - 1."""
        first = job.seq + 1 if seq is None else seq
        event = Event("finished", first, usage=usage_of(1, num_tokens)).encode()
        return Ending(job.id, job.fence, first, num_tokens, "finished", [event], **fields)

    async def finish(self, job: Delivery, **fields: Any) -> str:
        return await self.queue.finish(self.ending(job, **fields))

    def held(self, job: Delivery) -> Held:
        return Held(job.id, job.fence, job.band)

    async def events(self, id: JobId) -> list[Event]:
        payloads = await self.queue.read_log(id)
        assert payloads is not None
        return [Event.decode(payload) for payload in payloads]

    async def state(self, id: JobId) -> str | None:
        status = await self.queue.status(id)
        return None if status is None else status.state

    async def end_lease(self, id: JobId, band: Band = "interactive") -> None:
        """As if its owner had been dead for a lease."""
        assert await self.redis.zadd(self.keys.leases(band), {id: 1}, xx=True, ch=True) == 1

    async def rewind(self, id: JobId, **times: int) -> None:
        """Set times (ms) of a job's record, as if they had been set long ago."""
        assert await self.redis.exists(self.keys.job(id))
        await self.redis.hset(self.keys.job(id), mapping=times)

    async def lose_build(self, fingerprint: str, *ids: JobId) -> None:
        """As if no worker of that build had been seen for long, by others who looked, since these jobs wait for it."""
        for id in ids:
            await self.rewind(id, since=1)
        await self.redis.zadd(self.keys.fingerprints, {fingerprint: 1}, xx=True)
        await self.redis.set(self.keys.looked, "1", px=30_000)

    async def key_names(self) -> set[str]:
        """Suffixes of all keys of this queue."""
        names = [name async for name in self.redis.scan_iter(f"{self.keys.prefix}:*", count=1_000)]
        return {name.decode().removeprefix(self.keys.prefix + ":") for name in names}
