"""A server that answers everything with the same refusal for a while: a proxy that knows commands from each other."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

HELLOS = {b"HELLO", b"AUTH", b"CLIENT", b"SUBSCRIBE", b"UNSUBSCRIBE", b"PING", b"QUIT"}
"""What a server answers whatever its mood is."""

READS = {b"XRANGE", b"EXISTS", b"GET", b"HMGET", b"HGETALL", b"HGET", b"HKEYS", b"TIME", b"ZRANGE", b"INFO"}


class Moody:
    """Passes everything on, unless there is a `mood`: the line of an error that answers every command instead.

    only_writes: reads are answered all the same, as by a replica. num_refused: commands answered so.
    """

    def __init__(self, target: int) -> None:
        self.target = target
        self.port = 0
        self.mood: bytes | None = None
        self.only_writes = False
        self.num_refused = 0
        self._is_refusing = False
        self._joined = asyncio.Event()
        self._listening: set[asyncio.StreamWriter] = set()
        self._held: set[asyncio.StreamWriter] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def turn(self, mood: str | None, *, only_writes: bool = False) -> None:
        """Another mood from now on. Connections break, as when a server is replaced."""
        self.mood, self.only_writes = mood.encode() if mood else None, only_writes
        self._is_refusing = False
        self._break_all()

    def refuse(self) -> None:
        """Every connection breaks, and so does every new one, until the next `turn`."""
        self._is_refusing = True
        self._break_all()

    def _break_all(self) -> None:
        self._joined.clear()
        for writer in self._writers:
            writer.transport.abort()

    async def until_joined(self) -> None:
        """Until somebody has connected since all connections were broken."""
        await self._joined.wait()

    def hold(self) -> None:
        """Nothing passes any more on the connections there are, either way, and none of them breaks; new ones serve."""
        self._held |= self._writers

    def hold_subscriptions(self) -> None:
        """The same, for those connections alone on which somebody listens."""
        self._held |= self._listening

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[Moody]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=1 << 22)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            await asyncio.sleep(0)  # who has been accepted is among the tasks from now on
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            for _ in range(8):  # a transport that was aborted closes its socket some rounds of the loop later
                await asyncio.sleep(0)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            with contextlib.suppress(asyncio.CancelledError):  # the test is over
                await self._serve_one(reader, writer)
        finally:
            self._writers.discard(writer)
            self._tasks.discard(task)
            writer.transport.abort()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_refusing:
            return
        there, back = await asyncio.open_connection("127.0.0.1", self.target)
        self._joined.set()
        replies = asyncio.create_task(self._pass_on(there, writer))
        try:
            while command := await _read_command(reader):
                self._answer(command, writer, back)
        finally:
            replies.cancel()
            back.transport.abort()
            await asyncio.gather(replies, return_exceptions=True)

    def _answer(self, command: list[bytes], client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        name = command[0].upper()
        if client in self._held:
            return
        if name == b"SUBSCRIBE":
            self._listening.add(client)
        if self.mood is None or name in HELLOS or (self.only_writes and name in READS):
            server.write(_encoded(command))
            return
        self.num_refused += 1
        client.write(b"-" + self.mood + b"\r\n")

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while reply := await reader.read(1 << 16):
            if writer not in self._held:
                writer.write(reply)


async def _read_command(reader: asyncio.StreamReader) -> list[bytes]:
    """Its words; none at the connection's end."""
    try:
        count = int((await reader.readuntil(b"\r\n"))[1:])
        words = []
        for _ in range(count):
            size = int((await reader.readuntil(b"\r\n"))[1:])
            words.append((await reader.readexactly(size + 2))[:-2])
    except (asyncio.IncompleteReadError, ConnectionError):
        return []
    return words


def _encoded(command: list[bytes]) -> bytes:
    return b"*%d\r\n" % len(command) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in command)
