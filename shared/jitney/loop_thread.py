"""One thread that runs one event loop, for programs that are not written for asyncio."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from jitney.tasks import end_tasks

T = TypeVar("T")

Begin = Callable[[], Coroutine[Any, Any, T]]
"""Makes a coroutine, on the loop's thread: one that an interrupt met on its way there would be awaited by nobody."""


class LoopThread:
    """A loop, and what other threads give it to do. Of no use in a forked child: the thread stays behind."""

    def __init__(self, name: str) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        # A daemon: a client that nobody closed must not keep the interpreter from leaving.
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, begin: Begin[T]) -> T:
        """The coroutine's result. An interrupt of the caller cancels it."""
        if self._is_gone:
            closed = "this client is closed" if self._loop.is_closed() else "this client was made before the fork"
            raise RuntimeError(f"{closed}: make a new one")
        call = _Call(begin)
        self._loop.call_soon_threadsafe(call.start)
        try:
            return call.future.result()
        except BaseException:
            if not call.future.done():
                self._loop.call_soon_threadsafe(call.cancel)
            raise

    def close(self, last: Begin[None]) -> None:
        """Run `last`, then end loop and thread. Nothing the second time."""
        if self._is_gone:
            return
        try:
            self.run(last)
            self.run(_cancel_others)
            self.run(self._loop.shutdown_asyncgens)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def soon(self, act: Callable[[], object]) -> None:
        """Let the loop call it, and do not wait for that."""
        self._loop.call_soon_threadsafe(act)

    @property
    def _is_gone(self) -> bool:
        return self._loop.is_closed() or self._pid != os.getpid()


class _Call(Generic[T]):
    """What a thread waits for. Its methods belong to the loop's thread."""

    def __init__(self, begin: Begin[T]) -> None:
        self.future: Future[T] = Future()
        self._begin = begin
        self._task: asyncio.Task[T] | None = None

    def start(self) -> None:
        if self.future.cancelled():
            return
        try:
            self._task = asyncio.get_running_loop().create_task(self._begin())
        except Exception as error:  # arguments that do not fit: the caller's own affair
            self.future.set_exception(error)
        else:
            self._task.add_done_callback(self._settle)

    def cancel(self) -> None:
        if self._task is None:
            self.future.cancel()
        else:
            self._task.cancel()

    def _settle(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self.future.cancel()
        elif (error := task.exception()) is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(task.result())


async def _cancel_others() -> None:
    """Callers of other threads that still wait get CancelledError instead of silence."""
    await end_tasks(asyncio.all_tasks() - {asyncio.current_task()})
