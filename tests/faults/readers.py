"""Clients of a run: they submit until they are accepted, read, come back with their cursor, and write it all down."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from tests.api.api_wire import Answer, Frame, read_head
from tests.faults.answers import Asked
from tests.faults.ledger import Ledger

from jitney import AsyncClient
from jitney.connection import pause_s
from jitney.errors import JobNotFound, Overloaded, QueueUnavailable, StreamLost, UnknownQueue

_REFUSED = (QueueUnavailable, Overloaded, UnknownQueue)
_HTTP_TROUBLE = (OSError, EOFError, TimeoutError, AssertionError)


async def ask(port: int, method: str, path: str, body: Any = None, **headers: str) -> Answer:
    """A request whose connection is closed here if no answer begins. Header names have `_` for `-`."""
    encoded = b"" if body is None else json.dumps(body).encode()
    lines = {"host": "localhost", "content-length": str(len(encoded)), "content-type": "application/json", **headers}
    head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in lines.items())
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + encoded)
        return await read_head(reader, writer)
    except BaseException:
        writer.close()
        raise


async def back_off(attempt: int) -> None:
    """As a client does that has been refused: the pause is what it does, not a wait for something."""
    await asyncio.sleep(pause_s(attempt))


class Gone(Exception):
    """The API says that nothing more will come."""


@dataclass(slots=True)
class PythonClient:
    """Submits and reads with `AsyncClient`."""

    client: AsyncClient
    ledger: Ledger
    reader: str = "py"

    async def submit(self, asked: Asked) -> str:
        """The job's id. Submitted with an idempotency key until the queue says yes."""
        attempt = 0
        while True:
            try:
                job = await self.client.enqueue(idempotency_key=asked.name, **asked.fields)
            except _REFUSED as error:
                self.ledger.refused(asked.name, error)
                await back_off(attempt)
                attempt += 1
            else:
                self.ledger.accepted(asked.name, job.id)
                return job.id

    async def read(self, asked: Asked, job_id: str, after_each: Callable[[int], None] = lambda _seq: None) -> None:
        cursor, attempt = 0, 0
        while True:
            try:
                async with contextlib.aclosing(self.client.job(job_id).batches(cursor)) as batches:
                    async for batch in batches:
                        for message in batch:
                            self.ledger.saw(asked.name, job_id, self.reader, message.payload)
                            cursor, attempt = message.event.seq, 0
                            after_each(cursor)
                return
            except QueueUnavailable as error:
                self.ledger.broken(asked.name, job_id, self.reader, error)
                await back_off(attempt)
                attempt += 1
            except (StreamLost, JobNotFound) as error:
                self.ledger.lost(asked.name, job_id, self.reader, error)
                return


@dataclass(slots=True)
class HttpClient:
    """Submits with `POST /v1/jobs` and reads server-sent events; goes on at the next API when one fails it.

    ports: asked anew each time, because APIs come and go.
    """

    ports: Callable[[], list[int]]
    queue: str
    ledger: Ledger
    reader: str = "http"
    num_tries: int = 0
    answers: list[Answer] = field(default_factory=list)

    @property
    def num_keep_alives(self) -> int:
        """Comments on all streams so far; the reader of frames passes a comment on with the next event only."""
        return sum(answer.raw.count(b": keep-alive\n") for answer in self.answers)

    async def submit(self, asked: Asked) -> str:
        attempt = 0
        body = {"model": self.queue, **asked.fields}
        while True:
            try:
                answer = await ask(self._port(attempt), "POST", "/v1/jobs", body, Idempotency_Key=asked.name)
                try:
                    said = await answer.json()
                finally:
                    await answer.close()
            except _HTTP_TROUBLE as error:
                said, answer = {"error": repr(error)}, None
            if answer is not None and answer.status == 202:
                self.ledger.accepted(asked.name, said["id"])
                return str(said["id"])
            assert answer is None or answer.status in (429, 503, 404), f"{answer.status}: {said}"
            self.ledger.refused(asked.name, f"{answer.status if answer else 'no answer'}: {said}")
            await back_off(attempt)
            attempt += 1

    async def read(
        self, asked: Asked, job_id: str, after_each: Callable[[int], None] = lambda _seq: None, *, cursor: int = 0
    ) -> None:
        attempt = 0
        while True:
            try:
                async with self._events(attempt, job_id, cursor) as answer:
                    async for frame in answer.frames():
                        self._refuse_errors(frame)
                        self.ledger.saw(asked.name, job_id, self.reader, frame.data)
                        assert json.loads(frame.data)["seq"] == int(frame.id)
                        cursor, attempt = int(frame.id), 0
                        after_each(cursor)
                return
            except Gone as error:
                self.ledger.lost(asked.name, job_id, self.reader, error)
                return
            except _HTTP_TROUBLE as error:
                self.ledger.broken(asked.name, job_id, self.reader, error)
                await back_off(attempt)
                attempt += 1

    def _port(self, attempt: int) -> int:
        ports = self.ports()
        if not ports:
            raise ConnectionRefusedError("no API is up")
        self.num_tries += 1
        return ports[self.num_tries % len(ports)]

    @contextlib.asynccontextmanager
    async def _events(self, attempt: int, job_id: str, cursor: int) -> AsyncIterator[Answer]:
        path = f"/v1/jobs/{job_id}/events"
        answer = await ask(self._port(attempt), "GET", path, **({"Last_Event_ID": str(cursor)} if cursor else {}))
        try:
            if answer.status in (404, 410):
                raise Gone(f"{answer.status} {await answer.json()}")
            if answer.status != 200:
                raise ConnectionError(f"{answer.status} {(await answer.body())[:300]!r}")
            self.answers.append(answer)
            yield answer
        finally:
            await answer.close()

    def _refuse_errors(self, frame: Frame) -> None:
        """An error in the stream: lost for good, or a service that is away for a while."""
        said = json.loads(frame.data)
        if "seq" in said:
            return
        code = said.get("error", {}).get("code")
        if code in ("stream_lost", "job_not_found"):
            raise Gone(str(said))
        raise ConnectionError(str(said))
