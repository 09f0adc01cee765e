"""One HTTP connection: how long and how large a request's head may be, and what is answered to what is no HTTP.

The server reads heads by itself, before any application hears of them, and waits for their end for ever.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from jitney_api.app import create_app
from jitney_api.failures import BadBody, error_body, status_of
from jitney_api.settings import ApiSettings


def server_config(settings: ApiSettings, **options: Any) -> uvicorn.Config:
    """The application and its server. options: uvicorn's own, before ours."""

    class Connection(BoundedHead):
        header_timeout_s = settings.header_timeout_s
        max_head_bytes = 2 * settings.max_header_bytes  # the request line, names and colons count here too
        write_timeout_s = settings.write_timeout_s

    own: dict[str, Any] = {
        "host": settings.host,
        "port": settings.port,
        "http": Connection,
        "ws": "none",
        "log_level": "warning",
        "access_log": False,
        "server_header": False,
        "timeout_graceful_shutdown": round(settings.drain_timeout_s),
    }
    return uvicorn.Config(create_app(settings), **{**own, **options})


_LENGTHS: Final = (b"content-length", b"transfer-encoding")

LINGER_S: Final = 30.0
"""Beyond `write_timeout_s`: streams see to their slow readers themselves, and tell them more by it."""


class BoundedHead(HttpToolsProtocol):
    """A connection that is closed when a head does not come to its end; with an answer where somebody waits for one.

    What is neither head nor body (trailers, empty lines between requests) is bounded like a head, and believed by
    nobody. Who takes nothing of a whole answer is cut off: closing waits for what is still to be sent, for ever.
    """

    header_timeout_s: float
    max_head_bytes: int
    write_timeout_s: float

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._num_head_bytes = 0
        self._num_other_bytes = 0
        self._has_begun = False
        self._has_body = False
        self._timer: asyncio.TimerHandle | None = None
        self._stuck: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_watch()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._has_body = False
        if self._timer is not None:
            self._num_head_bytes += len(data)
        super().data_received(data)
        self._num_other_bytes = 0 if self._has_body or self._timer is not None else self._num_other_bytes + len(data)
        if max(self._num_other_bytes, self._num_head_bytes if self._timer is not None else 0) > self.max_head_bytes:
            limit = f"the request's head is larger than {self.max_head_bytes} bytes"
            self._refuse(BadBody(limit, code="headers_too_large"))
        elif self._timer is None and not self._is_answering() and not self.transport.is_closing():
            # uvicorn has stopped its own timer at the first byte, and starts it again after an answer alone.
            self._unset_keepalive_if_required()
            wait_s = self.header_timeout_s
            self.timeout_keep_alive_task = self.loop.call_later(wait_s, self.timeout_keep_alive_handler)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._timer is not None:  # a trailer would come in as a header that nobody has looked at
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._has_body = True
        super().on_body(body)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._stop_watch()
        super().resume_writing()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._has_begun = True
        if self._timer is None:  # the next request on this connection
            self._await_head()

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._has_begun = False
        if self.parser.should_upgrade() and any(name in _LENGTHS for name, _ in self.headers):
            # The parser ends such a request with its head, and would take its body for the next one.
            self._refuse(BadBody("Upgrade beside a body is not supported: leave Upgrade out", code="invalid_http"))
            return
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(BadBody("what was sent is not an HTTP/1.1 request", code="invalid_http"))

    def _is_answering(self) -> bool:
        """Whether a request is under way, whose answer must not be broken into."""
        return self.cycle is not None and not self.cycle.response_complete

    def _await_head(self) -> None:
        self._num_head_bytes = 0
        self._timer = self.loop.call_later(self.header_timeout_s, self._give_up)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        if self._is_answering():  # and the next request has begun to arrive meanwhile
            self._timer = self.loop.call_later(self.header_timeout_s, self._give_up)
            return
        if not self._has_begun:  # a connection that was only opened: nobody waits for an answer
            self.transport.close()
            return
        late = f"the request's head took longer than {self.header_timeout_s:g} s"
        self._refuse(BadBody(late, code="body_too_slow"))

    def _watch(self, num_before: int) -> None:
        """Until the other end has taken what is to be sent, or takes nothing of it for too long."""

        def look() -> None:
            num_left = self.transport.get_write_buffer_size()
            if num_left >= num_before:
                self.transport.abort()
            else:
                self._watch(num_left)

        self._stop_watch()
        self._stuck = self.loop.call_later(self.write_timeout_s + LINGER_S, look)

    def _stop_watch(self) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None

    def _refuse(self, error: BadBody) -> None:
        self._stop_timer()
        self._unset_keepalive_if_required()
        if not self.transport.is_closing():
            if not self._is_answering():
                self.transport.write(_answer(error))
            self.transport.close()


def _answer(error: BadBody) -> bytes:
    wire = error.wire()
    body, status = error_body(wire), HTTPStatus(status_of(wire))
    headers: Iterable[str] = (
        f"HTTP/1.1 {status.value} {status.phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        f"x-request-id: req_{secrets.token_hex(12)}",
        "connection: close",
    )
    return "\r\n".join(headers).encode() + b"\r\n\r\n" + body
