"""Readers of server-sent events that compare what they hear with what was to be said, byte for byte."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import orjson
from ops.bench.streams_worker import Script

from jitney.errors import ServerError

SMALL_BUFFER = 4_096
"""Of the socket of a reader that takes nothing, so that this is soon felt at the other end."""


@dataclass
class Heard:
    """What a reader has heard. num_told: frames; was_cut: its connection ended before the answer did."""

    script: Script
    job_id: str = ""
    text: str = ""
    last_id: int = 0
    num_told: int = 0
    is_done: bool = False
    was_cut: bool = False
    ids: list[int] = field(default_factory=list)

    def complaint(self) -> str | None:
        """What is wrong with it; None if it has heard its own answer, whole, once, and in order."""
        if self.text != self.script.whole:
            got, wanted = len(self.text), len(self.script.whole)
            first = next((i for i, (a, b) in enumerate(zip(self.text, self.script.whole, strict=False)) if a != b), got)
            return f"{self.script.name} heard {got} characters of {wanted}; the first wrong one is {first}"
        if any(later <= earlier for earlier, later in zip(self.ids, self.ids[1:], strict=False)):
            return f"{self.script.name} heard ids out of order"
        return None if self.is_done else f"{self.script.name} was not told that it is the end"


async def listen(
    port: int, heard: Heard, queue: str, *, on_event: Callable[[], None], until: asyncio.Event | None = None
) -> None:
    """Ask, and hear all of it. until: after the first event take nothing more before this is set."""
    body = orjson.dumps(
        {"model": queue, "stream": True, "messages": [{"role": "user", "content": heard.script.prompt}]}
    )
    reader, writer = await _connected(port, small=until is not None)
    try:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        writer.write(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body))
        await _hear(reader, heard, on_event, until)
    finally:
        writer.close()


async def come_back(port: int, heard: Heard) -> None:
    """Go on behind the last event that was heard."""
    reader, writer = await _connected(port)
    try:
        path = f"/v1/jobs/{heard.job_id}/events?format=chat.completion.chunk"
        writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\nlast-event-id: {heard.last_id}\r\n\r\n".encode())
        await _hear(reader, heard, lambda: None)
    finally:
        writer.close()


async def first_byte(port: int, script: Script, queue: str) -> tuple[int, int, int, int]:
    """ns of the monotonic clock: asked, claimed by the worker, handed to Redis, first byte of the stream here."""
    heard, at = Heard(script), list[int]()
    asked = time.monotonic_ns()
    await listen(port, heard, queue, on_event=lambda: at.append(time.monotonic_ns()))
    claimed, said, *_ = map(int, heard.text.split())
    return asked, claimed, said, at[0]


async def _connected(port: int, *, small: bool = False) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    connecting = socket.socket()
    connecting.setblocking(False)
    if small:
        connecting.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
    await asyncio.get_running_loop().sock_connect(connecting, ("127.0.0.1", port))
    return await asyncio.open_connection(sock=connecting)


async def _hear(
    reader: asyncio.StreamReader, heard: Heard, on_event: Callable[[], None], until: asyncio.Event | None = None
) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    if " 200 " not in head.split("\r\n")[0]:
        raise ServerError(f"{heard.script.name} was answered {head.splitlines()[0]}")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head.splitlines()[1:])}
    heard.job_id = headers["x-jitney-job-id"]
    event_id, pending = 0, b""
    try:
        async for chunk in _chunks(reader):
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                if line.startswith(b"id: "):
                    event_id = int(line[4:])
                elif line == b"data: [DONE]":
                    heard.is_done = True
                elif line.startswith(b"data: "):
                    _take(heard, orjson.loads(line[6:]), event_id)
                    on_event()
            if until is not None and heard.num_told:
                await until.wait()
    except (asyncio.IncompleteReadError, ConnectionError):
        heard.was_cut = True


def _take(heard: Heard, chunk: dict[str, list[dict[str, dict[str, str]]]], event_id: int) -> None:
    """One frame. Without a new id it belongs to the event whose last frame is still to come, and brings no text."""
    text = "".join(choice["delta"].get("content", "") for choice in chunk["choices"])
    if event_id > heard.last_id:
        heard.last_id = event_id
        heard.ids.append(event_id)
    heard.num_told += 1
    heard.text += text


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int(await reader.readuntil(b"\n"), 16):
        yield (await reader.readexactly(size + 2))[:-2]
    await reader.readuntil(b"\n")
