"""OpenAI's files: the input and the output of batches."""

from __future__ import annotations

from typing import Annotated, Any, Final

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from jitney_api.batches.catalog import Direction
from jitney_api.batches.download import FileContent
from jitney_api.batches.records import FileRecord
from jitney_api.batches.schemas import FileForm
from jitney_api.batches.upload import received
from jitney_api.callers import caller_of
from jitney_api.documents import errors, form
from jitney_api.listing import as_list
from jitney_api.origins import refuse_foreign_page
from jitney_api.service import service_of

router = APIRouter(prefix="/v1/files", tags=["openai"])

MAX_PAGE: Final = 10_000


@router.post("", responses=errors(400, 403, 408, 413, 415, 503), openapi_extra=form(FileForm))
async def create_file(request: Request) -> dict[str, Any]:
    """Upload a file of requests, one JSON object a line; `purpose` is `batch`. Its own limit is `max_file_bytes`."""
    service = service_of(request)
    refuse_foreign_page(request, service.settings)
    async with received(request, service.desk.settings) as upload:
        return (await service.desk.add_file(caller_of(request), upload)).object()


@router.get("", responses=errors(400, 503))
async def list_files(
    request: Request,
    after: Annotated[str | None, Query(description="the last id already seen")] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = MAX_PAGE,
    order: Annotated[Direction, Query(description="by the time of creation")] = "desc",
    purpose: Annotated[str | None, Query(description="of this purpose alone")] = None,
) -> Response:
    """The files of the caller's tenant."""

    def wanted(file: FileRecord) -> bool:
        return purpose in (None, file.purpose)

    shelf, tenant = service_of(request).desk.catalog.files, caller_of(request).tenant
    return as_list(*await shelf.page(tenant, after=after, limit=limit, order=order, wanted=wanted))


@router.get("/{file_id}", responses=errors(404, 503))
async def get_file(request: Request, file_id: str) -> dict[str, Any]:
    """What is known of a file."""
    return (await service_of(request).desk.file(caller_of(request), file_id)).object()


@router.delete("/{file_id}", responses=errors(404, 409, 503))
async def delete_file(request: Request, file_id: str) -> dict[str, Any]:
    """A file goes now. The input of a batch that has not ended stays: 409."""
    await service_of(request).desk.drop_file(caller_of(request), file_id)
    return {"id": file_id, "object": "file", "deleted": True}


@router.get(
    "/{file_id}/content",
    response_model=None,
    responses={200: {"content": {"application/octet-stream": {}}}, **errors(404, 503)},
)
async def file_content(request: Request, file_id: str) -> Response:
    """The file itself, byte for byte."""
    desk = service_of(request).desk
    file = await desk.file(caller_of(request), file_id)
    return await FileContent.begin(file, desk.store.read(file.id))
