"""The load of a run: who asks, who reads, and the judgement when all have read to the end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.faults.answers import Asked, Asking
from tests.faults.audit import audit
from tests.faults.checker import Ending, Violation, always_finished, check
from tests.faults.proxy import Proxy
from tests.faults.pulse import LOOK_AGAIN_S, Pulse
from tests.faults.readers import HttpClient, PythonClient, ask
from tests.faults.report import Figures
from tests.faults.sight import Sight

from jitney import AsyncClient
from jitney.tasks import end_tasks

NUM_STREAMS, NUM_BULK = 40, 30

PATIENCE_S = 300.0
"""A run that takes so long hangs: this is no measure of speed, on any machine."""


@dataclass
class Crowd(Sight):
    """Clients of both kinds."""

    reading: list[asyncio.Task[None]] = field(default_factory=list)
    http_clients: list[HttpClient] = field(default_factory=list)
    _clients: list[AsyncClient] = field(default_factory=list)
    _audited: set[str] = field(default_factory=set)
    _listeners: dict[str, Pulse] = field(default_factory=lambda: defaultdict(Pulse))

    def client(self, proxy: Proxy | None = None) -> AsyncClient:
        client = AsyncClient(self.url(proxy), queue=self.queue_name)
        self._clients.append(client)
        return client

    def http(self, reader: str = "http") -> HttpClient:
        client = HttpClient(self.ports, self.queue_name, self.ledger, reader)
        self.http_clients.append(client)
        return client

    async def http_status(self, asked: Asked) -> int:
        """What `POST /v1/jobs` answers, once."""
        answer = await ask(self.ports()[0], "POST", "/v1/jobs", {"model": self.queue_name, **asked.fields})
        await answer.close()
        return answer.status

    def num_keep_alives(self) -> int:
        return sum(client.num_keep_alives for client in self.http_clients)

    def ports(self) -> list[int]:
        return [port for child, port in self.apis.values() if child.is_alive]

    async def load(
        self,
        seed: int,
        *,
        num_streams: int = NUM_STREAMS,
        num_bulk: int = NUM_BULK,
        client: AsyncClient | None = None,
        asking: Asking | None = None,
        one_by_one: bool = False,
    ) -> list[str]:
        """Streams, every other one over HTTP, and bulk jobs: all of them are accepted when this returns their ids."""
        asking = asking or Asking(seed)
        made = client or self.client()
        python, http = PythonClient(made, self.ledger), self.http()
        streams = asking.some(num_streams)
        bulk = asking.some(num_bulk, band="bulk")
        over_http = set(range(1, num_streams, 2)) if self.apis else set()
        work = [self.follow(http if i in over_http else python, asked) for i, asked in enumerate(streams)]
        work += [self.follow(python, asked) for asked in bulk]
        if one_by_one:
            return [await one for one in work]
        return list(await asyncio.gather(*work))

    @contextlib.asynccontextmanager
    async def steady_load(
        self, asking: Asking, *, num_streams: int = NUM_STREAMS, client: AsyncClient | None = None
    ) -> AsyncIterator[None]:
        """So many open streams at any time inside, however slow or fast it goes: for each that ends another begins."""
        python, http = PythonClient(client or self.client(), self.ledger), self.http()
        clients: Iterator[PythonClient | HttpClient] = itertools.cycle([python, http] if self.apis else [python])
        is_over = asyncio.Event()

        async def feed() -> None:
            while not is_over.is_set():
                num_open = sum(not task.done() for task in self.reading)
                await asyncio.gather(*(self.follow(next(clients), asking.one()) for _ in range(num_streams - num_open)))
                await self.reader_pulse.wait()

        feeding = asyncio.create_task(feed(), name="feeding")
        try:
            yield
        finally:
            is_over.set()
            await feeding

    async def follow(self, client: PythonClient | HttpClient, asked: Asked) -> str:
        """Submit, and read in a task of its own."""
        self.answers[asked.name] = self.alone.answer(asked)
        async with asyncio.timeout(PATIENCE_S):
            job_id = await client.submit(asked)
        self.read(client, asked, job_id)
        return job_id

    def read(self, client: PythonClient | HttpClient, asked: Asked, job_id: str) -> None:
        """One more reader of a job."""
        self.jobs[job_id] = asked.name

        def note(seq: int) -> None:
            self.progress[job_id] = max(self.progress[job_id], seq)
            self.reader_pulse.beat()
            self._listeners[job_id].beat()

        self.reading.append(asyncio.create_task(client.read(asked, job_id, note), name=f"read {asked.name}"))

    async def heard(self, job_id: str, seq: int) -> None:
        """Wait until a reader of this job has been given `seq`, or has come to the end."""
        tasks = [task for task in self.reading if task.get_name() == f"read {self.jobs[job_id]}"]
        async with asyncio.timeout(PATIENCE_S):
            while self.progress[job_id] < seq and not all(task.done() for task in tasks):
                await self._listeners[job_id].wait()

    async def streaming(self, least: int = 10, *, events: int = 3) -> None:
        """Wait until that many jobs have said that much: the middle of a run."""
        await self.told(
            lambda: sum(seq >= events for seq in self.progress.values()) >= least, f"{least} streams have begun"
        )

    async def more_events(self, count: int) -> None:
        """Wait until the readers have been told so many more events."""
        wanted = sum(self.progress.values()) + count
        await self.told(lambda: sum(self.progress.values()) >= wanted, f"{count} more events")

    async def finished(
        self,
        row: str,
        *,
        may_lose: bool = False,
        may_end_otherwise: Ending = always_finished,
        patience_s: float = PATIENCE_S,
        **notes: Any,
    ) -> Figures:
        """Wait for all readers, and judge. notes: evidence that the fault hit, for the report."""
        done, pending = await asyncio.wait(self.reading, timeout=patience_s)
        assert not pending, (
            f"still reading after {patience_s} s: {[t.get_name() for t in pending]} {await self.places()}"
        )
        for task in done:
            task.result()
        if not may_lose:  # what a server has lost cannot be compared
            await audit(self.queue, self.ledger, self.jobs, self._audited)
        summary = check(self.ledger, self.answers, may_lose=may_lose, may_end_otherwise=may_end_otherwise)
        return Figures(
            row,
            summary,
            lease_s=self.lease_s,
            num_sampled=self.num_sampled(),
            num_takeovers=await self.num_takeovers(),
            num_late_writes=self.num_late_writes(),
            num_preemptions=self.num_preemptions(),
            notes=notes,
        )

    @contextlib.asynccontextmanager
    async def silent(self, jobs: Iterable[str]) -> AsyncIterator[None]:
        """Raises Violation if the log of one of these jobs grows inside, while its owner stands still."""
        before = {job_id: (await self.status(job_id)).seq for job_id in jobs}
        yield
        after = {job_id: (await self.status(job_id)).seq for job_id in before}
        grown = [
            f"{job_id}: {seq} events became {after[job_id]}" for job_id, seq in before.items() if seq != after[job_id]
        ]
        if grown:
            raise Violation([f"{line} while its owner stood still" for line in grown])

    async def violation(self) -> Violation:
        """The first thing wrong that no waiting could mend. Raises AssertionError if everybody ends well."""
        async with asyncio.timeout(PATIENCE_S):
            while any(not task.done() for task in self.reading):
                try:
                    check(self.ledger, self.answers, so_far=True)
                except Violation as found:
                    return found
                await asyncio.wait(self.reading, timeout=LOOK_AGAIN_S)
        try:
            await self.finished("violated")
        except Violation as found:
            return found
        raise AssertionError("nothing was wrong")

    async def close_readers(self) -> None:
        await end_tasks(self.reading)
        for client in self._clients:
            await client.aclose()
