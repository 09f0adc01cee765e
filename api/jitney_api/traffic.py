"""Requests, counted at the outermost edge: what was asked, by the route's pattern, and how it was answered."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jitney.metrics.readings import Readings

CLIENT_GONE = "499"
"""As nginx has it: the client left before there was an answer."""


class Traffic:
    """Pure ASGI. readings: of this process since its start."""

    def __init__(self, app: ASGIApp, readings: Readings) -> None:
        self._app = app
        self._readings = readings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, is_stream = CLIENT_GONE, False

        async def counted(message: Message) -> None:
            nonlocal status, is_stream
            if message["type"] == "http.response.start":
                status, is_stream = str(message["status"]), _is_stream(message)
                self._count_streams(is_stream, +1)
            await send(message)

        self._readings.add("jitney_http_requests_open")
        try:
            await self._app(scope, receive, counted)
        finally:
            self._count_streams(is_stream, -1)
            self._readings.add("jitney_http_requests_open", by=-1)
            self._readings.add("jitney_http_requests_total", _route(scope), _method(scope), status)

    def _count_streams(self, is_stream: bool, by: int) -> None:
        if is_stream:
            self._readings.add("jitney_sse_clients", by=by)


def traffic_readings() -> Readings:
    """With nothing in it yet, which is said too: a gauge that is not there cannot be told from one that is lost."""
    readings = Readings()
    readings.set("jitney_http_requests_open", 0)
    readings.set("jitney_sse_clients", 0)
    return readings


def _route(scope: Scope) -> str:
    """The pattern, never the path: a path holds ids, and there would be a series for each."""
    return str(getattr(scope.get("route"), "path", "other"))


def _method(scope: Scope) -> str:
    """A client may call its method anything."""
    method = str(scope["method"])
    return method if method in ("GET", "POST", "DELETE", "HEAD", "OPTIONS", "PUT", "PATCH") else "other"


def _is_stream(message: Message) -> bool:
    return any(
        name.lower() == b"content-type" and value.startswith(b"text/event-stream")
        for name, value in message.get("headers", ())
    )
