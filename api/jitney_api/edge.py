"""The first and last thing that every request meets: request id, header limit, body limit. Pure ASGI."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re
import secrets
from collections.abc import Iterator
from typing import Any, Final

import orjson
import structlog
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jitney.errors import InvalidJob
from jitney_api.failures import BadBody, error_response
from jitney_api.settings import ApiSettings

MAX_NESTING: Final = 100
"""More than any tool's schema needs; less than what orjson writes again (254) and Python's recursion can follow."""

BIG_BYTES: Final = 65_536
"""Above it a body is parsed on another thread: a mebibyte of brackets takes a tenth of a second."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class RequestEdge:
    """Gives each request an id (the caller's own when it is harmless) and refuses oversized headers."""

    def __init__(self, app: ASGIApp, settings: ApiSettings) -> None:
        self.app = app
        self.settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = scope["jitney.request_id"] = _request_id(scope)
        # Of this task alone: whatever is logged on behalf of the request carries its id.
        structlog.contextvars.bind_contextvars(request_id=request_id)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        refusal = _refuse_headers(scope["headers"], self.settings)
        if refusal is not None:
            await error_response(refusal)(scope, receive, send_with_id)
            return
        await self.app(scope, receive, send_with_id)


def _refuse_headers(headers: list[tuple[bytes, bytes]], settings: ApiSettings) -> BadBody | None:
    num_bytes = sum(len(name) + len(value) for name, value in headers)
    if len(headers) <= settings.max_headers and num_bytes <= settings.max_header_bytes:
        return None
    limits = f"at most {settings.max_headers} of {settings.max_header_bytes} bytes together are allowed"
    return BadBody(f"{len(headers)} headers of {num_bytes} bytes; {limits}", code="headers_too_large")


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            asked: str = value.decode("latin-1")
            if _REQUEST_ID.fullmatch(asked):
                return asked
    return f"req_{secrets.token_hex(12)}"


async def read_object(request: Request, settings: ApiSettings) -> dict[str, Any]:
    """The body as a JSON object, members that are `null` left out (null = absent).

    The header `Idempotency-Key` becomes the member `idempotency_key`. Raises InvalidJob when both are given
    and differ. Raises BadBody: 413 before anything is parsed, 408, 415, or 400. A content type other than JSON is
    refused, because any web page may send the others to a server on the loopback without asking.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise BadBody("send content-type: application/json", code="unsupported_media_type")
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            body = await _read_at_most(request, settings.max_body_bytes)
    except TimeoutError:
        raise BadBody(f"the body took longer than {settings.body_timeout_s:g} s", code="body_too_slow") from None
    if len(body) > BIG_BYTES:
        parsed = await asyncio.to_thread(parse_object, body)
    else:
        parsed = parse_object(body)
    return _with_idempotency_key(parsed, request.headers.get("idempotency-key"))


async def _read_at_most(request: Request, max_bytes: int) -> bytes:
    """The whole body. What the length header claims is believed only when it is already too much."""
    claimed = request.headers.get("content-length", "")
    if claimed.isdecimal() and int(claimed) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
    return bytes(body)


def _too_large(max_bytes: int) -> BadBody:
    return BadBody(f"the body is larger than {max_bytes} bytes", code="body_too_large")


def parse_object(body: bytes, *, what: str = "the body") -> dict[str, Any]:
    """A JSON object from outside, members that are `null` left out. Raises BadBody, which calls it `what`."""
    try:
        with _no_collection():
            parsed = orjson.loads(body)
    except orjson.JSONDecodeError as error:  # also bytes that are not UTF-8, and nesting too deep
        raise BadBody(f"{what} is not JSON: {error.msg} (position {error.pos})", code="invalid_json") from None
    if not isinstance(parsed, dict):
        raise BadBody(f"{what} must be a JSON object", code="invalid_json")
    if _is_deeper(body, parsed, MAX_NESTING):
        raise BadBody(f"{what} is nested deeper than {MAX_NESTING} levels", code="invalid_json")
    return {name: value for name, value in parsed.items() if value is not None}


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """The collector would look through what is parsed over and over: 350,000 empty lists took 0.3 s instead of 0.03."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _is_deeper(body: bytes, parsed: Any, max_depth: int) -> bool:
    """Whether arrays and objects lie in each other deeper than that. Level by level: a recursion could be too deep."""
    if body.count(b"[") + body.count(b"{") <= max_depth:
        return False  # so few cannot; nearly every request ends here
    level = [parsed]
    for _ in range(max_depth):
        level = [
            member
            for one in level
            for member in (one.values() if isinstance(one, dict) else one)
            if isinstance(member, dict | list)
        ]
        if not level:
            return False
    return True


def _with_idempotency_key(body: dict[str, Any], header: str | None) -> dict[str, Any]:
    if header is None:
        return body
    if body.setdefault("idempotency_key", header) != header:
        raise InvalidJob("the header Idempotency-Key and the body's idempotency_key differ", param="idempotency_key")
    return body
