"""`LocalStack`: server, API, workers and bridges up in order, down in an order that drains."""

from __future__ import annotations

import asyncio
import fcntl
import os
import sys
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NoReturn

from jitney.durability import Durability
from jitney.embedded import EmbeddedServer
from jitney.errors import ServerError
from jitney.tasks import end_tasks
from jitney_worker.stack.bridges import bridges
from jitney_worker.stack.children import Child

READY_TIMEOUT_S = 300.0
MAX_RESTARTS = 5
LOOK_EVERY_S = 0.5
API_GRACE_S = 3.0
STOP_MARGIN_S = 5.0
"""Of the drain time, what is kept for handing jobs back, the API and the server."""


@dataclass(frozen=True, slots=True)
class StackSettings:
    """What to start. redis_url: absent = the embedded server. worker_flags: passed to every worker.

    durability: strict = the embedded server flushes before it answers, as strict clients ask of it.
    bulk: also start the bridges: `jitney rq-worker`, and Celery's worker with its beat.
    metrics_port: of the first worker; the others take those behind it. Absent = none.
    """

    data_dir: Path
    queue: str
    redis_url: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    num_workers: int = 1
    worker_flags: tuple[str, ...] = ()
    num_threads: int | None = None
    drain_timeout_s: float = 20.0
    environment: dict[str, str] = field(default_factory=dict)
    durability: Durability = "default"
    bulk: bool = False
    metrics_port: int | None = None


