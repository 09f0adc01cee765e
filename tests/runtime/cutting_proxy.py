"""A TCP proxy in front of a real server that loses replies where the test says so."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from urllib.parse import urlsplit


class CuttingProxy:
    """Passes everything on, until a request contains `lose_reply_to`.

    That request still reaches the server; its reply, its connection and all new ones are lost until `reopen`.
    """

    def __init__(self, url: str) -> None:
        self._target = urlsplit(url)
        self._is_open = True
        self._tasks: set[asyncio.Task[None]] = set()
        self.lose_reply_to: bytes | None = None
        self.num_lost = 0
        self.url = ""

    def reopen(self) -> None:
        self._is_open, self.lose_reply_to = True, None

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[CuttingProxy]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        self.url = self._target._replace(netloc=f":{self._target.password}@127.0.0.1:{port}").geturl()
        try:
            yield self
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if self._is_open:
                await self._pass_on(reader, writer)
        finally:
            writer.close()
            self._tasks.discard(task)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self._target.hostname, self._target.port)
        cut = asyncio.Event()
        ways = {
            asyncio.create_task(self._requests(reader, back, cut)),
            asyncio.create_task(_replies(there, writer, cut)),
        }
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            back.close()
            self.num_lost += cut.is_set()
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, cut: asyncio.Event) -> None:
        while request := await reader.read(1 << 16):
            if self.lose_reply_to is not None and self.lose_reply_to in request:
                self._is_open = False
                cut.set()
            writer.write(request)


async def _replies(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, cut: asyncio.Event) -> None:
    """The server has done its work when its reply is here; only then the connection is cut."""
    while reply := await reader.read(1 << 16):
        if cut.is_set():
            return
        writer.write(reply)
