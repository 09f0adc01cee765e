"""What is left of an answer, and of a worker's work: bytes of Redis, connections, memory, blocks.

    python -m ops.bench.kept_bytes [--jobs 150] [--rounds 3] [--model tiny] [--write FILE] [--json FILE]

Answers of 100 tokens with text, through the whole path. Redis is asked when the answers have just ended, when their
logs have been folded, and when the time of everything that has one is over; the worker before its first job, after
a first round of jobs, and after the last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ops.bench import page
from ops.bench.kept_figures import NUM_TOKENS, Kept, Leftovers, Machine, Round, row_of, text
from ops.bench.path_cost import worker
from ops.bench.path_worker import IDLE

from jitney import AsyncClient
from jitney.connection import Redis, connect
from jitney.embedded import EmbeddedServer
from jitney.keys import Keys
from jitney.queue import Queue
from jitney.workers import list_workers
from jitney_worker.model.resolve import resolve
from jitney_worker.model.tiny import make_tiny

REAL = "smollm2-135m-instruct"
PER_JOB = ("job", "tokens", "result", "idem", "body", "ids")
"""First words of the keys that one job owns."""

PASSING = ("bell", "counts", "fps", "idle", "last", "worker", "workers")
"""First words of the keys that come and go with workers and waiting work."""

NAME = "kept-bytes"
"""Of our own connection, which is nobody's leftover."""

SOON_S = -2.0
"""Folding an answer of this very second: the server's clock is asked in whole seconds."""


async def kept(redis: Redis, keys: Keys) -> Kept:
    """What it keeps now, once everything that was dropped is really gone."""
    while int((await redis.info("memory")).get("lazyfree_pending_objects", 0)):
        pass
    told: Mapping[str, Any] = await redis.info("memory")
    moving = int(told["mem_clients_normal"]) + int(told.get("mem_aof_buffer", 0))
    found = [key async for key in redis.scan_iter(count=1_000) if word_of(key, keys) not in PASSING]
    pipeline = redis.pipeline(transaction=False)
    for key in found:
        if word_of(key, keys) in PER_JOB:
            pipeline.memory_usage(key, samples=0)
    sizes: Sequence[int | None] = await pipeline.execute()
    return Kept(int(told["used_memory"]) - moving, len(found), sum(size or 0 for size in sizes))


def word_of(key: bytes, keys: Keys) -> str:
    """The first word after the queue's prefix: what kind of key it is."""
    return key.decode().removeprefix(f"{keys.prefix}:").split(":")[0]


async def own_keys(redis: Redis, keys: Keys) -> list[bytes]:
    """All keys that belong to single jobs."""
    found = [key async for key in redis.scan_iter(match=f"{keys.prefix}:*", count=1_000)]
    return [key for key in found if word_of(key, keys) in PER_JOB]


async def fold_all(queue: Queue) -> None:
    """As the janitor does, but now."""
    while await queue.redis.zcard(queue.keys.ended):
        await queue.fold_ended(SOON_S)


async def let_expire(redis: Redis, keys: Keys) -> None:
    """The time of all that has one is over now. Raises RuntimeError for keys that have none: they would stay."""
    found = await own_keys(redis, keys)
    lasting = [key.decode() for key in found if await redis.pttl(key) == -1]
    if lasting:
        raise RuntimeError(f"keys of ended jobs without a life time: {lasting[:5]}")
    for key in found:
        await redis.pexpire(key, 1)
    while found and await redis.exists(*found):
        pass


