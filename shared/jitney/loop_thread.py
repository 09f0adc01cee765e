"""One thread that runs one event loop, for programs that are not written for asyncio."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from jitney.tasks import end_tasks

T = TypeVar("T")


class LoopThread:
    """A loop, and what other threads give it to do. Of no use in a forked child: the thread stays behind."""

    def __init__(self, name: str) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        # A daemon: a client that nobody closed must not keep the interpreter from leaving.
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result. An interrupt of the caller cancels it."""
        if self._loop.is_closed() or self._pid != os.getpid():
            work.close()
            closed = "this client is closed" if self._loop.is_closed() else "this client was made before the fork"
            raise RuntimeError(f"{closed}: make a new one")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self, last: Coroutine[Any, Any, None]) -> None:
        """Run `last`, then end loop and thread. Nothing the second time."""
        if self._loop.is_closed() or self._pid != os.getpid():
            last.close()
            return
        try:
            self.run(last)
            self.run(_cancel_others())
            self.run(self._loop.shutdown_asyncgens())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def soon(self, act: Callable[[], object]) -> None:
        """Let the loop call it, and do not wait for that."""
        self._loop.call_soon_threadsafe(act)


async def _cancel_others() -> None:
    """Callers of other threads that still wait get CancelledError instead of silence."""
    await end_tasks(asyncio.all_tasks() - {asyncio.current_task()})
