"""F21: everything, in an order that the seed decides."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal

from tests.faults.answers import Asking
from tests.faults.arena import Arena
from tests.faults.conftest import MakeArena, Report, ServerMaker
from tests.faults.proxy import Proxy

from jitney_worker.settings import WorkerSection

NUM_BLOWS = int(os.environ.get("JITNEY_FAULT_BLOWS", "12"))
BLOWS = ("kill", "stop", "term", "server", "reset", "hang", "leases", "api", "subscriptions")


async def test_f21_everything_at_once(
    make_arena: MakeArena, make_server: ServerMaker, seed: int, report: Report
) -> None:
    server = make_server(appendfsync="always")
    async with make_arena(server) as field, Proxy(server.port) as proxy:
        await field.start_api("api0", proxy=proxy)
        nemesis = Nemesis(field, proxy, random.Random(seed))
        for _ in range(3):
            await nemesis.fresh_worker()
        async with field.steady_load(Asking(seed, (30, 120))):
            for _ in range(NUM_BLOWS):
                await field.more_events(30)
                await nemesis.strike()
            await nemesis.end()
        figures = report(await field.finished(f"F21 {NUM_BLOWS} blows #{seed}", blows=" ".join(nemesis.struck)))
        assert figures.summary.num_finished == figures.summary.num_accepted
        await field.rests()


class Nemesis:
    """Strikes, and sees to it that somebody is left to work."""

    def __init__(self, field: Arena, proxy: Proxy, chance: random.Random) -> None:
        self._field = field
        self._proxy = proxy
        self._chance = chance
        self._numbers = itertools.count(1)
        self._stopped: list[str] = []
        self.struck: list[str] = []

    async def fresh_worker(self) -> None:
        """Every other one writes when its tokens are due, the others after each step."""
        number = next(self._numbers)
        interval_s = WorkerSection().publish_interval_s if number % 2 else 0.0
        await self._field.start_worker(f"w{number}", proxy=self._proxy, publish_interval_s=interval_s)

    async def strike(self) -> None:
        blow = self._chance.choice(BLOWS)
        self.struck.append(blow)
        await getattr(self, f"_{blow}")()
        while len(self._alive()) < 3:
            await self.fresh_worker()

    async def end(self) -> None:
        """Who was stopped wakes up."""
        self._proxy.heal()
        for name in self._stopped:
            self._field.workers[name].send(signal.SIGCONT)
        self._stopped.clear()

    def _alive(self) -> list[str]:
        return [name for name, child in self._field.workers.items() if child.is_alive and name not in self._stopped]

    async def _kill(self) -> None:
        victim = self._field.workers[self._chance.choice(self._alive())]
        victim.send(signal.SIGKILL)
        await victim.ended()

    async def _stop(self) -> None:
        name = self._chance.choice(self._alive())
        self._field.workers[name].send(signal.SIGSTOP)
        self._stopped.append(name)
        if len(self._stopped) > 2:
            self._field.workers[self._stopped.pop(0)].send(signal.SIGCONT)

    async def _term(self) -> None:
        victim = self._field.workers[self._chance.choice(self._alive())]
        await self.fresh_worker()
        victim.send(signal.SIGTERM)
        victim.send(signal.SIGTERM)
        await victim.ended()

    async def _server(self) -> None:
        self._field.ledger.fault("SIGKILL server")
        await asyncio.to_thread(self._field.server.kill)
        await asyncio.to_thread(self._field.server.start)

    async def _reset(self) -> None:
        self._field.ledger.fault("reset")
        self._proxy.reset()

    async def _hang(self) -> None:
        self._field.ledger.fault("hang")
        self._proxy.hang()
        workers = [self._field.workers[name] for name in self._alive()]
        said = {worker.name: len([line for line in worker.lines if "renew_failed" in line]) for worker in workers}
        await self._field.told(
            lambda: any(len([x for x in w.lines if "renew_failed" in x]) > said[w.name] for w in workers),
            "a renewal that failed",
        )
        self._proxy.heal()

    async def _leases(self) -> None:
        await self._field.expire_leases()

    async def _api(self) -> None:
        for child, _ in list(self._field.apis.values()):
            if child.is_alive:
                child.send(signal.SIGKILL)
                await child.ended()
        await self._field.start_api(f"api{len(self._field.apis)}", proxy=self._proxy)

    async def _subscriptions(self) -> None:
        self._field.ledger.fault("CLIENT KILL TYPE pubsub")
        await self._field.command("CLIENT", "KILL", "TYPE", "pubsub")
