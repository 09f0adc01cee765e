"""The client for everybody else: the same coroutines, on one private thread with an event loop."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import AsyncGenerator, Iterator
from functools import partial
from types import TracebackType
from typing import Any, Unpack

from jitney.async_client import AsyncClient, AsyncJob, Messages, Prompt
from jitney.keys import JobId
from jitney.link import ClientOptions
from jitney.loop_thread import LoopThread
from jitney.messages import Event, JobSpec
from jitney.position import Message
from jitney.queue import JobStatus
from jitney.result import Result


def _close(thread: LoopThread, client: AsyncClient) -> None:
    thread.close(client.aclose)


class Job:
    """A job by its id, for threads. The same methods as `AsyncJob`, without await."""

    def __init__(self, thread: LoopThread, job: AsyncJob) -> None:
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
                batch = self._thread.run(lambda: _next_or_none(batches))
                if batch is None:
                    return
                yield batch
        finally:
            with contextlib.suppress(RuntimeError):  # the client was closed first: so is the stream
                self._thread.run(batches.aclose)

    def result(self, timeout_s: float | None = None) -> Result:
        """Wait for the job's end. After `timeout_s` TimeoutError; the job goes on all the same.

        Raises JobFailed, JobCancelled or JobExpired (each with the text so far) when it did not finish.
        """
        return self._thread.run(lambda: self._job.result(timeout_s))

    def cancel(self) -> bool:
        """End the job now. False if it had already ended. Raises JobNotFound."""
        return self._thread.run(self._job.cancel)

    def status(self) -> JobStatus:
        """Where the job stands. Raises JobNotFound."""
        return self._thread.run(self._job.status)


async def _next_or_none(batches: AsyncGenerator[list[Message], None]) -> list[Message] | None:
    return await anext(batches, None)


class Client:
    """Jobs of one server, for any number of threads. The same methods as `AsyncClient`, without await.

    Not to be taken along into a forked process: its thread stays behind. Make one in the child.
    """

    def __init__(self, url: str | None = None, **options: Unpack[ClientOptions]) -> None:
        self._client = AsyncClient(url, **options)
        self._thread = LoopThread("jitney-client")
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
        ask = partial(self._client.enqueue, prompt, messages, idempotency_key=idempotency_key, **options)
        return Job(self._thread, self._thread.run(ask))

    def enqueue_spec(self, spec: JobSpec, *, queue: str | None = None, idempotency_key: str | None = None) -> Job:
        """Enqueue a job that is already validated. `queue`: a queue, alias or model other than the client's own."""
        ask = partial(self._client.enqueue_spec, spec, queue=queue, idempotency_key=idempotency_key)
        return Job(self._thread, self._thread.run(ask))

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
