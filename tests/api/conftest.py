"""A real API on a real socket over a real server; a worker that is scripted, at the level of the protocol."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import uvicorn
from openai import AsyncOpenAI
from tests.api.api_wire import PATIENCE_S, Answer, ask, send

from jitney.connection import Redis, connect_blocking
from jitney.messages import Event, JobSpec, usage_of
from jitney.queue import Append, Delivery, Ending, Queue
from jitney_api.batches.settings import BatchSettings
from jitney_api.connections import server_config
from jitney_api.service import Service
from jitney_api.settings import ApiSettings

PROMPT_TOKENS = 7


@dataclass
class ScriptedJob:
    """A claimed job. `say` publishes at once, `finish` and `fail` end it, each as a worker's append or finish.

    started: what its first event says besides.
    """

    queue: Queue
    delivery: Delivery
    seq: int = 0
    num_tokens: int = 0
    started: dict[str, Any] = field(default_factory=dict)
    positions: dict[int, int] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return self.delivery.id

    @property
    def spec(self) -> JobSpec:
        return JobSpec.decode(self.delivery.body)

    def _next(self, type: str, **fields: Any) -> bytes:
        self.seq += 1
        return Event(type=type, seq=self.seq, **fields).encode()

    def _started(self, prompt_logprobs: tuple[Any, ...] | None = None) -> list[bytes]:
        if self.seq:
            return []
        told = {"attempt": 1, "prompt_tokens": PROMPT_TOKENS, "cached_tokens": 0, "prompt_logprobs": prompt_logprobs}
        return [self._next("started", **told, **self.started)]

    def _tokens(self, text: str, token_ids: list[int], choice: int = 0, **fields: Any) -> bytes:
        index = self.positions.get(choice, 0)
        self.positions[choice] = index + len(token_ids)
        self.num_tokens += len(token_ids)
        return self._next("tokens", choice=choice, index=index, token_ids=tuple(token_ids), text=text, **fields)

    async def say(self, *texts: str, prompt_logprobs: tuple[Any, ...] | None = None, **fields: Any) -> None:
        """One `tokens` event of one token for each text, all in one append. prompt_logprobs: for `started`."""
        first = self.seq + 1
        events = self._started(prompt_logprobs)
        for text in texts:
            events.append(self._tokens(text, [100 + self.num_tokens], **fields))
        append = Append(self.delivery.id, self.delivery.fence, first, self.num_tokens, events)
        assert await self.queue.append([append]) == []

    async def finish(self, text: str = "", reason: str = "stop") -> None:
        """The choice's last event and the terminal one."""
        first = self.seq + 1
        events = [*self._started(), self._tokens(text, [2], finish_reason=reason)]
        ended = ({"choice": 0, "finish_reason": reason, "num_tokens": self.num_tokens},)
        events.append(self._next("finished", choices=ended, usage=usage_of(PROMPT_TOKENS, self.num_tokens, 3)))
        await self._end(first, "finished", events)

    async def fail(self, **error: Any) -> None:
        first = self.seq + 1
        wire = {"type": "server_error", "code": "internal_error", "message": "it broke", "param": None} | error
        event = self._next("failed", error=wire, usage=usage_of(PROMPT_TOKENS, self.num_tokens))
        await self._end(first, "failed", [event])

    async def _end(self, first: int, reason: str, events: list[bytes]) -> None:
        ending = Ending(self.delivery.id, self.delivery.fence, first, self.num_tokens, reason, events)
        assert await self.queue.finish(ending) == "ok"