def rss_mb(pid: int) -> float:
    """Resident memory of a process on this machine, in MB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1_000
    raise ValueError(f"/proc/{pid}/status does not say VmRSS")


async def look_at(redis: Redis, queue: str, pid: int) -> Machine:
    """The worker, once its view says that it is idle."""
    while True:
        views = await list_workers(redis, queue)
        if views and views[0].num_running == 0 and views[0].num_waiting == 0:
            break
        await asyncio.sleep(0.05)
    clients: Sequence[Mapping[str, str]] = await redis.client_list()
    mine = [client for client in clients if client["name"].startswith(NAME)]
    return Machine(rss_mb(pid), len(clients) - len(mine), views[0].num_blocks - views[0].num_free_blocks)


async def answer(url: str, queue: str, num_jobs: int, first_seed: int) -> int:
    """So many jobs, each read to its end; events of all answers."""

    async def ride(client: AsyncClient, number: int) -> int:
        job = await client.enqueue(
            [3 + number % 400, 7, 8, 9],
            max_tokens=NUM_TOKENS,
            temperature=0.8,
            seed=first_seed + number,
            ignore_eos=True,
        )
        events = [event async for event in job.stream()]
        assert sum(len(event.token_ids) for event in events) == NUM_TOKENS
        return len(events)

    async with AsyncClient(url, queue=queue) as client:
        return sum(await asyncio.gather(*(ride(client, number) for number in range(num_jobs))))


async def measure(
    server: EmbeddedServer, name: str, model: str, directory: Path, *, num_jobs: int, num_rounds: int
) -> Leftovers:
    """One round to warm it, and the rounds that count."""
    queue_name = f"q{secrets.token_hex(6)}"
    redis = connect(server.url, name=NAME)
    queue = Queue(redis, queue_name)
    try:
        async with worker(server, queue_name, model, directory, 32) as pid:
            machines = [await look_at(redis, queue_name, pid)]
            await one_round(server, queue, pid, num_jobs, 0)
            machines.append(await look_at(redis, queue_name, pid))
            rounds = [await one_round(server, queue, pid, num_jobs, number) for number in range(1, num_rounds + 1)]
            machines.append(await look_at(redis, queue_name, pid))
    finally:
        await redis.aclose()
    return Leftovers(name, num_jobs, rounds, machines)


async def one_round(server: EmbeddedServer, queue: Queue, pid: int, num_jobs: int, number: int) -> Round:
    """Ask, look, fold, look, let the time be over, look."""
    redis = queue.redis
    idle, ledger = await kept(redis, queue.keys), await ledger_bytes(queue)
    num_events = await answer(server.url, queue.name, num_jobs, number * num_jobs)
    await look_at(redis, queue.name, pid)
    ended = await kept(redis, queue.keys)
    await fold_all(queue)
    folded = await kept(redis, queue.keys)
    await let_expire(redis, queue.keys)
    expired = await kept(redis, queue.keys)
    return Round(idle, ended, folded, expired, await ledger_bytes(queue) - ledger, num_events)


async def ledger_bytes(queue: Queue) -> int:
    return int(await queue.redis.memory_usage(queue.keys.usage, samples=0) or 0)


def run(model: str, num_jobs: int, num_rounds: int) -> list[Leftovers]:
    """On every server that this machine has."""
    found = []
    for kind in ("valkey", "redis"):
        binary = page.server_binary(kind)
        if binary is None:
            print(f"no {kind} server here: left out")
            continue
        with tempfile.TemporaryDirectory() as folder:
            directory = resolve(model) if model == REAL else make_tiny(Path(folder) / "tiny")
            with EmbeddedServer(Path(folder) / "data", binary=binary, tethered=True) as server:
                name = page.server_version(binary)
                measuring = measure(server, name, model, directory, num_jobs=num_jobs, num_rounds=num_rounds)
                found.append(asyncio.run(measuring))
    return found


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=150, help="of each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", choices=(IDLE, "tiny", REAL), default="tiny")
    parser.add_argument("--write", type=Path, help="a document with a place for these tables")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(words)


def main() -> None:
    asked = arguments()
    page.check_place(asked.write, "kept-bytes")
    machine = page.machine()
    found = run(asked.model, asked.jobs, asked.rounds)
    block = text(found, asked.model, machine)
    print(block)
    page.write(asked.write, "kept-bytes", block)
    if asked.json:
        asked.json.write_text(json.dumps([row_of(one) for one in found], indent=2) + "\n")


if __name__ == "__main__":
    main()
