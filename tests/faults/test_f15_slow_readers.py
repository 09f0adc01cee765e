"""F15: readers that take nothing, or a hundred bytes a second, and subscriptions that are cut."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from pathlib import Path

from tests.api.api_wire import Answer, read_head
from tests.faults.answers import Asked, Asking
from tests.faults.arena import Arena
from tests.faults.conftest import Report
from tests.faults.crowd import PATIENCE_S
from tests.faults.proxy import Proxy
from tests.faults.readers import HttpClient, PythonClient

from jitney.tasks import end_tasks

SLOW_BYTES_PER_S = 100
NUM_SLOW_READERS, NUM_WATCHED, NUM_OTHERS = 24, 4, 8
NUM_TOKENS = 400
PADDING = 32_768
MOST_FOR_A_SLOW_READER = 1 << 20
"""Bytes that an API may keep for one reader, twelve times less than what is said to it meanwhile."""


async def test_f15_a_reader_that_takes_nothing_is_cut_off_and_misses_nothing(
    field: Arena, seed: int, report: Report
) -> None:
    """Its connection fills up until the server ends it; the others notice nothing."""
    await field.redis.config_set("client-output-buffer-limit", "pubsub 1mb 512kb 1")
    await field.start_workers("w1", "w2", "w3")
    async with Proxy(field.server.port, receive_buffer=4_096) as proxy:
        stuck = PythonClient(field.client(proxy), field.ledger, "stuck")
        ids = await field.load(seed, num_bulk=0)
        others = len(field.reading)
        for job_id in ids:
            field.read(stuck, Asked(field.jobs[job_id], {}), job_id)
        await field.streaming()
        before = await subscribers(field)
        proxy.hang("down")
        field.ledger.fault("one reader takes nothing any more")
        channel = field.keys.tokens(ids[0])

        async def is_cut_off() -> bool:
            await field.redis.publish(channel, b"x" * 65_536)
            return len(await subscribers(field) & before) < len(before)

        await field.until(is_cut_off, "the server ends the connection of the one who takes nothing")
        _, pending = await asyncio.wait(field.reading[:others], timeout=PATIENCE_S)
        assert not pending, "others wait for the one who takes nothing"
        proxy.heal()
        figures = report(await field.finished(f"F15 stuck reader #{seed}"))
    assert (figures.summary.num_accepted, figures.summary.num_finished) == (40, 40)
    await field.rests()


async def subscribers(field: Arena) -> set[bytes]:
    """Connections in subscriber mode, by id."""
    listed = await field.command("CLIENT", "LIST", "TYPE", "pubsub")
    text = listed if isinstance(listed, bytes) else b"\n".join(b"id=%b" % str(c["id"]).encode() for c in listed)
    return {line.split()[0] for line in text.splitlines() if line}


async def test_f15_subscriptions_that_are_cut_again_and_again_cost_nothing(
    field: Arena, seed: int, report: Report
) -> None:
    await field.start_workers("w1", "w2", "w3")
    num_cut = 0
    async with field.steady_load(Asking(seed)):
        for _ in range(6):
            await field.more_events(80)
            num_cut += int(await field.command("CLIENT", "KILL", "TYPE", "pubsub"))
            field.ledger.fault("CLIENT KILL TYPE pubsub")
    figures = report(await field.finished(f"F15 cut #{seed}", cut=num_cut))
    assert figures.summary.num_finished == figures.summary.num_accepted
    assert num_cut > 6
    await field.rests()


class SlowReader:
    """Reads a few events over HTTP as anybody does, then 100 bytes a second until it is ended."""

    def __init__(self, field: Arena, job_id: str, number: int) -> None:
        self.job_id = job_id
        self.name = f"slow{number}"
        self._asked = Asked(field.jobs[job_id], {})
        self._field = field
        self._client = HttpClient(field.ports, field.queue_name, field.ledger, self.name)
        self.cursor = 0

    async def read_slowly(self, begun: asyncio.Event) -> None:
        answer = await self._connect()
        try:
            async for frame in answer.frames():
                self._field.ledger.saw(self._asked.name, self.job_id, self.name, frame.data)
                self.cursor = int(frame.id)
                if self.cursor >= 3:
                    break
            begun.set()
            with contextlib.suppress(ConnectionError):
                while await self._sip(answer):
                    pass
        finally:
            await answer.close()

    async def _sip(self, answer: Answer) -> bytes:
        await asyncio.sleep(1)  # this is the fault, not a wait for something
        return await answer.reader.read(SLOW_BYTES_PER_S)

    async def go_on(self) -> None:
        """Comes back with its cursor, at full speed."""
        await self._client.read(self._asked, self.job_id, cursor=self.cursor)

    async def _connect(self) -> Answer:
        """With a small receive buffer, so that the kernel does not read in its place."""
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self._field.ports()[0]))
        reader, writer = await asyncio.open_connection(sock=sock, limit=2 * PADDING)
        writer.write(f"GET /v1/jobs/{self.job_id}/events HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
        return await read_head(reader, writer)


def is_cut(line: str) -> bool:
    return "slow_reader_cut_off" in line


def forget_peak(pid: int) -> int:
    """Count a process's peak of memory from now on; what it has now."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return peak_bytes(pid)