class ScriptedWorker:
    """Claims through the queue like any worker; what it says is up to the test."""

    def __init__(self, redis: Redis, blocking: Redis, name: str) -> None:
        self.queue = Queue(redis, name)
        self._blocking = blocking

    async def claim(self) -> ScriptedJob:
        """The next job, as soon as there is one."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                claimed = await self.queue.claim("w", secrets.token_hex(8), credit=1, fingerprint="fp", lease_s=60)
                if claimed.deliveries:
                    return ScriptedJob(self.queue, claimed.deliveries[0])
                await self.queue.wait_bell(self._blocking, "fp", 1.0)

    async def serve(self, *texts: str, count: int = 1) -> list[ScriptedJob]:
        """Claim `count` jobs, one after the other, and let each say `texts` and finish."""
        jobs = []
        for _ in range(count):
            job = await self.claim()
            await job.say(*texts)
            await job.finish()
            jobs.append(job)
        return jobs


@dataclass
class Api:
    """A running API: where it listens, and how to ask it something about the test's queue."""

    port: int
    model: str
    server: uvicorn.Server
    answers: list[Answer] = field(default_factory=list)

    @property
    def service(self) -> Service:
        """For tests that started the API in their own event loop."""
        service: Service = self.server.config.app.state.service  # type: ignore[union-attr]
        return service

    async def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """A well-formed request on a connection of its own, which stays open until the test's end."""
        answer = await ask(self.port, method, path, body, **headers)
        self.answers.append(answer)
        return answer

    async def send(self, head: str, body: bytes = b"") -> Answer:
        """A request exactly as it stands in `head`."""
        answer = await send(self.port, head, body)
        self.answers.append(answer)
        return answer

    async def post(self, path: str, body: Any = None, **headers: str) -> Answer:
        return await self.ask("POST", path, body, **headers)

    async def get(self, path: str, **headers: str) -> Answer:
        return await self.ask("GET", path, **headers)

    async def delete(self, path: str, **headers: str) -> Answer:
        return await self.ask("DELETE", path, **headers)

    async def hang_up(self) -> None:
        for answer in self.answers:
            await answer.close()

    async def chat(self, content: str = "hello", **fields: Any) -> Answer:
        body = {"model": self.model, "messages": [{"role": "user", "content": content}], **fields}
        return await self.post("/v1/chat/completions", body)

    async def complete(self, prompt: Any = "hello", **fields: Any) -> Answer:
        return await self.post("/v1/completions", {"model": self.model, "prompt": prompt, **fields})

    async def create_job(self, **fields: Any) -> str:
        answer = await self.post("/v1/jobs", {"model": self.model, "prompt": "hello", **fields})
        assert answer.status == 202
        return (await answer.json())["id"]


StartApi = Callable[..., Awaitable[Api]]


FILES = TemporaryDirectory(prefix="jitney-test-files-")
"""Where the APIs of this run keep what is uploaded, unless a test says otherwise."""


def make_server(**settings: Any) -> tuple[uvicorn.Server, socket.socket]:
    settings = {"batch": BatchSettings(files=FILES.name)} | settings
    config = server_config(ApiSettings(**settings), log_level="critical", timeout_graceful_shutdown=1)
    listening = socket.socket()
    # Small, so that a reader who takes nothing is felt before the kernel has swallowed megabytes.
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65_536)
    listening.bind(("127.0.0.1", 0))
    listening.listen(64)  # whoever connects from now on waits until the server accepts
    return uvicorn.Server(config), listening


@pytest.fixture
async def start_api(redis_url: str, queue_name: str) -> AsyncIterator[StartApi]:
    """`await start_api(headers_hold_s=0.1)`: one more API process' worth of API, in this test's event loop."""
    async with contextlib.AsyncExitStack() as running:

        async def start(**settings: Any) -> Api:
            server, listening = make_server(**({"redis_url": redis_url} | settings))
            serving = asyncio.create_task(server.serve([listening]))
            api = Api(listening.getsockname()[1], queue_name, server)

            async def stop() -> None:
                await api.hang_up()
                server.should_exit = True
                await asyncio.wait_for(serving, PATIENCE_S)

            running.push_async_callback(stop)
            assert (await api.get("/livez")).status == 200
            return api

        yield start


@pytest.fixture(scope="session")
def shared_server(redis_url: str) -> Iterator[tuple[uvicorn.Server, int]]:
    """One API with its defaults, in a thread and event loop of its own, for the whole run."""
    server, listening = make_server(redis_url=redis_url)
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    yield server, listening.getsockname()[1]
    server.should_exit = True
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


@pytest.fixture
async def api(shared_server: tuple[uvicorn.Server, int], queue_name: str, write_queue_card: Any) -> AsyncIterator[Api]:
    """The shared API, and a card of the test's own queue."""
    await write_queue_card()
    server, port = shared_server
    api = Api(port, queue_name, server)
    yield api
    await api.hang_up()


@pytest.fixture
async def worker(redis: Redis, redis_url: str, queue_name: str) -> AsyncIterator[ScriptedWorker]:
    blocking = connect_blocking(redis_url, block_s=1.0)
    yield ScriptedWorker(redis, blocking, queue_name)
    await blocking.aclose()


@pytest.fixture
async def openai(api: Api) -> AsyncIterator[AsyncOpenAI]:
    """The official client; it never repeats a request, so that a test sees the first answer."""
    async with AsyncOpenAI(base_url=f"http://127.0.0.1:{api.port}/v1", api_key="none", max_retries=0) as client:
        yield client
