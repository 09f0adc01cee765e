"""F19: a thousand cancels, each at a moment of its own, in a crowd of short jobs."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field

from tests.faults.answers import Asked, Asking
from tests.faults.arena import Arena
from tests.faults.conftest import Report
from tests.faults.readers import HttpClient, PythonClient, ask

NUM_CANCELS = 1_000
NUM_NEIGHBOURS = 100
NUM_AT_ONCE = 120


@dataclass(slots=True)
class Cancelling:
    """Asks, waits for a moment, cancels, reads to the end. num_ended: jobs that a cancel ended."""

    arena: Arena
    chance: random.Random
    open: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(NUM_AT_ONCE))
    num_ended: int = 0

    def moment(self, asked: Asked) -> int:
        """A seq: none, any, the last but one, or the terminal one."""
        last = self.arena.alone.answer(asked).num_tokens + 2
        somewhere = self.chance.randint(1, last)
        return self.chance.choice((0, somewhere, somewhere, somewhere, last - 1, last))

    async def cancelled(self, client: PythonClient | HttpClient, asked: Asked) -> None:
        async with self.open:
            is_later = self.chance.random() < 0.05
            if is_later:
                asked.fields["not_before"] = time.time() + 86_400
            job_id = await self.arena.follow(client, asked)
            reading = self.arena.reading[-1]
            await self.arena.heard(job_id, 0 if is_later else self.moment(asked))
            has_ended = await self._cancel(client, job_id)
            self.num_ended += has_ended
            await reading

    async def let_alone(self, client: PythonClient | HttpClient, asked: Asked) -> None:
        async with self.open:
            await self.arena.follow(client, asked)
            await self.arena.reading[-1]

    async def _cancel(self, client: PythonClient | HttpClient, job_id: str) -> bool:
        if isinstance(client, PythonClient):
            return await client.client.job(job_id).cancel()
        answer = await ask(self.arena.ports()[0], "DELETE", f"/v1/jobs/{job_id}")
        assert answer.status == 200
        said = await answer.json()
        await answer.close()
        assert said["status"] in ("cancelled", "finished"), said
        return bool(said["status"] == "cancelled")


async def test_f19_a_thousand_cancels_are_a_thousand_endings_and_nobody_computes_on(
    field: Arena, seed: int, report: Report
) -> None:
    """Some before anybody claimed, some in the middle, some on the very last event, and some after it.

    Among them jobs that nobody cancels: those say what they say alone. Workers count the steps that they compute for
    a sequence after they have let go of it (`witness`).
    """
    workers = await field.start_workers("w1", "w2", seats=24, max_num_batched_tokens=256)
    cancelling = Cancelling(field, random.Random(seed))
    asking = Asking(seed, (10, 60))
    clients: list[PythonClient | HttpClient] = [PythonClient(field.client(), field.ledger), field.http()]
    work = [cancelling.cancelled(clients[number % 2], asking.one()) for number in range(NUM_CANCELS)]
    work += [cancelling.let_alone(clients[number % 2], asking.one()) for number in range(NUM_NEIGHBOURS)]
    cancelling.chance.shuffle(work)
    await asyncio.gather(*work)
    figures = report(
        await field.finished(
            f"F19 {NUM_CANCELS} cancels #{seed}",
            may_end_otherwise=lambda _name, end: end.type == "cancelled",
            cancelled=cancelling.num_ended,
        )
    )
    summary = figures.summary
    assert summary.num_finished + summary.num_otherwise == NUM_CANCELS + NUM_NEIGHBOURS
    assert summary.num_otherwise == cancelling.num_ended
    assert summary.num_otherwise > NUM_CANCELS // 10
    assert summary.num_finished > NUM_NEIGHBOURS
    assert [line for worker in workers for line in worker.said("late ")] == []
    assert sum(len(worker.said("let go ")) for worker in workers) > NUM_CANCELS // 20, "hardly any was running"
    await field.rests()
