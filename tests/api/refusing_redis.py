"""A server on the way to the real one: for a while it answers every command with one error, then it lets all pass."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType

_GREETINGS = (b"HELLO", b"AUTH", b"CLIENT", b"SELECT")
"""What a client says when it connects; a server that is loading or a replica answers it like any other."""


class RefusingRedis:
    """`refuse(b"READONLY …")`: from now on every command but the greetings is refused so. `relent()`: no more.

    A change ends the connections there are, as a failover or a restart does. num_refused: commands so far.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._refusal: bytes | None = None
        self._server: asyncio.Server | None = None
        self._links: set[asyncio.Task[None]] = set()
        self.port = 0
        self.num_refused = 0

    async def __aenter__(self) -> RefusingRedis:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        await self._hang_up()

    async def refuse(self, refusal: bytes) -> None:
        self._refusal = refusal
        await self._hang_up()

    async def relent(self) -> None:
        self._refusal = None
        await self._hang_up()

    async def _hang_up(self) -> None:
        links = list(self._links)
        for link in links:
            link.cancel()
        await asyncio.gather(*links, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = asyncio.current_task()
        assert link is not None
        self._links.add(link)
        try:
            if self._refusal is None:
                await self._pass_on(reader, writer)
            else:
                await self._refuse_all(reader, writer, self._refusal)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # one of both hung up, or the test wants it so
        finally:
            self._links.discard(link)
            writer.close()

    async def _refuse_all(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, refusal: bytes) -> None:
        while True:
            words = await _command(reader)
            name = words[0].upper()
            if name == b"HELLO":
                writer.write(b"%%1\r\n$5\r\nproto\r\n:%b\r\n" % words[1])
            elif name in _GREETINGS:
                writer.write(b"+OK\r\n")
            else:
                self.num_refused += 1
                writer.write(b"-%b\r\n" % refusal)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._target)
        ways = [asyncio.create_task(_copy(reader, up_writer)), asyncio.create_task(_copy(up_reader, writer))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            up_writer.close()


async def _command(reader: asyncio.StreamReader) -> list[bytes]:
    """The next command of a client: an array of bulk strings."""
    count = int((await reader.readuntil(b"\r\n"))[1:])
    words = []
    for _ in range(count):
        size = int((await reader.readuntil(b"\r\n"))[1:])
        words.append((await reader.readexactly(size + 2))[:-2])
    return words


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while received := await reader.read(65_536):
            writer.write(received)
            await writer.drain()
