"""F12, F13, F16: disks and memories that are full, and clocks that jump."""

from __future__ import annotations

import asyncio
import resource
import signal
from pathlib import Path

import pytest
from tests.faults.answers import Asking
from tests.faults.arena import Arena
from tests.faults.conftest import MakeArena, Report, ServerMaker, binary_of
from tests.faults.pace import CALM_LEASE_S
from tests.faults.readers import PythonClient
from tests.faults.test_f06_redis_dies import tail_of

from jitney.embedded import EmbeddedServer
from jitney.errors import QueueUnavailable

EVICTION = "server_may_evict_jobs"
"""The event that a worker logs."""


def script(folder: Path, *lines: str) -> Path:
    """A program that ends in `exec`, so that the server keeps its process id."""
    made = folder / "server.sh"
    made.write_text("\n".join(("#!/bin/sh", *lines, "")))
    made.chmod(0o755)
    return made


def limit_files(server: EmbeddedServer, max_bytes: int) -> None:
    """No file of the server may grow beyond this from now on: a write beyond it fails, as on a full disk."""
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (max_bytes, resource.RLIM_INFINITY))


async def refused(field: Arena, asking: Asking) -> QueueUnavailable:
    """Submit until the queue refuses; what was accepted on the way is read as everything else is."""
    client = field.client()
    reader = PythonClient(client, field.ledger)
    for asked in asking.some(400, band="bulk"):
        field.answers[asked.name] = field.alone.answer(asked)
        try:
            job = await client.enqueue(idempotency_key=asked.name, **asked.fields)
        except QueueUnavailable as error:
            field.ledger.refused(asked.name, error)
            return error
        field.ledger.accepted(asked.name, job.id)
        field.read(reader, asked, job.id)
    raise AssertionError("nothing was refused")


async def accepted_again(field: Arena, asking: Asking) -> None:
    """A new job, submitted until it is accepted; it must then be answered as all others."""
    await field.follow(field.http(), asking.one())


@pytest.mark.parametrize("kind", ["valkey", "redis"])
async def test_f12_everysec_on_a_full_disk_refuses_and_recovers(
    make_arena: MakeArena, make_server: ServerMaker, tmp_path: Path, seed: int, kind: str, report: Report
) -> None:
    binary = script(tmp_path, "trap '' XFSZ", f'exec "{binary_of(kind)}" "$@"')
    server = make_server(binary=binary, appendfsync="everysec")
    async with make_arena(server) as field:
        await field.start_api()
        workers = await field.start_workers("w1", "w2", "w3", seats=20)
        await field.load(seed, num_streams=20, num_bulk=10, asking=Asking(seed, (100, 200)))
        await field.streaming()
        owners = [worker for worker in workers if await field.owned_by(worker.name)]  # the third may have got none
        assert len(owners) >= 2
        field.ledger.fault("disk full")
        limit_files(server, tail_of(server).stat().st_size + 4_096)
        await asyncio.gather(*(worker.until_any(lambda line: "renew_failed" in line) for worker in owners))
        error = await refused(field, Asking(seed + 1_000))
        assert "MISCONF" in str(error) or "AOF" in str(error)
        limit_files(server, resource.RLIM_INFINITY)
        field.ledger.fault("space again")
        await accepted_again(field, Asking(seed + 2_000))
        figures = report(await field.finished(f"F12 {kind} everysec #{seed}"))
        assert figures.summary.num_finished == figures.summary.num_accepted >= 31
        await field.rests()


async def test_f12_always_on_a_full_disk_ends_the_server_and_keeps_its_word(
    make_arena: MakeArena, make_server: ServerMaker, tmp_path: Path, seed: int, report: Report
) -> None:
    binary = script(tmp_path, "trap '' XFSZ", f'exec "{binary_of("valkey")}" "$@"')
    server = make_server(binary=binary, appendfsync="always")
    async with make_arena(server) as field:
        await field.start_api()
        await field.start_workers("w1", "w2", "w3")
        await field.load(seed, num_streams=20, num_bulk=10, asking=Asking(seed, (100, 200)))
        await field.streaming()
        field.ledger.fault("disk full")
        limit_files(server, tail_of(server).stat().st_size + 4_096)
        late = asyncio.create_task(field.load(seed + 1_000, num_streams=10, num_bulk=0))
        await field.until(lambda: is_gone(server.pid), "the server's own end")
        await asyncio.to_thread(server.stop)
        await asyncio.to_thread(server.start)
        await late
        figures = report(await field.finished(f"F12 always #{seed}"))
        assert (figures.summary.num_accepted, figures.summary.num_finished) == (40, 40)
        await field.rests()


async def is_gone(pid: int) -> bool:
    """Ended, and perhaps not yet waited for."""
    try:
        return "State:\tZ" in status_of(pid)
    except OSError:
        return True


def status_of(pid: int) -> str:
    return Path(f"/proc/{pid}/status").read_text()


