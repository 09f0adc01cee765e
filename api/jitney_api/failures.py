"""Every error as a status and a body in OpenAI's shape. Bounded in size; a caller's input is never echoed whole."""

from __future__ import annotations

import math
from typing import Any, Final

import orjson
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match

from jitney.errors import (
    InvalidJob,
    JitneyError,
    JobEnded,
    KeyRefused,
    NotDurable,
    Overloaded,
    QueueUnavailable,
    SettingsError,
)
from jitney.http_errors import TOLD_HEADER, told_by
from jitney.keys import JobId
from jitney.logs import logger
from jitney.messages import Event
from jitney.result import Collector
from jitney_api.trouble import trouble_of

MAX_MESSAGE_CHARS: Final = 1_000
MAX_ECHO_CHARS: Final = 64
UNAVAILABLE_RETRY_S: Final = 1.0
JOB_ID_HEADER: Final = "x-jitney-job-id"

CLIENT_CLOSED: Final = 499
"""The job was cancelled. No standard status says so; this one is nginx's, and no SDK repeats it."""

_STATUS_BY_CODE: Final[dict[str, int]] = {
    "invalid_api_key": 401,
    "insufficient_scope": 403,
    "origin_not_allowed": 403,
    "model_not_found": 404,
    "job_not_found": 404,
    "file_not_found": 404,
    "batch_not_found": 404,
    "unknown_url": 404,
    "idempotency_conflict": 409,
    "file_in_use": 409,
    "stream_lost": 410,
    "body_too_large": 413,
    "body_too_slow": 408,
    "unsupported_media_type": 415,
    "headers_too_large": 431,
    "job_cancelled": CLIENT_CLOSED,
    "job_expired": 504,
    "bad_settings": 503,
}
_STATUS_BY_TYPE: Final[dict[str, int]] = {
    "invalid_request_error": 400,
    "rate_limit_error": 429,
    "service_unavailable_error": 503,
}


class BadBody(InvalidJob):
    """The request's body or headers cannot be taken: too large, too slow, or not a JSON object."""


class ApiStopping(JitneyError):
    """This process ends; the job does not. It can be followed through another one, or later."""

    type = "service_unavailable_error"
    code = "api_stopping"

    def __init__(self, job_id: str) -> None:
        super().__init__(f"this API process is stopping; job {job_id} goes on and can be followed from its last event")


def status_of(error: dict[str, Any]) -> int:
    """HTTP status of an error by its `code`, else by its `type`, else 500."""
    by_code = _STATUS_BY_CODE.get(str(error.get("code")))
    return by_code or _STATUS_BY_TYPE.get(str(error.get("type")), 500)


def error_body(error: dict[str, Any]) -> bytes:
    """`{"error": {message, type, param, code}}`, the message cut to a bounded length."""
    message = str(error.get("message", ""))
    if len(message) > MAX_MESSAGE_CHARS:
        message = message[: MAX_MESSAGE_CHARS - 3] + "..."
    shape = {
        "message": message,
        "type": error.get("type") or "server_error",
        "param": error.get("param"),
        "code": error.get("code"),
    }
    return orjson.dumps({"error": shape})


def refuse_if_failed(event: Event, job_id: str) -> None:
    """Raise what a terminal event other than `finished` stands for; any other event passes."""
    if event.is_terminal:
        Collector(JobId(job_id)).add(event)


def wire_of(error: JitneyError) -> dict[str, Any]:
    """The error as OpenAI's `error` object; a job's own ending keeps the words of its event.

    What Redis said stays in the log: it may name hosts that are nobody's business over HTTP.
    """
    wire = error.wire()
    if isinstance(error, NotDurable):
        wire["message"] = f"job {error.job_id} was taken, but is not known to be on disk; it may run all the same"
    elif isinstance(error, QueueUnavailable):
        wire["message"] = trouble_of(error).message
    if isinstance(error, JobEnded) and error.error.get("message"):
        wire["message"] = error.error["message"]
    return wire


def error_response(error: JitneyError) -> Response:
    """The answer to a request that `error` ended."""
    wire = wire_of(error)
    headers, told = _headers(error, status_of(wire)), told_by(error)
    if told is not None:
        headers[TOLD_HEADER] = told
    return Response(error_body(wire), status_of(wire), headers, media_type="application/json")


