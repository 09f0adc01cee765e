"""The heartbeat thread: it ends when it is told to, and does not die in silence."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

from tests.runtime.harness import LIVENESS_S

from jitney.connection import Redis
from jitney.embedded import EmbeddedServer
from jitney.keys import Fence, new_job_id
from jitney.queue import Entry, Held, Queue
from jitney_worker.runtime.heartbeat import Heartbeat, Leases
from jitney_worker.settings import LeaseSection


def heartbeat(
    url: str, leases: Leases, is_stuck: Callable[[], bool], on_broken: Callable[[Exception], None]
) -> Heartbeat:
    section = LeaseSection(duration_s=3_600)
    return Heartbeat(url, "q", leases, section, is_stuck=is_stuck, on_lost=lambda _: None, on_broken=on_broken)


async def test_a_heartbeat_that_breaks_says_so() -> None:
    loop, told = asyncio.get_running_loop(), asyncio.Event()

    def is_stuck() -> bool:
        raise RuntimeError("something nobody thought of")

    thread = heartbeat("redis://127.0.0.1:1/0", Leases(), is_stuck, lambda _: loop.call_soon_threadsafe(told.set))
    thread.start()
    await asyncio.wait_for(told.wait(), LIVENESS_S)
    thread.join(LIVENESS_S)
    thread.stop()  # too late, and no harm
    assert not thread.is_alive()


async def test_a_heartbeat_is_stopped_while_a_renewal_hangs(tmp_path: Path) -> None:
    """Its own timeout is a third of a lease: nobody waits so long for a worker to end."""
    leases, broken = Leases(), list[Exception]()
    leases.take(Held(new_job_id("q"), Fence("a.1.1"), "interactive"))
    with EmbeddedServer(tmp_path) as server:
        os.kill(server.pid, signal.SIGSTOP)
        try:
            thread = heartbeat(server.url, leases, lambda: False, broken.append)
            thread.start()
            thread.stop()
            await asyncio.to_thread(thread.join, LIVENESS_S)
            assert not thread.is_alive()
        finally:
            os.kill(server.pid, signal.SIGCONT)
    assert broken == []


async def test_while_the_engine_is_stuck_nothing_is_renewed_and_what_is_held_is_given_up(
    redis: Redis, redis_url: str, queue_name: str
) -> None:
    """Whatever the event loop does about it: it may be what hangs."""
    queue, job_id = Queue(redis, queue_name), new_job_id(queue_name)
    await queue.enqueue(Entry(job_id, b"{}", digest="d"))
    (delivery,) = (await queue.claim("w", "n1", credit=1, fingerprint="f", lease_s=60)).deliveries
    expiry = await redis.zscore(queue.keys.leases("interactive"), job_id)
    leases, lost, loop = Leases(), asyncio.Queue[set[Fence]](), asyncio.get_running_loop()
    leases.take(Held(job_id, delivery.fence, "interactive"))

    def tell(fences: set[Fence]) -> None:
        loop.call_soon_threadsafe(lost.put_nowait, fences)

    thread = Heartbeat(
        redis_url,
        queue_name,
        leases,
        LeaseSection(duration_s=0.5),
        is_stuck=lambda: True,
        on_lost=tell,
        on_broken=lambda _: None,
    )
    thread.start()
    assert await asyncio.wait_for(lost.get(), LIVENESS_S) == {delivery.fence}
    thread.stop()
    await asyncio.to_thread(thread.join, LIVENESS_S)
    assert await redis.zscore(queue.keys.leases("interactive"), job_id) == expiry


def test_a_lease_is_known_by_its_claim_and_not_by_its_job() -> None:
    leases, job = Leases(), new_job_id("q")
    first, second = Held(job, Fence("a.1.1"), "interactive"), Held(job, Fence("a.2.1"), "interactive")
    leases.take(first)
    leases.take(second)
    assert leases.drop(first.fence) == job
    assert leases.drop(first.fence) is None
    assert leases.held() == [second]
