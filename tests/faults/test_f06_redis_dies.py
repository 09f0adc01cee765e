"""F6 to F9: the server dies and comes back with all of its data, with some of it, with none, or not at all."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from tests.faults.answers import Asking
from tests.faults.arena import Arena
from tests.faults.conftest import MakeArena, Report, ServerMaker
from tests.faults.readers import HttpClient, PythonClient

from jitney.embedded import EmbeddedServer
from jitney.errors import ServerError

RECOVERY_S = 10.0
KINDS = ("valkey", "redis")


async def crash(field: Arena, server: EmbeddedServer) -> None:
    field.ledger.fault("SIGKILL server")
    await asyncio.to_thread(server.kill)


@pytest.mark.parametrize("kind", KINDS)
async def test_f6_with_always_no_accepted_job_is_lost(
    make_arena: MakeArena, make_server: ServerMaker, seed: int, kind: str, report: Report
) -> None:
    server = make_server(kind, appendfsync="always")
    async with make_arena(server) as field:
        await field.start_api()
        await field.start_workers("w1", "w2", "w3")
        await field.load(seed)
        await field.streaming()
        late = asyncio.create_task(field.load(seed + 1_000, num_streams=20, num_bulk=0))
        await crash(field, server)
        await asyncio.to_thread(server.start)
        await late
        figures = report(await field.finished(f"F6 {kind} always #{seed}"))
        assert (figures.summary.num_accepted, figures.summary.num_finished) == (90, 90)
        assert figures.summary.recovery_s < RECOVERY_S
        await field.rests()


async def test_f6_a_server_that_is_away_for_longer_than_a_lease(
    make_arena: MakeArena, make_server: ServerMaker, seed: int, report: Report
) -> None:
    """Every worker stops generating for jobs whose leases it cannot renew, and takes them up again afterwards."""
    server = make_server(appendfsync="always")
    async with make_arena(server) as field:
        await field.start_api()
        workers = await field.start_workers("w1", "w2", "w3")
        await field.load(seed, asking=Asking(seed, (60, 120)))
        await field.streaming()
        await crash(field, server)
        gave_up = [worker.until_any(lambda line: "leases_given_up" in line) for worker in workers]
        await asyncio.gather(*gave_up)
        await asyncio.to_thread(server.start)
        figures = report(await field.finished(f"F6 long outage #{seed}"))
        assert figures.summary.num_finished == 70
        assert await field.num_takeovers() > 0
        await field.rests()


async def test_f7_with_everysec_only_the_youngest_are_lost_and_their_readers_told(
    make_arena: MakeArena, make_server: ServerMaker, seed: int, report: Report
) -> None:
    """A killed process leaves the page cache, so that nothing at all should be lost here; a power cut is below."""
    server = make_server(appendfsync="everysec")
    async with make_arena(server) as field:
        await field.start_api()
        await field.start_workers("w1", "w2", "w3")
        await field.load(seed)
        await field.streaming()
        await crash(field, server)
        await asyncio.to_thread(server.start)
        summary = report(await field.finished(f"F7 everysec #{seed}", may_lose=True)).summary
        accepted_at = {line.job: line.at for line in field.ledger.of("accepted")}
        crashed_at = field.ledger.first_fault_at
        assert crashed_at is not None
        assert [job for job in summary.lost if accepted_at[job] < crashed_at - 2.0] == []
        assert summary.num_finished + summary.num_lost == 70


async def forget(field: Arena, server: EmbeddedServer, way: str) -> None:
    """The server has lost all that it knew."""
    field.ledger.fault(way)
    if way == "flushall":
        await field.redis.flushall()
        return
    await asyncio.to_thread(server.kill)
    shutil.rmtree(server.data_dir)
    await asyncio.to_thread(server.start)


@pytest.mark.parametrize("way", ["flushall", "new directory"])
async def test_f8_a_server_that_forgot_everything(
    make_arena: MakeArena, make_server: ServerMaker, seed: int, way: str, report: Report
) -> None:
    """Open streams end with an error, and new jobs are served without anybody's help."""
    server = make_server()
    async with make_arena(server) as field:
        await field.start_api()
        await field.start_workers("w1", "w2", "w3")
        await field.load(seed)
        await field.streaming()
        await forget(field, server, way)
        summary = report(await field.finished(f"F8 {way} #{seed}", may_lose=True)).summary
        assert summary.num_lost > 10
        assert summary.num_finished + summary.num_lost == 70
        await field.start_api("fresh")
        http = HttpClient(lambda: [field.apis["fresh"][1]], field.queue_name, field.ledger)
        async with asyncio.timeout(8):
            for asked in Asking(seed + 1_000).some(6):
                await field.follow(http, asked)
        assert (await field.finished("after", may_lose=True)).summary.num_finished == summary.num_finished + 6
        await field.rests()


