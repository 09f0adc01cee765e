"""A request's place in a trace: the header's, or a span of our own under it; every job of the request inherits it."""

from __future__ import annotations

from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jitney.tracing import Traces, current_traceparent, traceparent_of, valid_traceparent

UNTRACED: Final = frozenset({"/livez", "/readyz", "/metrics"})
"""Asked every few seconds by programs, and nobody's work."""


class TraceContext:
    """Pure ASGI. traces: None where no collector is named; the header is passed on to the job all the same."""

    def __init__(self, app: ASGIApp, traces: Traces | None) -> None:
        self._app = app
        self._traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in UNTRACED:
            await self._app(scope, receive, send)
            return
        given = _header(scope)
        if self._traces is None:
            current_traceparent.set(given)
            await self._app(scope, receive, send)
        else:
            await self._traced(self._traces, given, scope, receive, send)

    async def _traced(self, traces: Traces, given: str | None, scope: Scope, receive: Receive, send: Send) -> None:
        span = traces.begin(str(scope["method"])[:16], "server", given)
        span.set_attribute("http.request.method", str(scope["method"])[:16])
        current_traceparent.set(traceparent_of(span))

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                span.set_attribute("http.response.status_code", message["status"])
                if message["status"] >= 500:
                    span.set_attribute("error.type", str(message["status"]))
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            route = getattr(scope.get("route"), "path", None)
            if route is not None:  # known only behind the router
                span.update_name(f"{scope['method']} {route}")
                span.set_attribute("http.route", route)
            span.end()


def _header(scope: Scope) -> str | None:
    """Several of them, or a wrong one, are none. Source: W3C Trace Context, section 3.2."""
    found = [value.decode("latin-1") for name, value in scope["headers"] if name == b"traceparent"]
    return valid_traceparent(found[0]) if len(found) == 1 else None