def _headers(error: JitneyError, status: int) -> dict[str, str]:
    """When to come back. Without `x-should-retry: false` the SDK sends 408, 409 and every 5xx again."""
    if isinstance(error, JobEnded):
        return {"x-should-retry": "false", JOB_ID_HEADER: error.job_id}
    if isinstance(error, KeyRefused):
        return {"www-authenticate": 'Bearer realm="jitney"'}
    if isinstance(error, Overloaded):
        return _retry_after(error.retry_after_s)
    if isinstance(error, QueueUnavailable):
        wait_s = trouble_of(error).retry_after_s
        return {"x-should-retry": "false"} if wait_s is None else _retry_after(wait_s)
    if isinstance(error, SettingsError):
        return {"x-should-retry": "false"}
    if status == 503:
        return _retry_after(UNAVAILABLE_RETRY_S)
    if status == 408:
        return {"x-should-retry": "false", "connection": "close"}
    return {"x-should-retry": "false"} if status == 409 else {}


def _retry_after(seconds: float) -> dict[str, str]:
    return {"retry-after": str(max(1, math.ceil(seconds))), "retry-after-ms": str(max(1, math.ceil(seconds * 1e3)))}


async def on_jitney_error(_request: Request, error: Exception) -> Response:
    """Handler for the project's own errors."""
    assert isinstance(error, JitneyError)
    if isinstance(error, QueueUnavailable | SettingsError):
        logger().warning("queue_unavailable", error=str(error))
    return error_response(error)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Handler for the framework's: unknown path, wrong method."""
    assert isinstance(error, HTTPException)
    where = f"{request.method[:16]} {request.url.path[:MAX_ECHO_CHARS]}"
    headers = dict(error.headers or {})
    if error.status_code == 404:
        wire = {"message": f"no such URL: {where}{_what_was_meant(request)}; /docs has all", "code": "unknown_url"}
    elif error.status_code == 405:
        wire = {"message": f"method not allowed: {where}", "code": "method_not_allowed"}
        headers["Allow"] = ", ".join(_allowed_methods(request))
    else:
        wire = {"message": str(error.detail), "code": "http_error"}
    wire["type"] = "invalid_request_error" if error.status_code < 500 else "server_error"
    return Response(error_body(wire), error.status_code, headers, media_type="application/json")


def _what_was_meant(request: Request) -> str:
    """`, did you mean /v1/chat/completions`: of a client whose base URL stops before `/v1`, as most first tries do."""
    path = f"/v1{request.url.path}"
    known = any(route.matches({**request.scope, "path": path})[0] is Match.FULL for route in request.app.router.routes)
    return f", did you mean {path[:MAX_ECHO_CHARS]}" if known else ""


def _allowed_methods(request: Request) -> list[str]:
    """All methods of the path: the framework names those of the first route that has it."""
    routes = request.app.router.routes
    return [
        method
        for method in ("GET", "POST", "DELETE")
        if any(route.matches({**request.scope, "method": method})[0] is Match.FULL for route in routes)
    ]


async def on_wrong_query(_request: Request, error: Exception) -> Response:
    """Handler for a path or query parameter of the wrong kind (bodies are read by hand)."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = str(first["loc"][-1])
    return error_response(
        InvalidJob(f"{name}: {first['msg']} (given: {str(first['input'])[:MAX_ECHO_CHARS]!r})", param=name)
    )


async def on_client_gone(_request: Request, _error: Exception) -> Response:
    """Handler for a client that left in the middle of its body. Nobody reads this answer."""
    return Response(status_code=CLIENT_CLOSED)


async def on_bug(request: Request, error: Exception) -> Response:
    """Handler of last resort: the caller learns the request id, the log the rest."""
    request_id = str(request.scope.get("jitney.request_id", "-"))
    # Named once more: this runs outside the edge, where the id was bound to the log.
    logger().error("request_failed", request_id=request_id, path=request.url.path[:MAX_ECHO_CHARS], exc_info=error)
    wire = {"message": f"internal error; request id {request_id}", "type": "server_error", "code": "internal_error"}
    headers = {"x-request-id": request_id, "x-should-retry": "false"}
    return Response(error_body(wire), 500, headers, media_type="application/json")
