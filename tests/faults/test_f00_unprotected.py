"""The real system with one protection switched off at a time: the checker sees each of them gone.

Scripts are changed in the memory of the test's own workers; the product has no switch for any of this.
"""

from __future__ import annotations

import asyncio
import signal

import pytest
from tests.faults.answers import Asking
from tests.faults.arena import Arena
from tests.faults.checker import Violation
from tests.faults.conftest import MakeArena, ServerMaker
from tests.faults.readers import HttpClient

NO_FENCE = "append=fence == '' or has[1] ~= fence=>false"
NO_SEQ = "append=first ~= seq + 1=>false"
ANY_ID = "append=local id, event = int(first + j) .. '-0'=>local id, event = '*'"
NO_FENCE_AT_THE_END = "finish=local job, refusal = owned(id, fence)=>local job, refusal = load_job(id), {'gone'}"


def mutated(*mutations: str) -> list[str]:
    return [word for mutation in mutations for word in ("--mutate", mutation)]


async def test_without_fences_a_zombie_is_seen(field: Arena, seed: int) -> None:
    """As in F3, with a worker whose writes nobody checks."""
    zombie, *_ = await field.start_workers(
        "w1", "w2", "w3", options={"w1": ["--at", "before:append:15:stop", *mutated(NO_FENCE, NO_SEQ, ANY_ID)]}
    )
    await field.load(seed, asking=Asking(seed, (60, 120)))
    await zombie.until("at before:append")
    held = await field.owned_by("w1")
    await field.until(lambda: field.all_elsewhere(held, "w1"), "all jobs of w1 taken over")
    zombie.send(signal.SIGCONT)
    with pytest.raises((Violation, AssertionError), match=r"goes on at token|seq|still reading|gone|ended as failed"):
        await field.finished("no fences", patience_s=15)


async def test_without_the_log_a_resumed_answer_is_seen(field: Arena, seed: int) -> None:
    """A worker that publishes and does not write: whoever comes after it cannot know what was said."""
    no_log = "append=added = redis.pcall('XADD', log, 'NOMKSTREAM', id, 'e', event)=>added = id"
    victim, *_ = await field.start_workers("w1", "w2", options={"w1": ["--at", "decode:20:die", *mutated(no_log)]})
    await field.load(seed, num_streams=20, num_bulk=0)
    await victim.ended()
    with pytest.raises((Violation, AssertionError), match=r"ended as failed|gone|still reading"):
        await field.finished("no log", patience_s=15)


async def test_without_lease_expiry_a_dead_workers_jobs_are_missed(field: Arena, seed: int) -> None:
    blind = mutated("claim=leases, '-inf', NOW, 'LIMIT'=>leases, '-inf', -1, 'LIMIT'")
    victim, *_ = await field.start_workers("w1", "w2", options={"w1": ["--at", "decode:20:die", *blind], "w2": blind})
    await field.load(seed, num_streams=20, num_bulk=0)
    await victim.ended()
    with pytest.raises(AssertionError, match="still reading"):
        await field.finished("no expiry", patience_s=8)


async def test_without_fingerprints_another_model_is_heard(field: Arena, seed: int) -> None:
    """Two models under one name: the second goes on where the first died."""
    victim = await field.start_worker("w1", "--at", "decode:15:die")
    await field.load(seed, num_streams=20, num_bulk=0)
    await victim.ended()
    await field.start_worker("w2", salt=77)
    with pytest.raises(Violation, match="alone it says"):
        await field.finished("no fingerprints")


async def test_without_an_append_only_file_accepted_jobs_are_missed(
    make_arena: MakeArena, make_server: ServerMaker, seed: int
) -> None:
    server = make_server(appendfsync="always")
    async with make_arena(server) as field:
        await field.redis.config_set("appendonly", "no")
        await field.start_workers("w1", "w2")
        await field.load(seed, num_streams=20, num_bulk=0)
        await field.streaming()
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        with pytest.raises((Violation, AssertionError), match=r"told that it is gone|still reading"):
            await field.finished("no AOF", patience_s=20)


async def test_a_reader_that_comes_back_without_its_cursor_is_seen(
    field: Arena, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cursor is the reader's part of the bargain: without `Last-Event-ID` it is told everything again."""
    events = HttpClient._events
    monkeypatch.setattr(HttpClient, "_events", lambda self, tries, job_id, _cursor: events(self, tries, job_id, 0))
    await field.start_api("api2")
    await field.start_workers("w1")
    await field.load(seed, num_streams=10, num_bulk=0)
    await field.streaming(5)
    victim, _ = field.apis["api"]
    victim.send(signal.SIGKILL)
    await victim.ended()
    with pytest.raises(Violation, match="seq 1 where"):
        await field.finished("no cursor")