async def test_f8_a_job_of_the_new_data_set_is_not_said_to_be_lost_with_the_old_one(
    make_arena: MakeArena, make_server: ServerMaker, seed: int
) -> None:
    server = make_server()
    async with make_arena(server) as field:
        await field.start_workers("w1", step_s=0.1)
        client = PythonClient(field.client(), field.ledger)
        for asked in Asking(seed).some(4, ignore_eos=True):
            await field.follow(client, asked)
        await field.streaming(2)
        assert await field.queue.epoch()
        await field.told(lambda: all(seq > 10 for seq in field.progress.values()), "the reader has looked at the epoch")
        await forget(field, server, "flushall")
        await field.queue.epoch()
        await field.write_card()
        fresh = {await field.follow(client, asked) for asked in Asking(seed + 1_000, (40, 60)).some(4)}
        assert (await field.finished("F8 new jobs", may_lose=True)).summary.lost & fresh == set()


def tail_of(server: EmbeddedServer) -> Path:
    """The file that grows."""
    return max((server.data_dir / "appendonlydir").glob("*.incr.aof"), key=lambda path: path.stat().st_mtime)


@pytest.mark.parametrize("kind", KINDS)
async def test_f9_a_log_whose_last_command_is_cut_off_starts_without_that_command(
    make_arena: MakeArena, make_server: ServerMaker, seed: int, kind: str, report: Report
) -> None:
    server = make_server(kind)
    async with make_arena(server) as field:
        await field.write_card()  # and no worker yet: the last command is an enqueue
        ids = await field.load(
            seed, num_streams=10, num_bulk=4, one_by_one=True
        )  # no worker yet: the last command is an enqueue
        await crash(field, server)
        file = tail_of(server)
        with file.open("r+b") as opened:
            opened.truncate(file.stat().st_size - 5)
        await asyncio.to_thread(server.start)
        await field.start_workers("w1", "w2")
        summary = report(await field.finished(f"F9 {kind} cut #{seed}", may_lose=True)).summary
        assert (summary.num_finished, summary.num_lost) == (13, 1)
        assert summary.lost == {ids[-1]}


@pytest.mark.parametrize("kind", KINDS)
async def test_f9_a_log_damaged_in_the_middle_is_reported_and_kept(
    make_arena: MakeArena, make_server: ServerMaker, seed: int, kind: str
) -> None:
    server = make_server(kind)
    async with make_arena(server) as field:
        await field.start_workers("w1")
        await field.load(seed, num_streams=10, num_bulk=4)
        await field.finished("F9 damaged")
        await asyncio.to_thread(server.kill)
        file = tail_of(server)
        size = file.stat().st_size
        with file.open("r+b") as opened:
            opened.seek(size // 2)
            opened.write(b"\0" * 4_096)
        with pytest.raises(
            ServerError, match=r"ended with 1: its append-only file .*incr\.aof is damaged\. Nothing was changed"
        ):
            await asyncio.to_thread(server.start)
        assert file.stat().st_size == size
