"""A job of the doctor's own, on keys of its own: does this user have every right that jitney needs?

Its keys begin like the queue's, so that they lie under the same rights and in the same slot, but no worker and
no client looks at them. They are deleted afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from typing import Final

import redis.exceptions

from jitney.checks import Finding
from jitney.connection import Redis, connect_blocking, connect_once
from jitney.errors import JitneyError
from jitney.keys import QUEUES, JobId, new_job_id
from jitney.messages import Event, usage_of
from jitney.queue import Append, Delivery, Ending, Entry, Held, Queue

HEARING_S: Final = 2.0
LEASE_S: Final = 30.0
LIFE_S: Final = 60
WORKER: Final = "doctor"
FINGERPRINT: Final = "doctor"


class CanaryFailed(JitneyError):
    """The canary job did not go the way of every job."""


class Canary:
    """One walk through everything a client and a worker do. `step`: what is being tried."""

    def __init__(self, redis: Redis, blocking: Redis, listening: Redis, queue: str) -> None:
        self.queue = Queue(redis, queue, annex=f"doctor-{secrets.token_hex(6)}")
        self.step = "connect"
        self._redis = redis
        self._blocking = blocking
        self._listening = listening
        self._ids = [new_job_id(queue) for _ in range(2)]

    async def walk(self) -> None:
        """Raises CanaryFailed, or what Redis and the queue raise; `step` says at what."""
        self.step = "read and write the list of queues"
        await self._redis.hgetall(QUEUES)
        await self._redis.hdel(QUEUES, self.queue.keys.prefix)
        job = await self._enqueue_and_claim()
        await self._speak(job)
        await self._end(job)
        await self._keep_house()

    async def clean_up(self) -> None:
        """Remove every key it can have made."""
        keys = self.queue.keys
        names = [value for name, value in vars(keys).items() if name not in ("queue", "prefix")]
        names += [keys.last(WORKER), keys.bell_for(FINGERPRINT), keys.idempotency("-", WORKER)]
        names += [keys.jobs("interactive", "-"), keys.held("interactive", FINGERPRINT)]
        names += [kind("interactive") for kind in (keys.fair, keys.idle, keys.leases)]
        for id in self._ids:
            names += [kind(id) for kind in (keys.job, keys.body, keys.ids, keys.tokens, keys.result)]
        await self._redis.delete(*names)

    async def _enqueue_and_claim(self) -> Delivery:
        self.step = "enqueue"
        for id, key in zip(self._ids, (WORKER, None), strict=True):
            entry = Entry(id, b'{"v":1,"prompt":"canary"}', id, idempotency_key=key, result_ttl_s=LIFE_S)
            await self.queue.enqueue(entry)
        self.step = "wait for work"
        await self.queue.wait_bell(self._blocking, FINGERPRINT, 1.0)
        self.step = "claim"
        claimed = await self.queue.claim(WORKER, "n1", credit=1, fingerprint=FINGERPRINT, lease_s=LEASE_S)
        if [job.id for job in claimed.deliveries] != self._ids[:1]:
            raise CanaryFailed(f"the job that was enqueued did not come back, but {claimed}")
        (job,) = claimed.deliveries
        return job

    async def _speak(self, job: Delivery) -> None:
        self.step = "subscribe"
        async with self._hearing(job.id) as heard:
            self.step = "append"
            event = Event("tokens", 1, token_ids=(1,), text="tweet").encode()
            refused = await self.queue.append([Append(job.id, job.fence, 1, 1, [event], b"\0\0\0\0", 1)])
            if refused:
                raise CanaryFailed(f"refused: {refused[0].reason} {refused[0].text}")
            self.step = "publish"
            try:
                async with asyncio.timeout(HEARING_S):
                    said = await heard
            except TimeoutError:
                raise CanaryFailed("what was published on the job's channel was not heard") from None
            if said != event:
                raise CanaryFailed(f"heard {said!r} on the job's channel, which is not what was published")

    @contextlib.asynccontextmanager
    async def _hearing(self, id: JobId) -> AsyncIterator[asyncio.Task[bytes]]:
        """The first message on the job's channel, from the moment the subscription is confirmed."""
        async with contextlib.aclosing(self._listening.pubsub()) as pubsub:
            await pubsub.subscribe(self.queue.keys.tokens(id))
            await pubsub.get_message(timeout=HEARING_S)

            async def listen() -> bytes:
                while True:
                    message = await pubsub.get_message(ignore_subscribe_messages=True, timeout=HEARING_S)
                    if message is not None:
                        return bytes(message["data"])

            listening = asyncio.create_task(listen())
            try:
                yield listening
            finally:
                listening.cancel()
                await asyncio.wait([listening])

    async def _end(self, job: Delivery) -> None:
        self.step = "renew"
        if await self.queue.renew(LEASE_S, [Held(job.id, job.fence, job.band)]):
            raise CanaryFailed("the lease was lost at once")
        self.step = "finish"
        event = Event("finished", 2, usage=usage_of(1, 1)).encode()
        outcome = await self.queue.finish(Ending(job.id, job.fence, 2, 1, "finished", [event]))
        if outcome != "ok":
            raise CanaryFailed(f"the end was refused: {outcome}")
        self.step = "read the log"
        if len(await self.queue.read_log(job.id) or ()) != 2:
            raise CanaryFailed("the log does not hold what was written")
        self.step = "cancel"
        cancelled = await self.queue.cancel(self._ids[1])
        if cancelled.outcome != "cancelled":
            raise CanaryFailed(f"the answer was {cancelled.outcome}")

    async def _keep_house(self) -> None:
        self.step = "keep house"
        await self.queue.janitor(fingerprint=FINGERPRINT)
        await self.queue.fold(self._ids[0])
        await self.queue.epoch()
        await self.queue.dead(count=1)


def _is_forbidden(error: Exception) -> bool:
    """True for a missing right, whether a call met it or a script inside."""
    signs = ("NOPERM", "ACL failure in script", "user executing the script")
    return isinstance(error, redis.exceptions.NoPermissionError) or any(sign in str(error) for sign in signs)


async def check_rights(url: str, queue: str | None) -> Finding:
    """Walk the canary: in the shadow of `queue`, or of a queue that does not exist."""
    name = queue or f"doctor-{secrets.token_hex(6)}"
    clients = (connect_once(url), connect_blocking(url, block_s=1.0), connect_once(url))
    canary = Canary(*clients, name)
    try:
        await canary.walk()
        await canary.clean_up()
    except (redis.exceptions.RedisError, OSError, JitneyError) as error:
        with contextlib.suppress(redis.exceptions.RedisError, OSError):
            await canary.clean_up()
        tag = f"{{jitney:{queue or '*'}}}:*"
        rights = f"this user needs ~{tag} ~jitney:* &{tag} +@all -@dangerous -@admin (roles: ops/redis/users.acl)"
        if _is_forbidden(error):
            named = "" if queue else "; for a user of single queues, name one with --queue"
            return Finding("rights", "fail", f"could not {canary.step}: {error}", rights + named)
        return Finding(
            "rights", "fail", f"could not {canary.step}: {error}", rights if "publish" in canary.step else ""
        )
    finally:
        for client in clients:
            await client.aclose()
    where = f"beside queue {queue}" if queue else "on a queue of its own"
    return Finding("rights", "ok", f"a job {where} went all the way: enqueue, claim, append, finish, cancel")
