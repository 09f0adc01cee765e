"""One scenario: a server, an API, three workers under a supervisor, the load, the blows, and the checker's verdict."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from ops.bench.nemesis import figures
from ops.bench.nemesis.fields import Model, open_field, supervised
from ops.bench.nemesis.load import Load, Repeated, Scripted, Source, heard_alone, requests
from ops.bench.nemesis.scenarios import WORKERS, Scenario, Stage
from tests.faults.answers import Asking
from tests.faults.arena import Arena
from tests.faults.checker import Summary, Violation
from tests.faults.proxy import Proxy

from jitney.embedded import EmbeddedServer
from jitney.tasks import end_tasks

PATIENCE_S = 150.0


@dataclass(frozen=True, slots=True)
class Conditions:
    """What all scenarios of a report have in common."""

    model: Model
    directory: Path
    binary: Path
    seconds: float
    lease_s: float
    num_streams: int
    num_bulk: int
    seed: int


@dataclass(frozen=True, slots=True)
class Measured:
    """One run. faults: when each blow fell. wrong: what broke a promise; then the other figures are worth nothing.

    resumed: times that another claim went on with an answer. shown: tokens that readers were given while the
    load was on, which was `seconds` long. Times are monotonic seconds.
    """

    scenario: Scenario
    seconds: float
    summary: Summary = field(default_factory=Summary)
    faults: list[float] = field(default_factory=list)
    stalls: list[figures.Stall] = field(default_factory=list)
    slowest_first_s: float = 0.0
    resumed: int = 0
    shown: int = 0
    tally: figures.Tally = field(default_factory=figures.Tally)
    away_s: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def title(self) -> str:
        """What was done, and how often."""
        return self.scenario.title.format(every_s=self.scenario.pause_s(self.seconds))

    @property
    def tokens_per_s(self) -> float:
        return self.shown / self.seconds


async def run(scenario: Scenario, given: Conditions, folder: Path) -> Measured:
    """Run it in a folder that is there, and is left behind only when something is wrong."""
    server = EmbeddedServer(
        folder / "data", binary=given.binary, appendfsync=scenario.appendfsync, tethered=True
    ).start()
    try:
        async with open_field(folder, given.directory, given.model, server, given.lease_s) as arena:
            measured = await _run(scenario, given, arena)
    except (AssertionError, Violation) as error:
        found = error.found if isinstance(error, Violation) else [str(error)]
        return Measured(scenario, given.seconds, wrong=[*found, f"what was seen is in {folder}"])
    finally:
        server.stop()
    shutil.rmtree(folder)
    return measured


async def _run(scenario: Scenario, given: Conditions, arena: Arena) -> Measured:
    source = await _source(given, arena)
    flags = {**given.model.flags, "drain_timeout_s": scenario.drain_timeout_s}
    async with _way_to_redis(arena, scenario.delay_s) as proxy:
        await arena.start_api(proxy=proxy)
        async with supervised(arena, WORKERS, proxy=proxy, **flags):
            stage = Stage(arena, scenario.pause_s(given.seconds), 0.0, random.Random(given.seed))
            await _all_serve(stage)
            load = Load(arena, source, given.num_streams, given.num_bulk, proxy)
            load.begin()
            await load.under_way()
            began = time.monotonic()
            stage.end_at = began + given.seconds
            await _disturbed(scenario, stage)
            await load.end(PATIENCE_S)
            done = await arena.finished(scenario.name, may_lose=True, patience_s=PATIENCE_S)
            await arena.rests()
    return _measured(scenario, given, stage, done.summary, began)


async def _source(given: Conditions, arena: Arena) -> Source:
    if given.model.is_scripted:
        return Scripted(Asking(given.seed, given.model.max_tokens), arena.alone)
    asked = requests(given.seed, given.model.num_requests, given.model.max_tokens)
    alone = await arena.start_worker("alone", drain_timeout_s=1.0, **given.model.flags)
    answers = await heard_alone(arena.client(), asked)
    await alone.finish_off()
    (arena.folder / "alone.tally").unlink()
    return Repeated(asked, answers)


@contextlib.asynccontextmanager
async def _way_to_redis(arena: Arena, delay_s: float) -> AsyncIterator[Proxy | None]:
    """A slow one if asked for; otherwise none of ours stands between."""
    if not delay_s:
        yield None
        return
    async with Proxy(arena.server.port) as proxy:
        proxy.delay_s = delay_s / 2  # each way
        yield proxy


async def _all_serve(stage: Stage) -> None:
    known = [f"{name}.0" for name in WORKERS]
    await stage.arena.told(lambda: all(name in stage.arena.workers for name in known), "three workers")
    for name in WORKERS:
        await stage.worker(name).until("ready")


async def _disturbed(scenario: Scenario, stage: Stage) -> None:
    """Until the time is over, and no blow is half struck."""
    blows = asyncio.ensure_future(scenario.disturb(stage))
    try:
        await asyncio.sleep(max(0.0, stage.end_at - time.monotonic()))
        await blows
    finally:
        await end_tasks([blows])


def _measured(scenario: Scenario, given: Conditions, stage: Stage, summary: Summary, began: float) -> Measured:
    ledger, times = stage.arena.ledger, figures.event_times(stage.arena.ledger)
    return Measured(
        scenario,
        given.seconds,
        summary=summary,
        faults=[line.at for line in ledger.of("fault") if line.at >= began],
        stalls=figures.stalls(times),
        slowest_first_s=figures.slowest_first_s(ledger, times),
        resumed=figures.num_resumed(ledger),
        shown=figures.tokens_shown(ledger, began, began + given.seconds),
        tally=figures.tally_of(stage.arena.folder),
        away_s=stage.away_s,
    )
