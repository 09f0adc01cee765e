"""An endpoint on the loopback address: it writes down what it is sent, and answers what a test tells it to."""

from __future__ import annotations

import asyncio
import base64
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from jitney.webhooks.settings import WebhookSettings

PATIENCE_S = 20.0
KEY = b"0123456789abcdef0123456789abcdef"
SECRET = f"whsec_{base64.b64encode(KEY).decode()}"
OK = b"HTTP/1.1 204 No Content\r\n\r\n"


def answer(status: int, *lines: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status} As Told", *lines, "content-length: 0", "", ""]).encode()


@dataclass(frozen=True)
class Told:
    """One request."""

    line: str
    headers: dict[str, str]
    body: bytes

    @property
    def event(self) -> dict[str, Any]:
        return orjson.loads(self.body)


@dataclass
class Receiver:
    """`answers`: for the next requests, in order; then 204. `on_told`: awaited before the answer is sent."""

    context: ssl.SSLContext | None = None
    told: list[Told] = field(default_factory=list)
    answers: deque[bytes] = field(default_factory=deque)
    on_told: Callable[[Told], Awaitable[None]] | None = None
    num_connections: int = 0
    _server: asyncio.Server | None = None

    async def __aenter__(self) -> Receiver:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self.context)
        self._news = asyncio.Condition()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()

    @property
    def port(self) -> int:
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    def url(self, host: str = "127.0.0.1", path: str = "/hook", scheme: str = "http") -> str:
        return f"{scheme}://{host}:{self.port}{path}"

    async def wait_told(self, count: int) -> list[Told]:
        """The first `count` requests, as soon as they are there."""
        async with asyncio.timeout(PATIENCE_S), self._news:
            await self._news.wait_for(lambda: len(self.told) >= count)
        return self.told[:count]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            line, *rest = (await reader.readuntil(b"\r\n\r\n")).decode().rstrip().split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (each.partition(":") for each in rest)}
            told = Told(line, headers, await reader.readexactly(int(headers["content-length"])))
            async with self._news:
                self.told.append(told)
                self._news.notify_all()
            if self.on_told is not None:
                await self.on_told(told)
            writer.write(self.answers.popleft() if self.answers else OK)
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def settings_for(receiver: Receiver, *hosts: str, **fields: Any) -> WebhookSettings:
    """Settings under which the receiver may be called, by its address or by `hosts`."""
    names = hosts or ("127.0.0.1",)
    defaults: dict[str, Any] = {
        "allowed_hosts": tuple(f"{name}:{receiver.port}" for name in names),
        "private_hosts": names,
        "secret": SECRET,
        "allow_http": True,
    }
    return WebhookSettings.load(**(defaults | fields))


def resolving(*answers: Sequence[str]) -> Any:
    """A resolver that gives these addresses, one answer after the other, the last one for ever; `.asked` counts."""
    left = deque(answers)

    async def resolve(host: str, port: int) -> Sequence[str]:
        resolve.asked.append(host)  # type: ignore[attr-defined]
        return left.popleft() if len(left) > 1 else left[0]

    resolve.asked = []  # type: ignore[attr-defined]
    return resolve
