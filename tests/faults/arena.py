"""Where a fault happens: a server, APIs and workers as real processes, clients under load, and the ledger of it all."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.answers import Alone, Answer, Asked, Asking
from tests.faults.checker import Ending, Summary, always_finished, check
from tests.faults.children import Child
from tests.faults.hash_model import MAX_MODEL_LEN
from tests.faults.ledger import Ledger
from tests.faults.proxy import Proxy
from tests.faults.readers import HttpClient, PythonClient, ask
from tests.faults.sight import Sight

from jitney import AsyncClient
from jitney.cards import QueueCard, write_card
from jitney.connection import Redis, connect
from jitney.embedded import EmbeddedServer
from jitney.tasks import end_tasks

LEASE_S = 1.5
NUM_STREAMS, NUM_BULK = 40, 30


@dataclass(slots=True)
class Figures:
    """One row of the report: what the checker counted, and what the workers computed for it."""

    row: str
    summary: Summary
    num_sampled: int
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def duplicate_percent(self) -> float:
        """Tokens that were computed and never shown, because somebody computed them again (or nobody wanted them)."""
        shown = max(1, self.summary.num_tokens)
        return 100.0 * max(0, self.num_sampled - shown) / shown


@dataclass
class Arena(Sight):
    """Everything of one test. Processes die with it."""

    folder: Path
    tokenizer: Path
    alone: Alone
    server: EmbeddedServer
    queue_name: str
    ledger: Ledger
    lease_s: float = LEASE_S
    workers: dict[str, Child] = field(default_factory=dict)
    apis: dict[str, tuple[Child, int]] = field(default_factory=dict)
    answers: dict[str, Answer] = field(default_factory=dict)
    jobs: dict[str, str] = field(default_factory=dict)
    progress: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    reading: list[asyncio.Task[None]] = field(default_factory=list)
    http_clients: list[HttpClient] = field(default_factory=list)
    _clients: list[AsyncClient] = field(default_factory=list)
    _redis: Redis | None = None

    # --- processes ---

    @property
    def redis(self) -> Redis:
        """The tests' own view, past every proxy."""
        if self._redis is None:
            self._redis = connect(self.server.url, name="arena")
        return self._redis

    def redis_of(self, server: EmbeddedServer, *, timeout_s: float = 5.0) -> Redis:
        """Somebody else's connection. To be closed."""
        return connect(server.url, name="arena-other", timeout_s=timeout_s)

    async def now_at(self, server: EmbeddedServer) -> None:
        """The data is on another server from now on."""
        if self._redis is not None:
            await self._redis.aclose()
        self._redis, self.server = None, server

    def url(self, proxy: Proxy | None = None) -> str:
        return self.server.url.replace(f":{self.server.port}/", f":{proxy.port}/") if proxy else self.server.url

    async def start_worker(self, name: str, *options: str, proxy: Proxy | None = None, **flags: Any) -> Child:
        """One worker that is ready. flags: as `hash_worker`'s, `lease_s=1` for `--lease-s 1`."""
        child = await self.launch_worker(name, *options, proxy=proxy, **flags)
        await child.until("ready")
        return child

    async def launch_worker(
        self,
        name: str,
        *options: str,
        proxy: Proxy | None = None,
        environment: Mapping[str, str] | None = None,
        **flags: Any,
    ) -> Child:
        given = {"lease_s": self.lease_s, **flags}
        words = [word for flag, value in given.items() for word in (f"--{flag.replace('_', '-')}", str(value))]
        child = await Child.start(
            name,
            "tests.faults.hash_worker",
            *("--redis-url", self.url(proxy), "--queue", self.queue_name, "--id", name),
            *("--tokenizer", str(self.tokenizer), "--tally", str(self.folder / f"{name}.tally")),
            *words,
            *options,
            ledger=self.ledger,
            environment=environment,
        )
        self.workers[name] = child
        return child

    async def start_workers(
        self, *names: str, options: dict[str, list[str]] | None = None, **flags: Any
    ) -> list[Child]:
        asked = options or {}
        return await asyncio.gather(*(self.start_worker(name, *asked.get(name, ()), **flags) for name in names))

    @contextlib.asynccontextmanager
    async def kept_alive(self, *names: str, **flags: Any) -> AsyncIterator[None]:
        """Workers under a supervisor: one that ends, or says that it is stuck, is replaced."""

        async def supervise(name: str) -> None:
            for number in itertools.count():
                child = await self.launch_worker(f"{name}.{number}", **flags)
                await child.ended_or_says("engine_stuck")
                await child.finish_off()

        supervisors = [asyncio.create_task(supervise(name)) for name in names]
        try:
            yield
        finally:
            await end_tasks(supervisors)

    async def start_api(self, name: str = "api", *, proxy: Proxy | None = None, **settings: Any) -> Child:
        environment = {f"JITNEY_API__{key.upper()}": str(value) for key, value in settings.items()}
        child = await Child.start(
            name,
            "jitney",
            *("api", "--port", "0", "--redis-url", self.url(proxy)),
            ledger=self.ledger,
            environment=environment,
        )
        line = await child.until("ready api=")
        self.apis[name] = (child, int(line.rpartition(":")[2]))
        return child

    async def write_card(self) -> None:
        """The queue is known before any worker is there."""
        tokenizer = self.alone.tokenizer
        card = QueueCard(
            model="hash",
            max_model_len=MAX_MODEL_LEN,
            vocab_size=tokenizer.vocab_size,
            bytes_per_token=tokenizer.bytes_per_token,
            tokenizer_digest=tokenizer.digest,
        )
        await write_card(self.redis, self.queue_name, card)

    def client(self, proxy: Proxy | None = None) -> AsyncClient:
        client = AsyncClient(self.url(proxy), queue=self.queue_name)
        self._clients.append(client)
        return client

    async def aclose(self) -> None:
        for task in self.reading:
            task.cancel()
        await asyncio.gather(*self.reading, return_exceptions=True)
        for client in self._clients:
            await client.aclose()
        if self._redis is not None:
            await self._redis.aclose()
        children = [*self.workers.values(), *(child for child, _ in self.apis.values())]
        await asyncio.gather(*(child.finish_off() for child in children))
        self.ledger.close()

    # --- load ---

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

    async def follow(self, client: PythonClient | HttpClient, asked: Asked) -> str:
        """Submit, and read in a task of its own."""
        self.answers[asked.name] = self.alone.answer(asked)
        job_id = await client.submit(asked)
        self.read(client, asked, job_id)
        return job_id

    def read(self, client: PythonClient | HttpClient, asked: Asked, job_id: str) -> None:
        """One more reader of a job."""
        self.jobs[job_id] = asked.name

        def note(seq: int) -> None:
            self.progress[job_id] = max(self.progress[job_id], seq)

        self.reading.append(asyncio.create_task(client.read(asked, job_id, note), name=f"read {asked.name}"))

    async def told(self, wanted: Callable[[], bool], what: str) -> None:
        """Wait until the readers' progress is as wanted."""
        await self.until(lambda: _said(wanted()), what)

    async def streaming(self, least: int = 10, *, events: int = 3) -> None:
        """Wait until that many jobs have said that much: the middle of a run."""
        await self.told(
            lambda: sum(seq >= events for seq in self.progress.values()) >= least, f"{least} streams have begun"
        )

    async def finished(
        self,
        row: str,
        *,
        may_lose: bool = False,
        may_end_otherwise: Ending = always_finished,
        patience_s: float = 90,
        **notes: Any,
    ) -> Figures:
        """Wait for all readers, and judge. notes: evidence that the fault hit, for the report."""
        done, pending = await asyncio.wait(self.reading, timeout=patience_s)
        assert not pending, (
            f"still reading after {patience_s} s: {[t.get_name() for t in pending]} {await self.places()}"
        )
        for task in done:
            task.result()
        summary = check(self.ledger, self.answers, may_lose=may_lose, may_end_otherwise=may_end_otherwise)
        hits = {
            "takeovers": await self.num_takeovers(),
            "preemptions": self.num_preemptions(),
            "refused": summary.num_refused,
            "reconnects": summary.num_reconnects,
        }
        evidence = {name: number for name, number in hits.items() if number} | notes
        return Figures(row, summary, self.num_sampled(), evidence)


async def _said(answer: bool) -> bool:
    return answer


@contextlib.asynccontextmanager
async def arena(
    folder: Path, tokenizer: Path, server: EmbeddedServer, *, lease_s: float = LEASE_S
) -> AsyncIterator[Arena]:
    """A queue of its own on a server that runs; the ledger lies in the folder."""
    made = Arena(
        folder,
        tokenizer,
        Alone.of(tokenizer),
        server,
        f"q{secrets.token_hex(6)}",
        Ledger(folder / "ledger.jsonl"),
        lease_s,
    )
    try:
        yield made
    finally:
        await made.aclose()
