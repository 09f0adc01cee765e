"""What one step's `append` costs the server and the worker, beside the barest calls that say the same.

The script checks fence and seq, writes the log and publishes. Beside it, on the same server and in the same go: one
pipeline of plain XADDs of the same events, and one of PUBLISHes. All of them are read by a connection that is
subscribed to every job, as readers are.
"""

from __future__ import annotations

import secrets
import socket
import statistics
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from ops.bench import page

from jitney.connection import Redis, connect
from jitney.embedded import EmbeddedServer
from jitney.keys import new_job_id
from jitney.messages import Event
from jitney.queue import Append, Delivery, Entry, Queue
from jitney_worker.bench.percentiles import percentile

LEASE_S = 3_600.0
FSYNCS = ("no", "everysec", "always")


@dataclass(slots=True)
class Cost:
    """What steps cost in one way.

    wall_ms: of each step, as the worker waits for it. command_us, process_us: of each round, microseconds of the
    server for one job in one step: in the command itself, and of its whole process (reading, replying, the file).
    """

    wall_ms: list[float] = field(default_factory=list)
    command_us: list[float] = field(default_factory=list)
    process_us: list[float] = field(default_factory=list)

    @property
    def server_us(self) -> float:
        return statistics.median(self.command_us)

    @property
    def in_all_us(self) -> float:
        return statistics.median(self.process_us)

    @property
    def p50_ms(self) -> float:
        return percentile(self.wall_ms, 0.5)

    @property
    def p99_ms(self) -> float:
        return percentile(self.wall_ms, 0.99)


@dataclass(frozen=True, slots=True)
class Spent:
    """Microseconds that a server has spent so far: in commands, and by its process in all (what fsync waits is not)."""

    commands_us: dict[str, int]
    total_us: float

    @classmethod
    async def of(cls, redis: Redis) -> Spent:
        told: Mapping[str, Any] = await redis.info("commandstats")
        cpu: Mapping[str, float] = await redis.info("cpu")
        commands = {name.removeprefix("cmdstat_"): int(stats["usec"]) for name, stats in told.items()}
        return cls(commands, 1e6 * (cpu["used_cpu_user"] + cpu["used_cpu_sys"]))

    def since(self, before: Spent, command: str) -> tuple[float, float]:
        """In this command (what a script calls is counted in the script), and in all."""
        spent = self.commands_us.get(command, 0) - before.commands_us.get(command, 0)
        return spent, self.total_us - before.total_us


class Listener(threading.Thread):
    """One connection that is subscribed to every channel, and throws away what it hears."""

    def __init__(self, server: EmbeddedServer, channels: Sequence[str]) -> None:
        super().__init__(name="listener", daemon=True)
        self._socket = socket.create_connection(("127.0.0.1", server.port))
        self._socket.sendall(_command("AUTH", server.password) + _command("SUBSCRIBE", *channels))
        self._wanted = len(channels)
        self.num_bytes = 0

    def __enter__(self) -> Listener:
        head = b""
        while head.count(b"subscribe\r\n") < self._wanted:
            head += self._socket.recv(65_536)
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self.join()
        self._socket.close()

    def run(self) -> None:
        while heard := self._socket.recv(1 << 20):
            self.num_bytes += len(heard)


def _command(*words: str) -> bytes:
    """As it stands on the wire."""
    encoded = [word.encode() for word in words]
    return b"*%d\r\n" % len(encoded) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in encoded)


@dataclass(slots=True)
class Batch:
    """So many running jobs, each of which gains one event in every step. seq: of their next events."""

    queue: Queue
    deliveries: Sequence[Delivery]
    seq: int = 2

    @property
    def logs(self) -> list[str]:
        """Names of the jobs' logs, and of their channels."""
        return [self.queue.keys.tokens(one.id) for one in self.deliveries]

    def events(self) -> list[bytes]:
        """One for each job, as a worker writes them."""
        index = self.seq - 2
        return [
            Event("tokens", self.seq, index=index, token_ids=(97 * number + index,), text=" passenger").encode()
            for number in range(len(self.deliveries))
        ]


async def running_batch(redis: Redis, num_jobs: int) -> Batch:
    """Enqueued, claimed and begun."""
    queue = Queue(redis, f"q{secrets.token_hex(6)}")
    for _ in range(num_jobs):
        await queue.enqueue(Entry(new_job_id(queue.name), b"{}", "digest", max_tokens=512))
    claimed = await queue.claim("w1", "n1", credit=num_jobs, fingerprint="fp", lease_s=LEASE_S)
    assert len(claimed.deliveries) == num_jobs
    started = Event("started", 1, attempt=1, prompt_tokens=32, cached_tokens=0).encode()
    begun = [Append(one.id, one.fence, 1, 0, [started], b"\0" * 128, 32) for one in claimed.deliveries]
    assert await queue.append(begun) == []
    return Batch(queue, claimed.deliveries)


