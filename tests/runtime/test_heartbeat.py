"""The heartbeat thread: it ends when it is told to, and does not die in silence."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

from tests.runtime.harness import LIVENESS_S

from jitney.embedded import EmbeddedServer
from jitney.keys import Fence, new_job_id
from jitney.queue import Held
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


def test_a_lease_is_known_by_its_claim_and_not_by_its_job() -> None:
    leases, job = Leases(), new_job_id("q")
    first, second = Held(job, Fence("a.1.1"), "interactive"), Held(job, Fence("a.2.1"), "interactive")
    leases.take(first)
    leases.take(second)
    assert leases.drop(first.fence) == job
    assert leases.drop(first.fence) is None
    assert leases.held() == [second]
