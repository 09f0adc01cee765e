"""A job's events as a response: frames as they come, whatever happens to the client, the job or this process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jitney.channel import ChannelReader
from jitney.errors import JitneyError
from jitney.follower import Follower, Message
from jitney.logs import logger
from jitney.messages import Event
from jitney_api.failures import JOB_ID_HEADER, ApiStopping
from jitney_api.frames import KEEP_ALIVE, Frames, error_frame
from jitney_api.presence import ClientGone, Pen, SlowReader, client_leaves, unless
from jitney_api.settings import ApiSettings

OnFirst = Callable[[Event, str], None]
OnGone = Callable[[], Awaitable[None]]

_log = logger()


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
        self._is_over = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        settings = self._settings
        pen = Pen(send, keep_alive_s=settings.keep_alive_s, write_timeout_s=settings.write_timeout_s)
        try:
            await unless(self._tell(pen), client_leaves(receive), pen.keep_alive())
        except ClientGone:
            if self._terms.on_gone is not None and not self._is_over:
                await self._terms.on_gone()
        except SlowReader:  # cut off in the middle, and free to come back to where it was
            _log.warning("slow_reader_cut_off", job=self._job_id)
        except asyncio.CancelledError:
            # Only a server that stops cancels a request. It waits for no more than these last words.
            if not pen.has_started:
                raise ApiStopping(self._job_id) from None
            await pen.finish(error_frame(ApiStopping(self._job_id)))

    async def _tell(self, pen: Pen) -> None:
        """Headers, frames, and the end. Before the headers errors are raised, after them they are a frame."""
        last_words = b""
        cursor = 0 if self._frames.needs_past else self._terms.cursor
        try:
            async with self._reader.follow(self._job_id, cursor) as stream:
                await self._start(stream, pen)
                async for messages in stream:
                    frames = self._spoken(messages)
                    if frames:
                        await pen.write(frames)
            self._is_over = True
        except JitneyError as error:
            if not pen.has_started:
                raise
            last_words = error_frame(error)
        except Exception as error:
            if not pen.has_started:
                raise
            _log.error("stream_failed", job=self._job_id, exc_info=error)
            last_words = error_frame(JitneyError("internal error"))
        await pen.finish(last_words)

    async def _start(self, stream: Follower, pen: Pen) -> None:
        terms = self._terms
        messages = await stream.read(terms.hold_s) if terms.hold_s > 0 else []
        if messages and terms.on_first is not None:
            terms.on_first(messages[0].event, self._job_id)
        await pen.start(self.status_code, self.raw_headers)
        # With nothing to say yet the comment carries the headers through proxies that wait for a body.
        await pen.write(self._frames.opening + self._spoken(messages) or KEEP_ALIVE)

    def _spoken(self, messages: list[Message]) -> bytes:
        cursor = self._terms.cursor
        frames = [(message.event.seq, self._frames.of(message)) for message in messages]
        return b"".join(frame for seq, frame in frames if seq > cursor)
