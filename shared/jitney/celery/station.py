"""One event loop and one client for each process, in a thread of their own: what waits for hundreds of jobs."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from jitney.async_client import AsyncClient
from jitney.settings import client_settings

T = TypeVar("T")

_lock = threading.Lock()
_station: Station | None = None
_url: str | None = None


class Station:
    """The thread. Threads of Celery's hand it coroutines; none of them waits for another one's."""

    def __init__(self, url: str | None = None) -> None:
        self.pid = os.getpid()
        self.client = AsyncClient(url or client_settings().url, name="jitney-celery")  # by Redis, never by an API
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="jitney-celery", daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Let it run. Cancelling the future cancels the coroutine."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Its result. An interruption of this thread (a time limit is one) cancels it."""
        future = self.start(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


def station() -> Station:
    """This process's own. A forked child makes another one: threads and connections stay with the parent."""
    global _station
    with _lock:
        if _station is None or _station.pid != os.getpid():
            _station = Station(_url)
        return _station


def use_url(url: str | None) -> None:
    """Where the jobs of this process go; None: as every client finds it."""
    global _url
    _url = url


def _after_fork() -> None:
    """The lock may have been held by a thread that the child does not have."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
