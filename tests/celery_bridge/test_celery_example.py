"""`examples/celery_app` as its README runs it; and 300 of its tasks held by one process at once."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from celery import chord
from tests.celery_bridge.celery_programs import ROOT, Worker, running
from tests.celery_bridge.conftest import Batch, got, until

EXAMPLE = ROOT / "examples" / "celery_app"
NUM_TASKS = 300


@pytest.fixture(scope="module")
def shop(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    schedule = tmp_path_factory.mktemp("beat") / "schedule"
    options = ("-P", "threads", "-c", "4", "-B", "-s", str(schedule))
    with running(redis_url, *options, module="shop", cwd=EXAMPLE, SHOP_REDIS_URL=redis_url) as worker:
        yield worker


async def test_the_celery_example_runs(shop: Worker, answering: Batch, redis_url: str) -> None:
    ran = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "produce.py"],
        cwd=EXAMPLE,
        env={**os.environ, "SHOP_REDIS_URL": redis_url},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ran.returncode == 0, ran.stderr
    one, whole, together = ran.stdout.splitlines()[-3:]
    assert one.startswith("one: IS THIS REVIEW GOOD OR BAD?")
    assert whole.startswith("chain: SUM UP:")
    assert together == "chord: 3 answers, 3 tokens"


async def test_one_celery_process_holds_three_hundred_tasks_at_once(app: Any, shop: Worker, batch: Batch) -> None:
    ask, join = app.signature("jitney.generate"), app.signature("shop.join")
    sent = chord([ask.clone(args=[f"review {number}"]) for number in range(NUM_TASKS)], join)()
    turns = await batch.turns(NUM_TASKS)
    assert {turn.spec.prompt for turn in turns} == {f"review {number}" for number in range(NUM_TASKS)}
    # All of them are running jobs now, and none has ended; the process has its few threads, and beat's one child.
    [stats] = app.control.inspect(timeout=30.0, limit=1).stats().values()
    assert stats["jitney"]["held"] == NUM_TASKS
    assert len(os.listdir(f"/proc/{shop.process.pid}/task")) < 40
    await asyncio.gather(*(turn.start() for turn in turns))
    await asyncio.gather(*(turn.finish(str(turn.spec.prompt).upper()) for turn in turns))
    joined = await got(sent)
    assert joined["texts"] == [f"REVIEW {number}" for number in range(NUM_TASKS)]
    assert joined["tokens"] == NUM_TASKS
    await until(lambda: _none_held(app))


def _none_held(app: Any) -> bool:
    [stats] = app.control.inspect(timeout=30.0, limit=1).stats().values()
    return bool(stats["jitney"]["held"] == 0)
