"""Following a job over HTTP: connections come and go, the events stay in order, each once."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Final

import httpx2
import orjson

from jitney.asking import LOST, Api, Outage, passes
from jitney.channel import MAX_OUTAGE_S
from jitney.errors import JitneyError, JobNotFound, Overloaded, QueueUnavailable, StreamLost
from jitney.http_errors import error_of_answer, error_of_wire, retry_after_s
from jitney.keys import queue_of
from jitney.position import Message, Position, check_cursor, parse
from jitney.server_events import Frame, Frames

READ_TIMEOUT_S: Final = 45.0
"""Three keep-alives of an API with its defaults. Of one that says them less often, connections are made anew."""

NO_CONTENT: Final = 204


class HttpReader:
    """Follows jobs through an API. See `jitney.reading.Reader`.

    read_timeout_s: silence, keep-alives included, after which a connection is taken for lost. max_outage_s: how long
    nobody may answer before a stream gives up.
    """

    def __init__(self, api: Api, *, read_timeout_s: float = READ_TIMEOUT_S, max_outage_s: float = MAX_OUTAGE_S) -> None:
        self._api = api
        self._read_timeout_s = read_timeout_s
        self._max_outage_s = max_outage_s

    @contextlib.asynccontextmanager
    async def follow(self, job_id: str, cursor: int = 0) -> AsyncIterator[AsyncIterator[list[Message]]]:
        """The job's events after `cursor`, up to the terminal one."""
        check_cursor(cursor)
        queue_of(job_id)
        self._api.check_open()
        following = _Following(self._api, job_id, cursor, self._read_timeout_s, Outage(self._max_outage_s))
        async with contextlib.aclosing(following.batches()) as batches:
            yield batches


class _Interrupted(Exception):
    """Said in the stream itself: that API process is stopping, or has lost its Redis."""

    def __init__(self, error: QueueUnavailable) -> None:
        super().__init__(str(error))
        self.error = error


class _Following:
    """One reader of one job.

    It asks for the last event it has read once more: that it comes back, byte for byte, shows that the log is still the
    one that was read, and not one that Redis lost a part of and a worker has written anew.
    """

    def __init__(self, api: Api, job_id: str, cursor: int, read_timeout_s: float, outage: Outage) -> None:
        self._api = api
        self._job_id = job_id
        self._position = Position(cursor)
        self._read_timeout_s = read_timeout_s
        self._outage = outage
        self._frames = Frames()
        self._is_known = False
        self._is_over = False

    async def batches(self) -> AsyncGenerator[list[Message], None]:
        """Whatever has arrived at once, over as many connections as it takes."""
        while not self._is_over:
            self._frames, wait_s = Frames(), 0.0
            error: JitneyError = QueueUnavailable(f"the stream of {self._job_id} ended before the job did")
            try:
                async with self._connection() as answer:
                    if answer.status_code == 200:
                        self._is_known = True
                        async with contextlib.aclosing(self._messages(answer)) as arriving:
                            async for messages in arriving:
                                yield messages
                    else:
                        wait_s = retry_after_s(answer.headers)
                        error = self._refusal(answer, await answer.aread())
            except LOST as lost:
                error = self._api.silence(lost)
            except _Interrupted as said:
                error = said.error
            if not self._is_over:
                self._api.check_open()
                if self._frames.is_whole:
                    self._outage.end()  # it was silence that was cut off, by a proxy perhaps: the API had answered
                await self._outage.wait_out(error, at_least_s=wait_s)

    def _connection(self) -> AbstractAsyncContextManager[httpx2.Response]:
        headers = {"accept": "text/event-stream"}
        if self._position.cursor > 0:
            headers["last-event-id"] = str(self._position.cursor - 1)
        path = f"/v1/jobs/{self._job_id}/events"
        return self._api.stream(path, headers, read_timeout_s=self._read_timeout_s)

    def _refusal(self, answer: httpx2.Response, body: bytes) -> JitneyError:
        """The error to wait out. Raises one that waiting does not mend."""
        if answer.status_code == NO_CONTENT:
            raise StreamLost(f"the log of {self._job_id} ends before event {self._position.cursor}, which was read")
        error = error_of_answer(answer.status_code, answer.headers, body)
        if isinstance(error, JobNotFound) and self._is_known:
            raise StreamLost(f"the log of {self._job_id} is gone; events up to {self._position.cursor} were read")
        if not (passes(error, answer.headers) or isinstance(error, Overloaded)):
            raise error
        return error

    async def _messages(self, answer: httpx2.Response) -> AsyncGenerator[list[Message], None]:
        """The new events of one connection. Raises StreamLost, and what the API says in their place."""
        is_first = self._position.cursor > 0
        async for piece in answer.aiter_bytes():
            complete = self._frames.feed(piece)
            messages = [self._message(frame) for frame in complete if frame.data is not None and frame.has_id]
            if messages and is_first:
                is_first = False
                self._recognise(messages)
            taken = self._take(messages)
            if taken:
                self._outage.end()
                yield taken
            for frame in complete:
                if frame.data is not None and not frame.has_id:
                    error = _error_in(frame.data)
                    raise _Interrupted(error) if isinstance(error, QueueUnavailable) else error
            if self._is_over:
                return

    def _message(self, frame: Frame) -> Message:
        message = parse(frame.data or b"")
        if message is None:
            raise StreamLost(f"the stream of {self._job_id} holds something unreadable after {self._position.cursor}")
        return message

    def _recognise(self, messages: list[Message]) -> None:
        objection = self._position.recognise(messages)
        if objection is not None:
            raise StreamLost(f"the log of {self._job_id} {objection}")
        self._is_over = messages[0].event.is_terminal

    def _take(self, messages: list[Message]) -> list[Message]:
        step = self._position.take(messages)
        if step.objection is not None:
            raise StreamLost(f"the log of {self._job_id} {step.objection}")
        self._is_over |= bool(step.taken) and step.taken[-1].event.is_terminal
        return step.taken


def _error_in(payload: bytes) -> JitneyError:
    """The error that a frame without an id tells: it is no event of the job."""
    try:
        wire = orjson.loads(payload)["error"]
        return error_of_wire(wire)
    except (ValueError, TypeError, KeyError, AttributeError):
        return StreamLost("the stream holds something that is neither an event nor an error")
