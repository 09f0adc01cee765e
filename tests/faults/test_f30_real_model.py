"""F1, F3, F4 with a real model: `jitney worker` itself on SmolLM2 in float32, in the long form alone.

What a run alone says is taken from one undisturbed worker, the same requests one after the other.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator

import pytest
from tests.faults.answers import WORDS, Answer, Asked
from tests.faults.arena import Arena
from tests.faults.children import Child
from tests.faults.conftest import MakeArena, Report, ServerMaker
from tests.faults.readers import PythonClient

from jitney import AsyncClient

MODEL = os.environ.get("JITNEY_FAULT_MODEL", "")
LEASE_S = 6.0
NUM_STREAMS = 10

pytestmark = [
    pytest.mark.skipif(not MODEL, reason="JITNEY_FAULT_MODEL names no model"),
    pytest.mark.timeout(600),
]


async def start(field: Arena, name: str) -> Child:
    child = await Child.start(
        name,
        "jitney",
        *("worker", "--model", MODEL, "--queue", field.queue_name, "--redis-url", field.server.url),
        *("--dtype", "float32", "--lease-s", str(LEASE_S), "--max-num-seqs", "16", "--num-kv-blocks", "256"),
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


@pytest.fixture
async def field(make_arena: MakeArena, make_server: ServerMaker, seed: int) -> AsyncIterator[tuple[Arena, list[Asked]]]:
    """Two workers, and the answers of the first one while it was alone."""
    async with make_arena(make_server()) as made:
        await start(made, "w1")
        asked = requests(seed)
        for one in asked:
            made.answers[one.name] = await alone(made.client(), one)
        await start(made, "w2")
        yield made, asked


async def begin(field: Arena, asked: list[Asked]) -> None:
    python = PythonClient(field.client(), field.ledger)
    for one in asked:
        field.read(python, one, await python.submit(one))
    await field.streaming(6, events=5)


async def test_f1_a_killed_worker_with_a_real_model(
    field: tuple[Arena, list[Asked]], seed: int, report: Report
) -> None:
    arena, asked = field
    await begin(arena, asked)
    held = await arena.owned_by("w1")
    arena.workers["w1"].send(signal.SIGKILL)
    assert report(await arena.finished(f"F1 real #{seed}", patience_s=300)).summary.num_finished == NUM_STREAMS
    assert held
    assert await arena.num_takeovers() > 0


async def test_f3_a_zombie_with_a_real_model(field: tuple[Arena, list[Asked]], seed: int, report: Report) -> None:
    arena, asked = field
    await begin(arena, asked)
    held = await arena.owned_by("w1")
    arena.workers["w1"].send(signal.SIGSTOP)
    await arena.until(lambda: arena.all_elsewhere(held, "w1"), "all jobs of w1 taken over")
    arena.workers["w1"].send(signal.SIGCONT)
    assert report(await arena.finished(f"F3 real #{seed}", patience_s=300)).summary.num_finished == NUM_STREAMS
    assert held


async def test_f4_a_hand_over_with_a_real_model(field: tuple[Arena, list[Asked]], seed: int, report: Report) -> None:
    arena, asked = field
    await begin(arena, asked)
    held = await arena.owned_by("w1")
    arena.workers["w1"].send(signal.SIGTERM)
    assert await arena.workers["w1"].ended() == 0
    assert report(await arena.finished(f"F4 real #{seed}", patience_s=300)).summary.num_finished == NUM_STREAMS
    assert held
    assert await arena.num_takeovers() == 0
