"""F14: a cache that is full, a step that finds no memory, and a worker that has none left at all."""

from __future__ import annotations

from tests.faults.answers import Asking
from tests.faults.arena import Arena
from tests.faults.conftest import Report


async def test_f14_a_full_cache_preempts_and_changes_no_answer(field: Arena, seed: int, report: Report) -> None:
    await field.start_workers("w1", "w2", num_blocks=36)
    await field.load(seed, num_streams=20, num_bulk=10, asking=Asking(seed, (60, 200)))
    figures = report(await field.finished(f"F14 36 blocks #{seed}"))
    assert figures.summary.num_finished == 30
    assert field.num_preemptions() > 0
    await field.rests()


async def test_f14_a_step_without_memory_loses_no_job(field: Arena, seed: int, report: Report) -> None:
    worker, *_ = await field.start_workers("w1", "w2", options={"w1": ["--at", "decode:10:raise"]})
    await field.load(seed)
    await worker.until("at decode:10")
    assert report(await field.finished(f"F14 no memory #{seed}")).summary.num_finished == 70
    assert worker.is_alive
    assert await field.num_takeovers() > 0
    await field.rests()


async def test_f14_a_worker_whose_memory_is_exhausted_is_replaced_and_nothing_is_lost(
    field: Arena, seed: int, report: Report
) -> None:
    """RLIMIT_AS: from one step on every thread of it meets MemoryError, wherever it happens to be."""
    starving = ["--at", "decode:15:starve"]
    async with field.kept_alive("w1", options=starving, stall_after_s=2 * field.lease_s):
        await field.start_workers("w2", "w3")
        await field.load(seed, asking=Asking(seed, (60, 120)))
        await field.told(lambda: bool(field.workers["w1.0"].said("at decode:15")), "w1 has no memory left")
        figures = report(await field.finished(f"F14 RLIMIT_AS #{seed}"))
        assert figures.summary.num_finished == 70
        assert figures.num_takeovers > 0
        assert len(field.workers) > 3, "nobody took the place of the one without memory"
        await field.rests()
