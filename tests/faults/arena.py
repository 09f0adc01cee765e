"""Where a fault happens: a server, APIs and workers as real processes, clients under load, and the ledger of it all."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from tests.faults.answers import Alone
from tests.faults.children import Child
from tests.faults.crowd import Crowd
from tests.faults.hash_model import MAX_MODEL_LEN
from tests.faults.ledger import Ledger
from tests.faults.pace import measured
from tests.faults.proxy import Proxy

from jitney.cards import QueueCard, write_card
from jitney.embedded import EmbeddedServer
from jitney.tasks import end_tasks


@dataclass
class Arena(Crowd):
    """Everything of one test. Processes die with it."""

    worker_module: ClassVar[str] = "tests.faults.hash_worker"

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
        given = {**self.worker_flags(), **flags}
        child = await Child.start(
            name,
            self.worker_module,
            *("--redis-url", self.url(proxy), "--queue", self.queue_name, "--id", name),
            *("--tally", str(self.folder / f"{name}.tally")),
            *(word for flag, value in given.items() for word in (f"--{flag.replace('_', '-')}", str(value))),
            *options,
            ledger=self.ledger,
            environment=environment,
        )
        self.workers[name] = child
        return child

    def worker_flags(self) -> dict[str, Any]:
        """What every worker is told unless a test says otherwise."""
        return {"tokenizer": self.tokenizer, "lease_s": self.lease_s, "step_s": self.step_s}

    async def start_workers(
        self, *names: str, options: dict[str, list[str]] | None = None, **flags: Any
    ) -> list[Child]:
        asked = options or {}
        return await asyncio.gather(*(self.start_worker(name, *asked.get(name, ()), **flags) for name in names))

    @contextlib.asynccontextmanager
    async def kept_alive(self, *names: str, options: Sequence[str] = (), **flags: Any) -> AsyncIterator[None]:
        """Workers under a supervisor: one that ends, or says that it is stuck, is replaced. options: of all of them."""

        async def supervise(name: str) -> None:
            for number in itertools.count():
                child = await self.launch_worker(f"{name}.{number}", *options, **flags)
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

    async def aclose(self) -> None:
        await self.close_readers()
        await self.close_views()
        children = [*self.workers.values(), *(child for child, _ in self.apis.values())]
        await asyncio.gather(*(child.finish_off() for child in children))
        self.ledger.close()


@contextlib.asynccontextmanager
async def arena(
    folder: Path, tokenizer: Path, server: EmbeddedServer, *, lease_s: float | None = None
) -> AsyncIterator[Arena]:
    """A queue of its own on a server that runs; the ledger lies in the folder. lease_s: absent = by the pace."""
    pace = measured()
    made = Arena(
        folder,
        tokenizer,
        Alone.of(tokenizer),
        server,
        f"q{secrets.token_hex(6)}",
        Ledger(folder / "ledger.jsonl"),
        lease_s or pace.lease_s,
        pace.step_s,
    )
    try:
        yield made
    finally:
        await made.aclose()
