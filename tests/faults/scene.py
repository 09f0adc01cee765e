"""What all parts of a test's arena share: where things are, who was asked what, and how one waits."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError
from tests.faults.answers import Alone, Answer
from tests.faults.children import PATIENCE_S, Child
from tests.faults.ledger import Ledger
from tests.faults.proxy import Proxy
from tests.faults.pulse import KeyPulse, Pulse

from jitney.connection import Redis, connect
from jitney.embedded import EmbeddedServer
from jitney.keys import Keys
from jitney.queue import Queue
from jitney.tasks import end_tasks


@dataclass
class Scene:
    """answers: by name of the request. jobs: every job id with the name of its request. progress: the highest
    seq that any reader of a job was given. queue_pulse: beats when the queue's places change, reader_pulse when a
    reader is given something.
    """

    folder: Path
    tokenizer: Path
    alone: Alone
    server: EmbeddedServer
    queue_name: str
    ledger: Ledger
    lease_s: float
    step_s: float
    workers: dict[str, Child] = field(default_factory=dict)
    apis: dict[str, tuple[Child, int]] = field(default_factory=dict)
    answers: dict[str, Answer] = field(default_factory=dict)
    jobs: dict[str, str] = field(default_factory=dict)
    progress: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    reader_pulse: Pulse = field(default_factory=Pulse)
    queue_pulse: KeyPulse = field(init=False)
    _redis: Redis | None = None
    _listening: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.queue_pulse = KeyPulse(lambda: connect(self.server.url, name="arena-pulse"), self.keys.prefix)

    @property
    def redis(self) -> Redis:
        """The tests' own view, past every proxy."""
        if self._redis is None:
            self._redis = connect(self.server.url, name="arena")
        return self._redis

    @property
    def keys(self) -> Keys:
        return Keys(self.queue_name)

    @property
    def queue(self) -> Queue:
        return Queue(self.redis, self.queue_name)

    def url(self, proxy: Proxy | None = None) -> str:
        """The server's address, perhaps through a proxy in front of it."""
        return self.server.url.replace(f":{self.server.port}/", f":{proxy.port}/") if proxy else self.server.url

    async def command(self, *words: str | int) -> Any:
        """A command that the client has no typed method for."""
        return await self.command_at(self.redis, *words)

    async def command_at(self, redis: Any, *words: str | int) -> Any:
        return await redis.execute_command(*words)

    def redis_of(self, server: EmbeddedServer, *, timeout_s: float = 5.0) -> Redis:
        """Somebody else's connection. To be closed."""
        return connect(server.url, name="arena-other", timeout_s=timeout_s)

    async def now_at(self, server: EmbeddedServer) -> None:
        """The data is on another server from now on."""
        if self._redis is not None:
            await self._redis.aclose()
        self._redis, self.server = None, server

    async def until(self, wanted: Callable[[], Awaitable[Any]], what: str, patience_s: float = PATIENCE_S) -> Any:
        """Ask at every beat of the queue's keys until the answer is true; what it is.

        Errors of a server that is away count as no.
        """
        if self._listening is None:
            self._listening = asyncio.create_task(self.queue_pulse.run(), name="pulse")
        clock = asyncio.get_running_loop().time
        deadline = clock() + patience_s
        while True:
            with contextlib.suppress(OSError, RedisError):
                if answer := await wanted():
                    return answer
            assert clock() < deadline, f"not within {patience_s:g} s: {what}"
            await self.queue_pulse.wait()

    async def told(self, wanted: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
        """Ask at every event that a reader is given until the answer is true."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + patience_s
        while not wanted():
            assert clock() < deadline, f"not within {patience_s:g} s: {what}"
            await self.reader_pulse.wait()

    async def close_views(self) -> None:
        if self._listening is not None:
            await end_tasks([self._listening])
        if self._redis is not None:
            await self._redis.aclose()
