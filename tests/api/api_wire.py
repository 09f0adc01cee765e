"""HTTP by hand: what stands on the wire, byte for byte, and a strict reader of server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from jitney.keys import Keys

PATIENCE_S = 20.0
"""Nothing here takes so long; a test that waits longer has failed."""


@dataclass(frozen=True)
class Frame:
    """One dispatched event: the id in force, its data, and the comments seen since the one before."""

    id: str
    data: str
    comments: tuple[str, ...] = ()

    def json(self) -> Any:
        return json.loads(self.data)


@dataclass
class Answer:
    """Status line and headers have been read; the body is read on demand."""

    status: int
    headers: dict[str, str]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    raw: bytearray = field(default_factory=bytearray)

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body's pieces as they were written, up to the promised end; IncompleteReadError if it never comes."""
        if self.headers.get("transfer-encoding") != "chunked":
            body = await _within(self.reader.readexactly(int(self.headers.get("content-length", "0"))))
            if body:
                yield body
            return
        while size := int(await _within(self.reader.readuntil(b"\n")), 16):
            piece = await _within(self.reader.readexactly(size + 2))
            self.raw += piece[:-2]
            yield piece[:-2]
        await _within(self.reader.readline())

    async def body(self) -> bytes:
        return b"".join([chunk async for chunk in self.chunks()])

    async def json(self) -> Any:
        return json.loads(await self.body())

    async def frames(self) -> AsyncIterator[Frame]:
        """Events as a browser dispatches them; anything but `id`, `data` and comments is an error."""
        last_id, pending = "", b""
        data, comments = list[str](), list[str]()
        async for chunk in self.chunks():
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                text = line.decode()
                name, _, value = text.partition(":")
                value = value.removeprefix(" ")
                if not text:
                    if data:
                        yield Frame(last_id, "\n".join(data), tuple(comments))
                        data, comments = [], []
                elif not name:
                    comments.append(value)
                elif name == "id":
                    last_id = value
                elif name == "data":
                    data.append(value)
                else:
                    raise AssertionError(f"unexpected line {text!r}")
        assert not pending, "the stream ended within a line"
        assert not data, "the stream ended within an event"

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await _within(self.writer.wait_closed())


async def _within(awaitable: Any) -> Any:
    return await asyncio.wait_for(awaitable, PATIENCE_S)


async def send(port: int, head: str, body: bytes = b"") -> Answer:
    """Send a request as it stands in `head` (without the blank line) and read the answer's head."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head.replace("\n", "\r\n").encode("latin-1") + b"\r\n\r\n" + body)
        return await read_head(reader, writer)
    except BaseException:
        writer.close()  # nobody else knows of it
        raise


async def read_head(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Answer:
    """Status and headers of the next answer on a connection."""
    status_line, *lines = (await _within(reader.readuntil(b"\r\n\r\n"))).decode("latin-1").strip().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return Answer(int(status_line.split()[1]), headers, reader, writer)


async def ask(port: int, method: str, path: str, body: Any = None, **headers: str) -> Answer:
    """A well-formed request. Header names have `_` for `-`; `body` is JSON unless it is bytes."""
    encoded = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = {"host": "localhost", "content-length": str(len(encoded))}
    if body is not None:
        lines["content-type"] = "application/json"
    lines |= {name.replace("_", "-"): value for name, value in headers.items()}
    head = "\n".join([f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in lines.items())])
    return await send(port, head, encoded)


async def until(ask: Callable[[], Awaitable[Any]], wanted: Any) -> None:
    """Ask again until the answer is `wanted`."""
    clock = asyncio.get_running_loop().time
    deadline = clock() + PATIENCE_S
    while (answer := await ask()) != wanted:
        assert clock() < deadline, f"still {answer!r}, not {wanted!r}"
        await asyncio.sleep(0)


async def num_readers(redis: Any, job_id: str) -> int:
    """Connections that are subscribed to the job's channel."""
    [(_, number)] = await redis.pubsub_numsub(Keys(job_id.rpartition(".")[0]).tokens(job_id))
    return int(number)
