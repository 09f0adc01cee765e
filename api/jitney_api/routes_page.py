"""The live page, its files, and what it shows: the batch as it is now."""

from __future__ import annotations

import hashlib
from importlib.resources import files
from typing import Final

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from jitney.shows import asset
from jitney_api.callers import caller_of
from jitney_api.documents import errors
from jitney_api.overview_stream import OverviewStream
from jitney_api.service import service_of
from jitney_api.watchtower import glance

router = APIRouter()

_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""No script or style in the page itself, and nothing from or to another host: what a job said can never run."""

_KINDS: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
}
_OWN: Final = (
    *("live.html", "live.css", "icon.svg", "live.js", "dom.js", "stream.js", "summary.js", "worker.js", "queue.js"),
    *("job.js", "ask.js", "dead.js"),
)


def _file(name: str, content: str) -> Response:
    """Asked for anew each time, and sent anew only where it has changed."""
    tag = hashlib.sha256(content.encode()).hexdigest()[:16]
    return Response(
        content,
        media_type=_KINDS[name[name.rindex(".") :]],
        headers={
            "cache-control": "no-cache",
            "etag": f'"{tag}"',
            "content-security-policy": _POLICY,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
        },
    )


_FILES: Final = {name: _file(name, files("jitney_api.pages").joinpath(name).read_text("utf-8")) for name in _OWN} | {
    "lockstep.js": _file("lockstep.js", asset("lockstep.js")),
    "lockstep.css": _file("lockstep.css", asset("lockstep.css")),
    "sixteen-jobs.json": _file("sixteen-jobs.json", asset("sixteen-jobs.json")),
}
"""All that is ever served, read once: a name is looked up here and never on the disk."""


@router.get("/", include_in_schema=False)
async def live_page(request: Request) -> Response:
    """The page. There is nothing of anybody in it: what it shows it asks for, with a key where one is needed."""
    return _unless_known(request, _FILES["live.html"])


@router.get("/page/{name}", include_in_schema=False)
async def page_file(request: Request, name: str) -> Response:
    """Scripts, styles and the run that is played."""
    if name not in _FILES:
        raise HTTPException(404)
    return _unless_known(request, _FILES[name])


@router.get("/v1/overview", tags=["queue"], responses={200: {"content": {"application/json": {}}}, **errors(503)})
async def overview(request: Request) -> Response:
    """Every queue with its workers: seats, step budget, KV blocks, what waits, throughput and latencies.

    Rates are over the last two seconds, latencies over the last half minute, of what this process has been looking at;
    a first look has none.
    """
    return Response(await glance(service_of(request).watchtower), media_type="application/json")


# Not in the document: it never ends, and whoever calls every operation that is there would wait for it.
@router.get("/v1/overview/events", include_in_schema=False)
async def overview_events(request: Request) -> Response:
    """The same again and again, as server-sent events: `you`, `curves`, then `overview` or `trouble` twice a second.

    All readers of one process share its looks at Redis.
    """
    service = service_of(request)
    return OverviewStream(service.watchtower, caller_of(request), service.settings)


def _unless_known(request: Request, file: Response) -> Response:
    """304 if the browser has it already."""
    if request.headers.get("if-none-match") == file.headers["etag"]:
        return Response(status_code=304, headers={"etag": file.headers["etag"], "cache-control": "no-cache"})
    return file