def peak_bytes(pid: int) -> int:
    """The most memory that a process has had."""
    words = Path(f"/proc/{pid}/status").read_text().split("VmHWM:")[1].split()
    return int(words[0]) * 1_024


async def test_f15_readers_of_a_hundred_bytes_a_second_cost_nobody_anything(
    field: Arena, seed: int, report: Report
) -> None:
    """The same jobs twice: with quick readers alone, then with slow ones besides. Judged by steps, not by time."""
    await field.redis.config_set("client-output-buffer-limit", "pubsub 1mb 512kb 1")
    await field.write_card()
    # Slow readers are cut when the others have long finished, so that all that is said meanwhile waits for them.
    api = await field.start_api("slow", write_timeout_s=1_000 * field.step_s)
    field.apis.pop("api")[0].send(signal.SIGKILL)
    slow: list[SlowReader] = []
    figures = []
    for name in ("quick", "slow"):
        ids = await field.load(seed, num_streams=NUM_WATCHED + NUM_OTHERS, num_bulk=0, asking=same(seed, name))
        quick = field.reading[:]
        before = forget_peak(api.pid)
        if name == "slow":
            slow = [SlowReader(field, ids[number % NUM_WATCHED], number) for number in range(NUM_SLOW_READERS)]
        begun = [asyncio.Event() for _ in slow]
        dripping = [asyncio.create_task(one.read_slowly(ready)) for one, ready in zip(slow, begun, strict=True)]
        await field.start_worker(name, "--padding", str(PADDING))
        await asyncio.wait(quick, timeout=PATIENCE_S)
        assert all(task.done() for task in quick), "somebody waits for the slow ones"
        assert all(ready.is_set() for ready in begun)
        # Said by the API: at this speed a reader comes to the end of what is on its way in hours.
        await api.until_any(is_cut, count=len(slow), what="every slow reader cut off")
        await end_tasks(dripping)
        figures.append((field.num_steps(name), peak_bytes(api.pid) - before))
        field.workers[name].send(signal.SIGTERM)
        await field.workers[name].ended()
    (steps_before, _), (steps, grown) = figures
    await asyncio.gather(*(one.go_on() for one in slow))
    row = report(
        await field.finished(f"F15 100 B/s #{seed}", steps=f"{steps_before} then {steps}", grown_mb=grown >> 20)
    )
    assert row.summary.num_finished == row.summary.num_accepted == 2 * (NUM_WATCHED + NUM_OTHERS)
    assert len([line for line in api.lines if is_cut(line)]) == NUM_SLOW_READERS
    assert steps < 1.1 * steps_before
    assert grown < NUM_SLOW_READERS * MOST_FOR_A_SLOW_READER


def same(seed: int, name: str) -> Asking:
    """The same requests under other names."""
    return Asking(
        seed, (NUM_TOKENS, NUM_TOKENS), prefix=name, fixed={"ignore_eos": True, "stop": None, "stop_token_ids": ()}
    )