async def by_append(batch: Batch, events: Sequence[bytes]) -> None:
    """As the worker does it: calls of at most 64 jobs, in one round trip."""
    refused = await batch.queue.append(
        [
            Append(one.id, one.fence, batch.seq, batch.seq - 1, [event])
            for one, event in zip(batch.deliveries, events, strict=True)
        ]
    )
    assert refused == [], refused


async def by_xadd(batch: Batch, events: Sequence[bytes]) -> None:
    """The log alone: nobody is told, nobody's right to write is looked at."""
    pipeline = batch.queue.redis.pipeline(transaction=False)
    for log, event in zip(batch.logs, events, strict=True):
        pipeline.execute_command("XADD", log, f"{batch.seq}-0", "e", event)
    await pipeline.execute()


async def by_publish(batch: Batch, events: Sequence[bytes]) -> None:
    """The channel alone: who is not listening has missed it."""
    pipeline = batch.queue.redis.pipeline(transaction=False)
    for log, event in zip(batch.logs, events, strict=True):
        pipeline.execute_command("PUBLISH", log, event)
    await pipeline.execute()


Way = Callable[[Batch, Sequence[bytes]], Awaitable[None]]
WAYS: Mapping[str, tuple[Way, str]] = {
    "append": (by_append, "evalsha"),
    "xadd": (by_xadd, "xadd"),
    "publish": (by_publish, "publish"),
}
"""Each way, and the command in which the server spends its time."""


async def one_round(batch: Batch, way: str, num_steps: int, cost: Cost) -> None:
    """`num_steps` steps in one way, added to its cost."""
    write, command = WAYS[way]
    redis = batch.queue.redis
    before = await Spent.of(redis)
    for _ in range(num_steps):
        events = batch.events()
        began = time.perf_counter()
        await write(batch, events)
        cost.wall_ms.append(1e3 * (time.perf_counter() - began))
        batch.seq += 1
    in_command, in_all = (await Spent.of(redis)).since(before, command)
    num_events = num_steps * len(batch.deliveries)
    cost.command_us.append(in_command / num_events)
    cost.process_us.append(in_all / num_events)


Costs = dict[tuple[str, int], dict[str, Cost]]
"""(appendfsync, jobs a step) -> way -> cost."""


async def measure(server: EmbeddedServer, sizes: Sequence[int], num_rounds: int, num_steps: int) -> Costs:
    """Every way in every round, in turns, so that all of them meet the same machine."""
    costs: Costs = {(fsync, size): {way: Cost() for way in WAYS} for fsync in FSYNCS for size in sizes}
    redis = connect(server.url, name="append-cost")
    try:
        for size in sizes:
            batches = {way: await running_batch(redis, size) for way in WAYS}
            with Listener(server, [log for batch in batches.values() for log in batch.logs]):
                for way, batch in batches.items():
                    await one_round(batch, way, 5, Cost())  # warm
                for number in range(num_rounds):
                    for fsync in FSYNCS:
                        await redis.config_set("appendfsync", fsync)
                        for way in in_turn(number):
                            await one_round(batches[way], way, num_steps, costs[fsync, size][way])
            await redis.flushall()
    finally:
        await redis.aclose()
    return costs


def in_turn(number: int) -> list[str]:
    """The ways, another one first each time."""
    ways, first = list(WAYS), number % len(WAYS)
    return [*ways[first:], *ways[:first]]


HEAD = (
    *("`appendfsync`", "jobs a step", "server, in the command", "server, in all", "append of XADD"),
    *("a step takes: append", "XADD", "PUBLISH", "append of XADD"),
)


def cells(fsync: str, size: int, ways: Mapping[str, Cost]) -> list[str]:
    append, xadd, publish = ways["append"], ways["xadd"], ways["publish"]
    return [
        fsync,
        str(size),
        " / ".join(f"{cost.server_us:.1f}" for cost in (append, xadd, publish)),
        " / ".join(f"{cost.in_all_us:.1f}" for cost in (append, xadd, publish)),
        page.times(append.in_all_us, xadd.in_all_us, digits=1),
        *(f"{cost.p50_ms:.2f} ({cost.p99_ms:.2f})" for cost in (append, xadd, publish)),
        page.times(append.p50_ms, xadd.p50_ms),
    ]


def row_of(server: str, fsync: str, size: int, way: str, cost: Cost) -> dict[str, Any]:
    """For programs."""
    return {
        "server": server,
        "appendfsync": fsync,
        "jobs": size,
        "way": way,
        "server_us_per_job": round(cost.server_us, 2),
        "process_us_per_job": round(cost.in_all_us, 2),
        "step_ms": {"p50": round(cost.p50_ms, 3), "p99": round(cost.p99_ms, 3)},
        "num_steps": len(cost.wall_ms),
    }


def table(costs: Costs) -> str:
    return page.table(HEAD, [cells(fsync, size, ways) for (fsync, size), ways in costs.items()])
