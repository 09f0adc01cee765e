"""OpenAI's batches: a file of requests, answered in the bulk band within a day, as another file."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jitney_api.batches.schemas import BatchRequest
from jitney_api.callers import caller_of
from jitney_api.documents import documented, errors
from jitney_api.edge import read_object
from jitney_api.listing import as_list
from jitney_api.schemas import parse
from jitney_api.service import service_of

router = APIRouter(prefix="/v1/batches", tags=["openai"])


@router.post("", **documented(BatchRequest))
async def create_batch(request: Request) -> Response:
    """Have every line of a file answered. Its RQ job checks the lines, runs them and writes the output.

    With an `Idempotency-Key` a repeated request answers the batch that exists; the same key for another body is a 409.
    """
    service = service_of(request)
    asked = parse(BatchRequest, await read_object(request, service.settings))
    return JSONResponse((await service.desk.create(caller_of(request), asked)).object())


@router.get("", responses=errors(400, 503))
async def list_batches(
    request: Request,
    after: Annotated[str | None, Query(description="the last id already seen")] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> Response:
    """The batches of the caller's tenant, the newest first."""
    shelf, tenant = service_of(request).desk.catalog.batches, caller_of(request).tenant
    return as_list(*await shelf.page(tenant, after=after, limit=limit))


@router.get("/{batch_id}", responses=errors(404, 503))
async def get_batch(request: Request, batch_id: str) -> dict[str, Any]:
    """Where a batch stands. `request_counts` are what is written, not what is under way."""
    return (await service_of(request).desk.batch(caller_of(request), batch_id)).object()


@router.post("/{batch_id}/cancel", responses=errors(404, 503))
async def cancel_batch(request: Request, batch_id: str) -> dict[str, Any]:
    """Let nothing of it begin any more; what is answered already is kept, and can be read when it is `cancelled`.

    May be repeated; one that is being finalized, or has ended, stays as it is.
    """
    return (await service_of(request).desk.cancel(caller_of(request), batch_id)).object()
