"""The client for everybody else: the same coroutines, on one private thread with an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import weakref
from collections.abc import AsyncGenerator, Coroutine, Iterator
from types import TracebackType
from typing import Any, TypeVar, Unpack

from jitney.async_client import AsyncClient, AsyncJob, Messages, Prompt
from jitney.keys import JobId
from jitney.link import ClientOptions
from jitney.messages import Event, JobSpec
from jitney.position import Message
from jitney.queue import JobStatus
from jitney.result import Result
from jitney.tasks import end_tasks

T = TypeVar("T")


class _LoopThread:
    """One thread that runs one event loop, and what other threads give it to do."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        # A daemon: a client that nobody closed must not keep the interpreter from leaving.
        self._thread = threading.Thread(target=self._loop.run_forever, name="jitney-client", daemon=True)
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


async def _cancel_others() -> None:
    """Callers of other threads that still wait get CancelledError instead of silence."""
    await end_tasks(asyncio.all_tasks() - {asyncio.current_task()})


def _close(thread: _LoopThread, client: AsyncClient) -> None:
    thread.close(client.aclose())


class Job:
    """A job by its id, for threads. The same methods as `AsyncJob`, without await."""

    def __init__(self, thread: _LoopThread, job: AsyncJob) -> None:
        self._thread = thread
        self._job = job

    def __repr__(self) -> str:
        return f"Job({self.id!r})"

    @property
    def id(self) -> JobId:
        return self._job.id

    def stream(self, cursor: int = 0) -> Iterator[Event]:
        """Every event after `cursor`, `started` and the terminal one included.

        Leaving the loop early unsubscribes. Raises JobNotFound, StreamLost, QueueUnavailable.
        """
        for batch in self.batches(cursor):
            for message in batch:
                yield message.event

    def batches(self, cursor: int = 0) -> Iterator[list[Message]]:
        """As `stream`, but whatever has arrived at once, with each event's own bytes."""
        batches = self._job.batches(cursor)
        try:
            while True:
                batch = self._thread.run(_next_or_none(batches))
                if batch is None:
                    return
                yield batch
        finally:
            with contextlib.suppress(RuntimeError):  # the client was closed first: so is the stream
                self._thread.run(_end(batches))

    def result(self, timeout_s: float | None = None) -> Result:
        """Wait for the job's end. After `timeout_s` TimeoutError; the job goes on all the same.

        Raises JobFailed, JobCancelled or JobExpired (each with the text so far) when it did not finish.
        """
        return self._thread.run(self._job.result(timeout_s))

    def cancel(self) -> bool:
        """End the job now. False if it had already ended. Raises JobNotFound."""
        return self._thread.run(self._job.cancel())

    def status(self) -> JobStatus:
        """Where the job stands. Raises JobNotFound."""
        return self._thread.run(self._job.status())


async def _next_or_none(batches: AsyncGenerator[list[Message], None]) -> list[Message] | None:
    return await anext(batches, None)


async def _end(batches: AsyncGenerator[list[Message], None]) -> None:
    await batches.aclose()


class Client:
    """Jobs of one server, for any number of threads. The same methods as `AsyncClient`, without await.

    Not to be taken along into a forked process: its thread stays behind. Make one in the child.
    """

    def __init__(self, url: str | None = None, **options: Unpack[ClientOptions]) -> None:
        self._client = AsyncClient(url, **options)
        self._thread = _LoopThread()
        self._finalizer = weakref.finalize(self, _close, self._thread, self._client)

    def enqueue(
        self,
        prompt: Prompt | None = None,
        messages: Messages | None = None,
        *,
        idempotency_key: str | None = None,
        **options: Any,
    ) -> Job:
        """Enqueue a prompt (text or token ids) or a chat; `options` are fields of SamplingParams and JobSpec.

        Raises what `AsyncClient.enqueue` raises.
        """
        asked = self._client.enqueue(prompt, messages, idempotency_key=idempotency_key, **options)
        return Job(self._thread, self._thread.run(asked))

    def enqueue_spec(self, spec: JobSpec, *, queue: str | None = None, idempotency_key: str | None = None) -> Job:
        """Enqueue a job that is already validated. `queue`: a queue, alias or model other than the client's own."""
        asked = self._client.enqueue_spec(spec, queue=queue, idempotency_key=idempotency_key)
        return Job(self._thread, self._thread.run(asked))

    def generate(
        self,
        prompt: Prompt | None = None,
        messages: Messages | None = None,
        *,
        idempotency_key: str | None = None,
        **options: Any,
    ) -> Result:
        """`enqueue`, then `result`."""
        return self.enqueue(prompt, messages, idempotency_key=idempotency_key, **options).result()

    def job(self, job_id: str) -> Job:
        """The job of that id, of whatever queue. Raises InvalidJob for what is no job id."""
        return Job(self._thread, self._client.job(job_id))

    def close(self) -> None:
        """Close the connections and end the thread. Jobs go on."""
        self._finalizer()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
