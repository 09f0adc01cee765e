"""B08: near a full cache for as long as you like: never does everybody wait while nobody runs.

JITNEY_SOAK_S: for how long; 600 is the long form of the case.
"""

from __future__ import annotations

import asyncio
import os
import random
from typing import Any

import pytest
from tests.cases.paces import Paced
from tests.runtime.harness import LIVENESS_S, StartWorker, expected

from jitney import AsyncClient
from jitney.connection import Redis
from jitney.tasks import end_tasks
from jitney.workers import list_workers

SOAK_S = float(os.environ.get("JITNEY_SOAK_S", "6"))
MAX_STALL_S = 5.0
NUM_CLIENTS = 24
TIGHT = {"max_num_seqs": 16, "num_blocks": 40, "max_num_batched_tokens": 64, "check": False}
"""640 tokens for sixteen answers of up to 400: the cache is full from the first second to the last."""


@pytest.mark.timeout(SOAK_S + 60)
async def test_near_a_full_cache_somebody_always_runs(
    start_worker: StartWorker, client: AsyncClient, redis: Redis, queue_name: str
) -> None:
    """B08: mixed lengths, with and without prefixes that others share; what waits while nobody runs is a stall."""
    clock, chance, paced = asyncio.get_running_loop().time, random.Random(8), Paced(0.002)
    end = clock() + SOAK_S
    num_answers, longest_stall_s = 0, 0.0

    async def ask(number: int) -> None:
        nonlocal num_answers
        while clock() < end:
            start = [7, 8, 9] * chance.choice((0, 0, 10, 40))
            prompt = [*start, 10 + number, *(chance.randrange(3, 90) for _ in range(chance.choice((1, 5, 40, 150))))]
            max_tokens = chance.choice((1, 8, 30, 120))
            options: dict[str, Any] = {"priority": chance.randint(0, 2), "band": chance.choice(("interactive", "bulk"))}
            job = await client.enqueue(prompt, max_tokens=max_tokens, ignore_eos=True, **options)
            assert (await job.result(LIVENESS_S)).token_ids == expected(prompt, max_tokens)
            num_answers += 1

    async def watch() -> None:
        nonlocal longest_stall_s
        stalled_since: float | None = None
        while True:
            for view in await list_workers(redis, queue_name):
                is_stalled = view.num_running == 0 and view.num_waiting > 0
                stalled_since = (stalled_since or clock()) if is_stalled else None
                assert view.state == "ready"
                longest_stall_s = max(longest_stall_s, clock() - stalled_since if stalled_since is not None else 0.0)

    async with start_worker(paced, engine=TIGHT, worker={"snapshot_every_s": 0.02}):
        watching = asyncio.create_task(watch())
        await asyncio.gather(*(ask(number) for number in range(NUM_CLIENTS)))
        assert not watching.done(), watching.exception()
        await end_tasks([watching])
        (view,) = await list_workers(redis, queue_name)
    assert longest_stall_s < MAX_STALL_S
    assert view.num_preemptions > 0, "the cache was large enough: the test proves nothing"
    assert num_answers > NUM_CLIENTS
