"""Responses that wait for a job: as a stream of frames, or as one body. Both notice when nobody listens."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jitney.channel import ChannelReader
from jitney.errors import JitneyError, StreamLost
from jitney.follower import Follower, Message
from jitney.logs import logger
from jitney.messages import Event
from jitney.result import Collector, Result
from jitney_api.answers import Heading
from jitney_api.failures import JOB_ID_HEADER, ApiStopping
from jitney_api.frames import KEEP_ALIVE, Frames, error_frame
from jitney_api.settings import ApiSettings

T = TypeVar("T")
OnFirst = Callable[[Event, str], None]
OnGone = Callable[[], Awaitable[None]]

CANCEL_AGAIN_S: Final = 0.1

_log = logger()


class ClientGone(Exception):
    """Nobody is listening any more."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The outcome of `work`. Cancels it and raises ClientGone if the client disconnects before.

    The body must have been read. A cancellation from outside is the process stopping, which is no disconnect.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        await _end(working, watching)


async def _end(*tasks: asyncio.Future[Any]) -> None:
    """Cancel, as often as it takes.

    Once is not enough: before Python 3.12 `asyncio.wait_for`, through which redis-py writes, loses a
    cancellation that comes together with its own result, and the task would wait on for ever.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # seen, so that nobody is told of an exception that was never retrieved


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _close(send: Send, last_words: bytes) -> None:
    await send({"type": "http.response.body", "body": last_words, "more_body": False})


@dataclass(frozen=True, slots=True)
class StreamTerms:
    """How a stream begins, and what it means when its reader leaves.

    cursor: seq of the last event already seen. hold_s: how long to wait for the first event before answering
    200. on_first: sees an event that came in time, and may refuse by raising. on_gone: called when the reader
    leaves before the job has ended.
    """

    cursor: int = 0
    hold_s: float = 0.0
    on_first: OnFirst | None = None
    on_gone: OnGone | None = None


class EventStream(Response):
    """Frames of a job's events, each write holding all that had arrived."""

    def __init__(
        self, reader: ChannelReader, job_id: str, frames: Frames, settings: ApiSettings, terms: StreamTerms
    ) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no", JOB_ID_HEADER: job_id}
        super().__init__(headers=headers, media_type="text/event-stream")
        # No length is known, and one would end the stream at once.
        del self.headers["content-length"]
        self._reader = reader
        self._job_id = job_id
        self._frames = frames
        self._settings = settings
        self._terms = terms
        self._has_started = False
        self._is_over = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._tell(send))
        except ClientGone:
            if self._terms.on_gone is not None and not self._is_over:
                await self._terms.on_gone()
        except asyncio.CancelledError:
            # Only a server that stops cancels a request. It waits for no more than these last words.
            if not self._has_started:
                raise ApiStopping(self._job_id) from None
            await _close(send, error_frame(ApiStopping(self._job_id)))

    async def _tell(self, send: Send) -> None:
        """Headers, frames, and the end. Before the headers errors are raised, after them they are a frame."""
        try:
            cursor = 0 if self._frames.needs_past else self._terms.cursor
            async with self._reader.follow(self._job_id, cursor) as stream:
                await self._start(stream, send)
                await self._go_on(stream, send)
            last = b""
        except JitneyError as error:
            if not self._has_started:
                raise
            last = error_frame(error)
        except TimeoutError:  # of a write: cut off, and free to come back to where it was
            _log.warning("slow_reader_cut_off", job=self._job_id)
            return
        except Exception as error:
            if not self._has_started:
                raise
            _log.error("stream_failed", job=self._job_id, exc_info=error)
            last = error_frame(JitneyError("internal error"))
        await _close(send, last)

    async def _start(self, stream: Follower, send: Send) -> None:
        terms = self._terms
        messages = await stream.read(terms.hold_s) if terms.hold_s > 0 else []
        if messages and terms.on_first is not None:
            terms.on_first(messages[0].event, self._job_id)
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._has_started = True
        # With nothing to say yet the comment carries the headers through proxies that wait for a body.
        await self._write(self._spoken(messages) or KEEP_ALIVE, send)

    async def _go_on(self, stream: Follower, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        written_at = clock()
        while not stream.ended:
            messages = await stream.read(max(0.0, written_at + self._settings.keep_alive_s - clock()))
            frames = self._spoken(messages)
            if not frames and clock() >= written_at + self._settings.keep_alive_s:
                frames = KEEP_ALIVE
            if frames:
                await self._write(frames, send)
                written_at = clock()
        self._is_over = True

    def _spoken(self, messages: list[Message]) -> bytes:
        cursor = self._terms.cursor
        frames = [(message.event.seq, self._frames.of(message)) for message in messages]
        return b"".join(frame for seq, frame in frames if seq > cursor)

    async def _write(self, frames: bytes, send: Send) -> None:
        async with asyncio.timeout(self._settings.write_timeout_s):
            await send({"type": "http.response.body", "body": frames, "more_body": True})


class WholeAnswer(Response):
    """One body, once the job has ended; an ending other than `finished` becomes its status."""

    def __init__(
        self,
        reader: ChannelReader,
        heading: Heading,
        shape: Callable[[Heading, Result], dict[str, Any]],
        *,
        on_gone: OnGone,
    ) -> None:
        super().__init__(headers={JOB_ID_HEADER: heading.job_id}, media_type="application/json")
        self._reader = reader
        self._heading = heading
        self._shape = shape
        self._on_gone = on_gone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            result = await unless_gone(receive, self._gather())
        except ClientGone:
            await self._on_gone()
            return
        except asyncio.CancelledError:
            raise ApiStopping(self._heading.job_id) from None
        self.body = orjson.dumps(self._shape(self._heading, result))
        self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)

    async def _gather(self) -> Result:
        collector = Collector(self._heading.job_id)
        async with self._reader.follow(self._heading.job_id) as stream:
            async for messages in stream:
                for message in messages:
                    result = collector.add(message.event)
                    if result is not None:
                        return result
        raise StreamLost("the job's log ended without a last event")
