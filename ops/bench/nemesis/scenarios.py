"""What is done to the service while the load is on."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

from tests.faults.arena import Arena
from tests.faults.children import Child

WORKERS = ("w1", "w2", "w3")


@dataclass(slots=True)
class Stage:
    """A run under load. every_s: between two blows. end_at: monotonic seconds. away_s: how long Redis was gone."""

    arena: Arena
    every_s: float
    end_at: float
    chance: random.Random
    away_s: list[float] = field(default_factory=list)

    async def moments(self) -> AsyncIterator[None]:
        """The first after half of `every_s`, until the run is over. One that takes longer delays the next."""
        moment = time.monotonic() + self.every_s / 2
        while moment < self.end_at:
            await asyncio.sleep(max(0.0, moment - time.monotonic()))
            yield
            moment = max(moment + self.every_s, time.monotonic())

    def worker(self, name: str) -> Child:
        """The one that the supervisor of that name started last."""
        return [child for key, child in self.arena.workers.items() if key.startswith(f"{name}.")][-1]

    def serving(self) -> list[Child]:
        return [child for child in map(self.worker, WORKERS) if child.is_alive and child.said("ready")]

    async def replaced(self, name: str, old: Child) -> None:
        """Until another worker of that name serves."""
        await self.arena.told(lambda: self.worker(name) is not old, f"another {name}")
        await self.worker(name).until("ready")


async def nothing(_stage: Stage) -> None:
    """The same load, undisturbed."""


async def kill_workers(stage: Stage) -> None:
    """kill -9 of one of three, again and again; its supervisor starts another one."""
    async for _ in stage.moments():
        if serving := stage.serving():
            stage.chance.choice(serving).send(signal.SIGKILL)


async def roll(stage: Stage) -> None:
    """SIGTERM, exit 0, and a new one that serves: one after the other, all three."""
    async for _ in stage.moments():
        for name in WORKERS:
            old = stage.worker(name)
            old.send(signal.SIGTERM)
            code = await old.ended()
            assert code == 0, f"{old.name} ended with {code} after SIGTERM"
            await stage.replaced(name, old)


async def restart_redis(stage: Stage) -> None:
    """kill -9 of the server, started again at once on the same folder."""
    server = stage.arena.server
    async for _ in stage.moments():
        stage.arena.ledger.fault("SIGKILL server")
        began = time.monotonic()
        await asyncio.to_thread(server.kill)
        server.launch()  # on this thread: a tethered child ends with the thread that started it
        await asyncio.to_thread(server.wait_until_ready)
        stage.away_s.append(time.monotonic() - began)


@dataclass(frozen=True, slots=True)
class Scenario:
    """every_s: between two blows. delay_s: of every call to Redis, whoever makes it. drain_timeout_s: of workers."""

    name: str
    title: str
    disturb: Callable[[Stage], Awaitable[None]] = nothing
    every_s: float = 30.0
    appendfsync: str = "everysec"
    delay_s: float = 0.0
    drain_timeout_s: float = 1.0

    def pause_s(self, seconds: float) -> float:
        """Between two blows of a run that is so long: at least two of them fall."""
        return min(self.every_s, seconds / 2)


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("undisturbed", "undisturbed"),
        Scenario("workers", "one of three workers killed (`kill -9`) every {every_s:g} s", kill_workers, every_s=10.0),
        Scenario("rolling", "all three workers restarted one after the other (SIGTERM), every {every_s:g} s", roll),
        Scenario(
            "redis-everysec", "Redis killed (`kill -9`) and restarted every {every_s:g} s, `everysec`", restart_redis
        ),
        Scenario("redis-always", "the same, `always`", restart_redis, appendfsync="always"),
        Scenario("slow", "a slow Redis: 50 ms on every call", delay_s=0.05),
    )
}
