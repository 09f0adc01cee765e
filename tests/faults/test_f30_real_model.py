"""F1, F3, F4 with a real model: `jitney worker` itself on SmolLM2, in the long form alone.

What a run alone says is taken from one undisturbed worker, the same requests one after the other. In float32 every
answer must be that one. In bfloat16 rounding may decide between two tokens that are nearly equal, and does so
differently in a prefill and in a decode step: how many answers are equal is reported, and everything else (each token
once, in order, one ending, one bill) is judged as in any row.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from tests.faults.answers import WORDS, Answer, Asked
from tests.faults.arena import Arena
from tests.faults.children import Child
from tests.faults.conftest import MakeArena, Report, ServerMaker
from tests.faults.readers import PythonClient
from tests.faults.report import Figures

from jitney import AsyncClient

MODEL = os.environ.get("JITNEY_FAULT_MODEL", "")
LEASES_OF_OTHER_ROWS = 4
"""How much longer the leases are: a step of a real model takes longer than one of a hash."""

PATIENCE_S = 1_500.0
NUM_STREAMS = 10
DTYPES = ("float32", "bfloat16")

pytestmark = [
    pytest.mark.skipif(not MODEL, reason="JITNEY_FAULT_MODEL names no model"),
    pytest.mark.timeout(1_800),
]


async def start(field: Arena, name: str, dtype: str) -> Child:
    child = await Child.start(
        name,
        "jitney",
        *("worker", "--model", MODEL, "--queue", field.queue_name, "--redis-url", field.server.url),
        *("--dtype", dtype, "--lease-s", str(field.lease_s), "--max-num-seqs", "16", "--num-kv-blocks", "256"),
        *("--num-threads", "1", "--offline"),
        ledger=field.ledger,
        environment={"JITNEY_WORKER__ID": name, "JITNEY_WORKER__DRAIN_TIMEOUT_S": "0.1"},
    )
    field.workers[name] = child
    await child.until("ready")
    return child


def requests(seed: int) -> list[Asked]:
    made = []
    for number in range(NUM_STREAMS):
        words = " ".join(WORDS[(number + seed) % 7 :])
        sampled = {"temperature": 0.0} if number % 2 else {"temperature": 0.8, "seed": seed * 100 + number}
        made.append(Asked(f"real-{seed}-{number}", {"prompt": f"{number} {words}", "max_tokens": 40, **sampled}))
    return made


async def alone(client: AsyncClient, asked: Asked) -> Answer:
    result = await client.generate(**asked.fields)
    assert result.finish_reason is not None
    return Answer(result.token_ids, result.text, result.finish_reason, result.usage["prompt_tokens"])


@dataclass(frozen=True, slots=True)
class Real:
    """Two workers on the real model, and the answers of the first one while it was alone."""

    arena: Arena
    asked: list[Asked]
    dtype: str

    async def judged(self, row: str) -> Figures:
        """In bfloat16 the words are not judged, but counted: how many answers are those of a run alone."""
        await asyncio.wait(self.arena.reading, timeout=PATIENCE_S)
        num_equal = sum(self._is_equal(job_id) for job_id in self.arena.jobs)
        if self.dtype != "float32":
            for job_id, name in self.arena.jobs.items():
                self.arena.answers[name] = self._told(job_id)
        return await self.arena.finished(f"{row}, {self.dtype}", equal=f"{num_equal} of {len(self.arena.jobs)}")

    def _is_equal(self, job_id: str) -> bool:
        return self._told(job_id) == self.arena.answers[self.arena.jobs[job_id]]

    def _told(self, job_id: str) -> Answer:
        events = [line.event for line in self.arena.ledger.of("event") if line.job == job_id]
        token_ids = tuple(token_id for event in events for token_id in event.token_ids)
        reason = next((event.finish_reason for event in events if event.finish_reason), "")
        num_prompt_tokens = (events[-1].usage or {})["prompt_tokens"]
        return Answer(token_ids, "".join(event.text for event in events), reason, num_prompt_tokens)


@pytest.fixture(params=DTYPES)
async def real(
    request: pytest.FixtureRequest, make_arena: MakeArena, make_server: ServerMaker, seed: int
) -> AsyncIterator[Real]:
    async with make_arena(make_server()) as arena:
        arena.lease_s *= LEASES_OF_OTHER_ROWS
        await start(arena, "w1", request.param)
        asked = requests(seed)
        for one in asked:
            arena.answers[one.name] = await alone(arena.client(), one)
        await start(arena, "w2", request.param)
        yield Real(arena, asked, request.param)


async def begun(real: Real) -> set[str]:
    """All streams; jobs that w1 holds when most have begun."""
    arena = real.arena
    python = PythonClient(arena.client(), arena.ledger)
    for one in real.asked:
        arena.read(python, one, await python.submit(one))
    await arena.streaming(6, events=5)
    held = await arena.owned_by("w1")
    assert held
    return held


async def test_f1_a_killed_worker_with_a_real_model(real: Real, seed: int, report: Report) -> None:
    await begun(real)
    real.arena.workers["w1"].send(signal.SIGKILL)
    figures = report(await real.judged(f"F1 real #{seed}"))
    assert figures.summary.num_finished == NUM_STREAMS
    assert figures.num_takeovers > 0


async def test_f3_a_zombie_with_a_real_model(real: Real, seed: int, report: Report) -> None:
    held = await begun(real)
    real.arena.workers["w1"].send(signal.SIGSTOP)
    await real.arena.until(lambda: real.arena.all_elsewhere(held, "w1"), "all jobs of w1 taken over")
    real.arena.workers["w1"].send(signal.SIGCONT)
    figures = report(await real.judged(f"F3 real #{seed}"))
    assert figures.summary.num_finished == NUM_STREAMS
    assert figures.num_takeovers > 0


async def test_f4_a_hand_over_with_a_real_model(real: Real, seed: int, report: Report) -> None:
    await begun(real)
    real.arena.workers["w1"].send(signal.SIGTERM)
    assert await real.arena.workers["w1"].ended() == 0
    figures = report(await real.judged(f"F4 real #{seed}"))
    assert figures.summary.num_finished == NUM_STREAMS
    assert figures.num_takeovers == 0
