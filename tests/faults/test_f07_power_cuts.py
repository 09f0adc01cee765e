"""F7: the power goes, and the server comes back with less than it had confirmed.

A killed process leaves what it wrote in the page cache, so the cut is acted out: the server's files are put back to
what they were some hundred events before it was killed.
"""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.faults.answers import Asking
from tests.faults.arena import Arena
from tests.faults.children import Child
from tests.faults.conftest import MakeArena, Report, ServerMaker
from tests.faults.proxy import Proxy
from tests.faults.readers import PythonClient

from jitney.embedded import EmbeddedServer


@dataclass(slots=True)
class PowerCut:
    """What a disk held at one moment of a run, and jobs from before and after it. Readers are behind a proxy."""

    field: Arena
    server: EmbeddedServer
    proxy: Proxy
    old: list[str]
    younger: list[str]

    @property
    def on_disk(self) -> Path:
        return self.server.data_dir / "appendonlydir"

    @classmethod
    async def prepare(cls, field: Arena, server: EmbeddedServer, proxy: Proxy, seed: int) -> PowerCut:
        client = field.client(proxy)
        old = await field.load(seed, client=client, asking=Asking(seed, (60, 120)))
        await field.streaming()
        cut = cls(field, server, proxy, old, [])
        await asyncio.to_thread(shutil.copytree, cut.on_disk, server.data_dir / "synced")
        endless = Asking(seed + 1_000, (150, 160)).some(10, ignore_eos=True, stop=None, stop_token_ids=())
        cut.younger += [await field.follow(PythonClient(client, field.ledger), asked) for asked in endless]
        await field.more_events(300)
        return cut

    async def happen(self, *workers: Child) -> None:
        """The server comes back with an older state of the same data set. These workers die with it."""
        self.field.ledger.fault("power cut")
        await asyncio.to_thread(self.server.kill)
        for worker in workers:
            await worker.finish_off()
        shutil.rmtree(self.on_disk)
        (self.server.data_dir / "synced").rename(self.on_disk)
        await asyncio.to_thread(self.server.start)

    async def everything_is_said_again(self) -> None:
        await self.field.until(lambda: self.field.are_done(self.old), "everything said again")
        self.proxy.reset()
        self.proxy.heal()


async def test_f7_after_a_power_cut_the_workers_write_again_what_was_lost_and_no_reader_notices(
    make_arena: MakeArena, make_server: ServerMaker, seed: int, report: Report
) -> None:
    """Readers are there all the time: most of them meet a log that is shorter than what they have read."""
    server = make_server(appendfsync="everysec")
    async with make_arena(server) as field, Proxy(server.port) as proxy:
        workers = await field.start_workers("w1", "w2", "w3")
        cut = await PowerCut.prepare(field, server, proxy, seed)
        await cut.happen()
        figures = report(await field.finished(f"F7 power cut #{seed}", may_lose=True))
        assert figures.summary.lost == set(cut.younger)
        assert figures.summary.num_finished == 70
        mended = [line for worker in workers for line in worker.lines if "log_mended" in line]
        assert len(mended) > 10


async def test_f7_readers_who_hear_nothing_until_all_was_said_again_go_on_where_they_were(
    make_arena: MakeArena, make_server: ServerMaker, seed: int, report: Report
) -> None:
    server = make_server(appendfsync="everysec")
    async with make_arena(server) as field, Proxy(server.port) as proxy:
        await field.start_workers("w1", "w2", "w3")
        cut = await PowerCut.prepare(field, server, proxy, seed)
        proxy.hang()
        await cut.happen()
        await cut.everything_is_said_again()
        summary = report(await field.finished(f"F7 late readers #{seed}", may_lose=True)).summary
        assert summary.lost == set(cut.younger)
        assert summary.num_finished == 70


async def test_f7_when_the_workers_die_too_readers_go_on_rightly_or_are_told(
    make_arena: MakeArena, make_server: ServerMaker, seed: int, report: Report
) -> None:
    """Other workers say the lost part anew, in other events. Nobody hears a token twice, or misses one."""
    server = make_server(appendfsync="everysec")
    async with make_arena(server) as field, Proxy(server.port) as proxy:
        workers = await field.start_workers("w1", "w2", "w3")
        cut = await PowerCut.prepare(field, server, proxy, seed)
        proxy.hang()
        await cut.happen(*workers)
        await field.start_workers("w4", "w5")
        await cut.everything_is_said_again()
        figures = report(await field.finished(f"F7 power cut, workers too #{seed}", may_lose=True))
        assert set(cut.younger) < figures.summary.lost, "some logs are others than those that were read"
        assert figures.summary.num_finished + figures.summary.num_lost == 80
        assert figures.summary.num_finished > 0


async def test_f7_whoever_waits_for_a_whole_answer_gets_it_whatever_became_of_the_log(
    make_arena: MakeArena, make_server: ServerMaker, seed: int
) -> None:
    """`result()` has given nothing out yet: it begins again."""
    server = make_server(appendfsync="everysec")
    async with make_arena(server) as field, Proxy(server.port) as proxy:
        workers = await field.start_workers("w1", "w2", "w3")
        cut = await PowerCut.prepare(field, server, proxy, seed)
        client = field.client(proxy)
        waiting = [asyncio.create_task(client.job(job_id).result()) for job_id in cut.old]

        async def are_following() -> bool:
            """Besides the readers that `load` began."""
            channels = [field.queue.keys.tokens(job_id) for job_id in cut.old]
            readers = await field.redis.pubsub_numsub(*channels)
            return all(task.done() or number >= 2 for task, (_, number) in zip(waiting, readers, strict=True))

        await field.until(are_following, "everybody waits")
        await field.more_events(100)
        proxy.hang()
        await cut.happen(*workers)
        await field.start_workers("w4", "w5")
        await cut.everything_is_said_again()
        async with asyncio.timeout(60):
            results = await asyncio.gather(*waiting)
        answers = [field.answers[field.jobs[job_id]] for job_id in cut.old]
        said, alone = (
            [[(one.text, one.token_ids, one.finish_reason) for one in whole.choices] for whole in wholes]
            for wholes in (results, answers)
        )
        assert said == alone
        lost = (await field.finished(f"F7 whole answers #{seed}", may_lose=True)).summary.lost
        assert set(cut.younger) < lost
