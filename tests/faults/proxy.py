"""A TCP proxy that misbehaves on demand: what a bad network does to a connection, one method for each."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from dataclasses import dataclass, field
from typing import Literal

from tests.faults.children import PATIENCE_S
from tests.faults.pulse import Pulse

Way = Literal["up", "down"]
"""up: from the client to the server. down: back."""

CHUNK = 65_536


@dataclass(eq=False, slots=True)
class _Link:
    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def abort(self) -> None:
        """RST on both sides: with a linger of zero the kernel sends no farewell."""
        for writer in (self.client, self.server):
            sock = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            writer.transport.abort()


class Proxy:
    """Listens on `port` of 127.0.0.1 and speaks to `target`, which may be changed while it runs.

    num_passed: bytes that went through, each way. num_cut: connections it ended. Settings hold for what has
    not been passed on yet, on old connections as on new ones.
    """

    def __init__(self, target: int, *, receive_buffer: int | None = None) -> None:
        self.target = target
        self.receive_buffer = receive_buffer
        self.port = 0
        self.delay_s = 0.0
        self.slice_bytes: int | None = None
        self.cut_reply_after: int | None = None
        self.num_passed: dict[Way, int] = {"up": 0, "down": 0}
        self.num_cut = 0
        self._cut_pulse = Pulse()
        self._is_refusing = False
        self._dropping: set[Way] = set()
        self._open = {"up": asyncio.Event(), "down": asyncio.Event()}
        self._links: set[_Link] = set()
        self._ever: list[_Link] = []
        self._server: asyncio.Server | None = None
        self.heal()

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_exception: object) -> None:
        assert self._server is not None
        self._server.close()
        for link in self._ever:  # those too that wait for a reader who takes nothing
            link.abort()
        await asyncio.gather(*(task for link in self._ever for task in link.tasks), return_exceptions=True)
        for _ in range(8):  # a transport that was aborted closes its socket some rounds of the loop later
            await asyncio.sleep(0)

    # --- faults ---

    def heal(self) -> None:
        """Everything passes again. What was dropped stays dropped; what hung arrives now."""
        self.delay_s, self.slice_bytes, self.cut_reply_after = 0.0, None, None
        self._is_refusing = False
        self._dropping.clear()
        for gate in self._open.values():
            gate.set()

    def hang(self, *ways: Way) -> None:
        """Connections stay, and nothing passes (that way; both without one): a cable that was pulled."""
        for way in ways or ("up", "down"):
            self._open[way].clear()

    def drop(self, *ways: Way) -> None:
        """Bytes vanish. Only for connections that will be reset before they are healed."""
        self._dropping |= set(ways or ("up", "down"))

    def reset(self) -> None:
        """RST every connection there is. New ones are taken."""
        for link in list(self._links):
            self._cut(link)

    async def cuts(self, num_more: int) -> None:
        """Wait until so many more connections have been cut."""
        wanted = self.num_cut + num_more
        async with asyncio.timeout(PATIENCE_S):
            while self.num_cut < wanted:
                await self._cut_pulse.wait()

    def _cut(self, link: _Link) -> None:
        self.num_cut += 1
        link.abort()
        self._cut_pulse.beat()

    def refuse(self) -> None:
        """Reset every connection there is, and every one that comes, at once."""
        self._is_refusing = True
        self.reset()

    def cut_in_reply(self, num_bytes: int) -> None:
        """Each connection is reset once so many more bytes of a reply have been passed on: in the middle of it."""
        self.cut_reply_after = num_bytes

    # --- the way through ---

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_refusing:
            writer.transport.abort()
            return
        try:
            server_reader, server_writer = await self._connect()
        except OSError:
            writer.transport.abort()
            return
        link = _Link(writer, server_writer)
        self._links.add(link)
        self._ever.append(link)
        link.tasks = [
            asyncio.create_task(self._pass(link, reader, server_writer, "up")),
            asyncio.create_task(self._pass(link, server_reader, writer, "down")),
        ]
        try:
            await asyncio.wait(link.tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._links.discard(link)
            for task in link.tasks:
                task.cancel()
            link.client.close()
            link.server.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        sock = socket.socket()
        sock.setblocking(False)
        if self.receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self.receive_buffer)
        try:
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.target))
        except OSError:
            sock.close()
            raise
        return await asyncio.open_connection(sock=sock)

    async def _pass(self, link: _Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: Way) -> None:
        passed = 0
        with contextlib.suppress(ConnectionError, OSError):
            while received := await reader.read(CHUNK):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)  # this is the latency, not a wait for something
                await self._open[way].wait()
                if way in self._dropping:
                    continue
                limit = self.cut_reply_after if way == "down" else None
                if limit is not None and passed + len(received) >= limit:
                    writer.write(received[: max(0, limit - passed)])
                    await writer.drain()
                    self._cut(link)
                    return
                await self._write(writer, received)
                passed += len(received) if limit is not None else 0
                self.num_passed[way] += len(received)

    async def _write(self, writer: asyncio.StreamWriter, received: bytes) -> None:
        if self.slice_bytes is None:
            writer.write(received)
            await writer.drain()
            return
        for start in range(0, len(received), self.slice_bytes):
            writer.write(received[start : start + self.slice_bytes])
            await writer.drain()
            await asyncio.sleep(0)