class LocalStack:
    """The stack as one value: `async with LocalStack(settings) as stack`, then `stack.redis_url`, `stack.api_url`.

    bridges: what the bridges said when they were ready; empty without them.
    """

    def __init__(self, settings: StackSettings) -> None:
        self._settings = settings
        self._server: EmbeddedServer | None = None
        self._lock: IO[str] | None = None
        self._api: Child | None = None
        self._workers: list[Child] = []
        self._bridges: list[Child] = []
        self.redis_url = settings.redis_url or ""
        self.api_url = ""
        self.bridges = ""

    async def __aenter__(self) -> LocalStack:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Until all serve. Cut short or failed, it leaves to `stop` what has been started."""
        try:
            self._settings.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise self._no_folder(error) from None
        if self._settings.redis_url is None:
            await self._start_server()
        await self._start_children()

    async def keep_up(self) -> NoReturn:
        """A worker, a bridge or the server that ends by itself is started again: jobs and their readers wait for it.

        Raises ServerError that says who ended, and how: the API, or others once too often.
        """
        keeping = [asyncio.create_task(keep) for keep in (self._keep_children_up(), self._keep_server_up())]
        try:
            await asyncio.gather(*keeping)
        finally:
            await end_tasks(keeping)
        raise AssertionError("neither of them returns")

    async def _keep_server_up(self) -> None:
        """Without its server everybody would wait for ever. It comes back where they look for it, with its file."""
        for num_restarts in range(1, MAX_RESTARTS + 2):
            while self._server is None or self._server.is_alive:  # noqa: ASYNC110 - another process
                await asyncio.sleep(LOOK_EVERY_S)
            if num_restarts > MAX_RESTARTS:
                raise ServerError("the Redis server has ended once too often, so the whole stack stops")
            print("the Redis server has ended; starting it again", file=sys.stderr, flush=True)
            self._server.launch()
            await asyncio.to_thread(self._server.wait_until_ready)
            print("the Redis server answers again", file=sys.stderr, flush=True)

    async def _keep_children_up(self) -> None:
        for num_restarts in range(1, MAX_RESTARTS + 2):
            child, how = await self._one_ended()
            if child is self._api or num_restarts > MAX_RESTARTS:
                raise ServerError(f"{child.name} {how}, so the whole stack stops; what it said is above")
            print(f"{child.name} {how}; starting it again", file=sys.stderr, flush=True)
            again = child.anew()
            for children in (self._workers, self._bridges):
                children[:] = [again if one is child else one for one in children]
            await again.start()
            await again.until_ready(READY_TIMEOUT_S)

    async def _one_ended(self) -> tuple[Child, str]:
        """Wait for a child that ends by itself: which, and how."""
        waits = {asyncio.create_task(child.wait()): child for child in self._children}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            ended = done.pop()
            return waits[ended], ended.result()
        finally:
            await end_tasks(waits)

    def ask_to_stop(self) -> None:
        """All children drain. Asked again, workers and bridges hand their jobs back at once."""
        for child in self._children:
            child.ask_to_stop()

    async def stop(self) -> None:
        """API, workers and bridges drain together; the server goes last, when nobody writes any more."""
        self.ask_to_stop()
        draining = (*self._bridges, *self._workers)
        await asyncio.gather(*(child.stop(self._settings.drain_timeout_s) for child in draining))
        if self._api is not None:
            await self._api.stop(API_GRACE_S)
        self._bridges, self._workers, self._api = [], [], None
        if self._server is not None:
            await asyncio.to_thread(self._server.stop)
            self._server = None
            self._url_file.unlink(missing_ok=True)
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    @property
    def _children(self) -> list[Child]:
        return [child for child in (self._api, *self._workers, *self._bridges) if child is not None]

    @property
    def _url_file(self) -> Path:
        return self._settings.data_dir / "redis.url"

    def _no_folder(self, error: OSError) -> ServerError:
        return ServerError(f"--data-dir {self._settings.data_dir} cannot be written: {error.strerror}")

    async def _start_server(self) -> None:
        data_dir = self._settings.data_dir
        try:
            self._lock = (data_dir / "up.lock").open("w")
        except OSError as error:
            raise self._no_folder(error) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            self._lock = None
            raise ServerError(f"another `jitney up` uses {data_dir}: stop it, or give another --data-dir") from None
        # Launched in the main thread: the kernel ends the server with the thread that started it. A large file
        # takes its time to load, and the loop must hear a SIGTERM meanwhile.
        appendfsync = "always" if self._settings.durability == "strict" else "everysec"
        self._server = EmbeddedServer(data_dir / "redis", appendfsync=appendfsync, tethered=True)
        self._server.launch()
        await asyncio.to_thread(self._server.wait_until_ready)
        self.redis_url = self._server.url
        self._url_file.touch(mode=0o600)
        self._url_file.write_text(self.redis_url + "\n")

    @property
    def _environment(self) -> dict[str, str]:
        """Of the children. All of them share one terminal here, so they are quiet; and one folder for files."""
        drain_s = str(max(0.0, self._settings.drain_timeout_s - STOP_MARGIN_S))
        return {
            "JITNEY_LOG_LEVEL": "warning",
            "JITNEY_BATCH__FILES": str(self._settings.data_dir / "files"),
            **os.environ,
            **self._settings.environment,
            "JITNEY_REDIS_URL": self.redis_url,
            "JITNEY_WORKER__DRAIN_TIMEOUT_S": drain_s,
            "JITNEY_API__DRAIN_TIMEOUT_S": drain_s,
            "JITNEY_RQ__DRAIN_TIMEOUT_S": drain_s,
            "JITNEY_CELERY__DRAIN_S": drain_s,
        }

    def _new_worker(self, number: int) -> Child:
        return Child(f"worker {number}", worker_arguments(self._settings, number), self._environment)

    async def _start_children(self) -> None:
        settings = self._settings
        flags = ["--host", settings.host, "--port", str(settings.port)]
        self._api = Child("api", ["api", *flags], self._environment)
        self._workers = [self._new_worker(number) for number in range(1, settings.num_workers + 1)]
        if settings.bulk:
            self._bridges = bridges(settings.data_dir, self._environment)
        children = self._children
        for child in children:
            await child.start()
        lines = await asyncio.gather(*(child.until_ready(READY_TIMEOUT_S) for child in children))
        self.api_url = _word(lines[0], "api")
        said = lines[len(lines) - len(self._bridges) :] if self._bridges else []
        self.bridges = " ".join(line.removeprefix("ready ") for line in said)


def worker_arguments(settings: StackSettings, number: int) -> list[str]:
    """Of `jitney`, for the worker of that number, from 1."""
    words = ["worker", *settings.worker_flags]
    if settings.metrics_port is not None:
        port = settings.metrics_port and settings.metrics_port + number - 1  # 0 is a free one for each
        words += ["--metrics-port", str(port)]
    cores = settings.num_threads or max(1, (os.cpu_count() or 1) // max(1, settings.num_workers))
    return [*words, "--num-threads", str(cores)]


def _word(line: str, name: str) -> str:
    """The value of `name=` in a ready line."""
    for word in line.split():
        key, _, value = word.partition("=")
        if key == name:
            return value
    raise ServerError(f"no {name}= in {line!r}")


async def unless_stopped(work: Coroutine[Any, Any, None], stopping: asyncio.Event) -> bool:
    """Do `work`; False if it was cut short because `stopping` was set."""
    working, asked = asyncio.create_task(work), asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait({working, asked}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            return False
        await working
        return True
    finally:
        await end_tasks([working, asked])