async def test_f13_a_full_memory_refuses_what_is_new_and_goes_on_with_the_rest(
    field: Arena, seed: int, report: Report
) -> None:
    await field.start_workers("w1", "w2", "w3")
    await field.load(seed, num_streams=20, num_bulk=10, asking=Asking(seed, (100, 200)))
    await field.streaming()
    used = (await field.redis.info("memory"))["used_memory"]
    await field.redis.config_set("maxmemory", used // 2)
    field.ledger.fault("memory full")
    error = await refused(field, Asking(seed + 1_000))
    assert "memory" in str(error)
    answer = await field.http_status(Asking(seed + 1_500).one())
    assert answer == 503
    assert (await field.finished("F13")).summary.num_finished == 30  # all of it while the memory is full
    await field.redis.config_set("maxmemory", 0)
    await accepted_again(field, Asking(seed + 2_000))
    assert report(await field.finished(f"F13 memory #{seed}")).summary.num_finished == 31
    await field.rests()


async def test_f13_a_worker_says_that_an_evicting_server_is_unsafe(field: Arena, seed: int) -> None:
    """It may evict some day: the worker says so before it is ready, and serves."""
    await field.redis.config_set("maxmemory-policy", "allkeys-lru")
    worker = await field.start_worker("w1")
    first = await worker.until_any(lambda line: EVICTION in line or line.startswith("ready"))
    assert EVICTION in first
    await field.load(seed, num_streams=4, num_bulk=0)
    assert (await field.finished("F13 warned")).summary.num_finished == 4


async def test_f13_a_worker_does_not_start_where_the_server_evicts(field: Arena, seed: int) -> None:
    """With a limit on memory the policy is in force: accepted jobs could go at any moment."""
    await field.redis.config_set("maxmemory", 1 << 30)
    await field.redis.config_set("maxmemory-policy", "allkeys-lru")
    worker = await field.launch_worker("w1")
    assert await worker.ended() != 0
    assert any("maxmemory-policy noeviction" in line for line in worker.lines)
    assert worker.said("ready") == []


FAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)


def fake_clock(folder: Path) -> tuple[Path, dict[str, str]]:
    """A file that says how far a process's clock is off, and the environment that makes it look there."""
    offset = folder / "offset"
    offset.write_text("+0s\n")
    return offset, {
        "LD_PRELOAD": str(FAKETIME),
        "FAKETIME_TIMESTAMP_FILE": str(offset),
        "FAKETIME_NO_CACHE": "1",
        "DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }


@pytest.mark.skipif(FAKETIME is None, reason="libfaketime is not installed")
@pytest.mark.parametrize("jump", ["+1h", "-1h"])
async def test_f16_the_clock_of_a_worker_jumps(
    field: Arena, tmp_path: Path, seed: int, jump: str, report: Report
) -> None:
    """Leases and order go by the server's clock alone: nobody notices."""
    offset, environment = fake_clock(tmp_path)
    field.lease_s = CALM_LEASE_S
    await field.start_worker("w1", environment=environment)
    await field.start_workers("w2", "w3")
    await field.load(seed, asking=Asking(seed, (60, 120)))
    held = await field.until(lambda: field.owned_by("w1"), "a job for w1")
    offset.write_text(f"{jump}\n")
    field.ledger.fault(f"the clock of w1 is off by {jump}")
    figures = report(await field.finished(f"F16 worker {jump} #{seed}", held=len(held)))
    assert figures.summary.num_finished == 70
    assert await field.num_takeovers() == 0
    written = [view.written_at for view in await field.views() if view.id == "w1"]
    others = [view.written_at for view in await field.views() if view.id != "w1"]
    assert not written or abs(written[0] - others[0]) > 3_000, "its clock did not jump"


async def has_jumped(field: Arena, before: int) -> bool:
    return abs((await field.redis.time())[0] - before) > 3_000


@pytest.mark.skipif(FAKETIME is None, reason="libfaketime is not installed")
@pytest.mark.parametrize("jump", ["+1h", "-1h"])
async def test_f16_the_clock_of_the_server_jumps(
    make_arena: MakeArena, make_server: ServerMaker, tmp_path: Path, seed: int, jump: str, report: Report
) -> None:
    """Forward: every lease is over at once, and some logs too. Backward: leases last, until they are renewed."""
    offset, environment = fake_clock(tmp_path)
    exports = [f"export {name}='{value}'" for name, value in environment.items()]
    # Debian's Redis allocates before libfaketime is up, and hangs.
    server = make_server(binary=script(tmp_path, *exports, f'exec "{binary_of("valkey")}" "$@"'))
    async with make_arena(server) as field:
        await field.start_api()
        await field.start_workers("w1", "w2", "w3")
        await field.load(seed)
        await field.streaming()
        before = (await field.redis.time())[0]
        offset.write_text(f"{jump}\n")
        field.ledger.fault(f"the server's clock is off by {jump}")
        await field.until(lambda: has_jumped(field, before), "the jump")
        # Results that had ended live an hour: forward they are gone, and a reader that comes late is told so.
        summary = report(await field.finished(f"F16 server {jump} #{seed}", may_lose=True)).summary
        assert summary.num_finished + summary.num_lost == 70
        assert summary.num_finished > 30
        if jump == "-1h":
            assert summary.num_lost == 0
        victim = field.workers["w1"]
        ids = await field.load(seed + 1_000, num_streams=12, num_bulk=0, asking=Asking(seed + 1_000, (60, 90)))
        await field.told(lambda: sum(field.progress[job_id] > 2 for job_id in ids) > 6, "the new ones have begun")
        victim.send(signal.SIGKILL)
        await victim.ended()
        figures = await field.finished("after the jump", may_lose=True)
        assert figures.summary.num_finished == summary.num_finished + 12
