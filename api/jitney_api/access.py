"""Who may do what: the table of routes and scopes, and the caller behind a request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.types import Scope as AsgiScope

from jitney.apikeys import Scope
from jitney.errors import KeyRefused, ScopeMissing
from jitney_api.callers import CALLER, Caller
from jitney_api.service import service_of

NEEDS: Final[dict[tuple[str, str], Scope | None]] = {
    # Method and path: the scope that a key must have. None: no key is asked for, ever.
    ("POST", "/v1/chat/completions"): "generate",
    ("POST", "/v1/completions"): "generate",
    ("POST", "/v1/responses"): "generate",
    ("POST", "/v1/responses/{response_id}/cancel"): "generate",
    ("GET", "/v1/responses/{response_id}"): "read",
    ("POST", "/v1/embeddings"): "generate",
    ("POST", "/v1/jobs"): "generate",
    ("DELETE", "/v1/jobs/{job_id}"): "generate",
    ("GET", "/v1/jobs/{job_id}"): "read",
    ("GET", "/v1/jobs/{job_id}/events"): "read",
    ("POST", "/v1/files"): "generate",
    ("GET", "/v1/files"): "read",
    ("GET", "/v1/files/{file_id}"): "read",
    ("DELETE", "/v1/files/{file_id}"): "generate",
    ("GET", "/v1/files/{file_id}/content"): "read",
    ("POST", "/v1/batches"): "generate",
    ("GET", "/v1/batches"): "read",
    ("GET", "/v1/batches/{batch_id}"): "read",
    ("POST", "/v1/batches/{batch_id}/cancel"): "generate",
    ("GET", "/v1/models"): "read",
    ("GET", "/v1/models/{model:path}"): "read",
    ("POST", "/tokenize"): "read",
    ("POST", "/detokenize"): "read",
    ("GET", "/v1/jobs/{job_id}/timeline"): "read",
    ("GET", "/v1/overview"): "read",
    ("GET", "/v1/overview/events"): "read",
    ("GET", "/v1/queue"): "admin",
    ("GET", "/v1/admin/jobs/{job_id}"): "admin",
    ("DELETE", "/v1/admin/jobs/{job_id}"): "admin",
    ("GET", "/v1/admin/dead"): "admin",
    ("POST", "/v1/admin/dead/requeue"): "admin",
    ("GET", "/health"): "admin",
    # A scope of its own: a scraper's key lies in a file of another program, and opens nothing else there.
    ("GET", "/metrics"): "metrics",
    ("GET", "/livez"): None,
    ("GET", "/readyz"): None,
    ("GET", "/version"): None,
    ("GET", "/openapi.json"): None,
    ("GET", "/docs"): None,
    ("GET", "/"): None,
    ("GET", "/page/{name}"): None,
}
"""Shown to people in docs/API_KEYS.md. A scope implies no other one."""

MAX_KEY_BYTES: Final = 512


async def admit(request: Request) -> None:
    """Before every route: leaves the caller with the request. Raises KeyRefused, ScopeMissing, QueueUnavailable."""
    keyring = service_of(request).keyring
    if keyring is None:
        return
    needed = NEEDS[request.method, request.scope["route"].path]
    if needed is None:
        return
    secret = _secret_of(request.scope)
    key = await keyring.find(secret)
    if key is None:
        raise KeyRefused("nobody knows this API key, or it was revoked")
    if needed not in key.scopes:
        raise ScopeMissing(needed, held=list(key.scopes))
    request.scope[CALLER] = Caller(key.tenant, key.scopes, key.name)


def check_table(routers: Iterable[APIRouter]) -> None:
    """Every route has its line in NEEDS, or the application does not start: none is open, or shut, by mistake."""
    routes = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
    unlisted = {(method, route.path) for route in routes for method in route.methods or ()} - NEEDS.keys()
    assert not unlisted, f"access.NEEDS does not say which scope is needed for {sorted(unlisted)}"


def _secret_of(scope: AsgiScope) -> bytes:
    """The key in `Authorization: Bearer …`, as bytes: a header may hold any. Raises KeyRefused.

    Source: RFC 9110, section 11.4, and RFC 6750, section 2.1 (whose other two ways end up in logs).
    """
    given = [value for name, value in scope["headers"] if name == b"authorization"]
    if not given:
        raise KeyRefused("an API key is needed: send it as Authorization: Bearer KEY")
    if len(given) > 1:
        raise KeyRefused(f"{len(given)} Authorization headers; send one")
    scheme, _, secret = given[0].strip().partition(b" ")
    secret = secret.strip(b" ")
    if scheme.lower() != b"bearer" or not secret:
        raise KeyRefused("the Authorization header must be: Bearer KEY")
    if len(secret) > MAX_KEY_BYTES:
        raise KeyRefused(f"the API key is {len(secret)} bytes; none has more than {MAX_KEY_BYTES}")
    return bytes(secret)
