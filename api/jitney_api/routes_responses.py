"""OpenAI's responses. A response is a job and nothing besides: the job's record and log are all that is stored."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jitney.errors import InvalidJob, StreamLost
from jitney_api.callers import caller_of
from jitney_api.cursor import cursor_of
from jitney_api.documents import documented, errors
from jitney_api.edge import read_object
from jitney_api.failures import JOB_ID_HEADER, refuse_if_failed
from jitney_api.response_fields import refuse_unsupported
from jitney_api.response_frames import ResponseFrames
from jitney_api.response_job import NAMES, response_job
from jitney_api.response_schemas import ResponseRequest
from jitney_api.responses import PREFIX, ResponseShape
from jitney_api.schemas import parse
from jitney_api.service import Service, service_of
from jitney_api.sse import EventStream, StreamTerms
from jitney_api.stored import StoredResponse, find_response, past_of
from jitney_api.structure import named
from jitney_api.whole import WholeAnswer

router = APIRouter(prefix="/v1/responses", tags=["openai"])


@router.post("", **documented(ResponseRequest, streams=True))
async def create_response(request: Request) -> Response:
    """Answer an input, streamed or whole; with `background=true` at once, with what becomes of it told by `GET`."""
    service, caller = service_of(request), caller_of(request)
    body = await read_object(request, service.settings)
    refuse_unsupported(body)
    asked = parse(ResponseRequest, body)
    past = await past_of(service, caller, asked.previous_response_id)
    with named(NAMES):
        spec = response_job(asked, past)
        job = await service.enqueue(caller, asked, spec)
    if asked.background and not asked.stream:
        # As it stands: an idempotency key may have found a response that has long ended.
        stored = await find_response(service, caller, f"{PREFIX}{job.id}")
        return JSONResponse(await stored.object(service), headers={JOB_ID_HEADER: job.id})
    heading = await service.heading(job.id)
    shape = ResponseShape(heading, spec)

    async def on_gone() -> None:
        if spec.on_disconnect == "cancel":
            await service.leave(job.id)

    if not asked.stream:
        return WholeAnswer(service.client.reader, heading, shape.of_result, on_gone=on_gone)
    # One in the background need not hold its status back: whatever comes, it was taken.
    hold_s = 0.0 if asked.background else service.settings.headers_hold_s
    terms = StreamTerms(hold_s=hold_s, on_first=refuse_if_failed, on_gone=on_gone)
    return EventStream(service.client.reader, job.id, ResponseFrames(shape), service.settings, terms)


@router.get(
    "/{response_id}",
    response_model=None,
    responses={
        200: {"content": {"application/json": {}, "text/event-stream": {}}},
        204: {"description": "all of the stream was seen"},
        **errors(400, 404, 410, 503),
    },
)
async def get_response(
    request: Request,
    response_id: str,
    stream: Annotated[bool, Query(description="the events instead of the object")] = False,
    starting_after: Annotated[int | None, Query(ge=0, description="the last sequence_number already seen")] = None,
) -> Response:
    """A response as it stands, or its stream from a cursor on: past events and then live ones. Watching never cancels.

    `Last-Event-ID` goes before `starting_after`, as in the events of a job; so do 204 and 410. Of a response with
    `store=false` nothing is found.
    """
    service = service_of(request)
    if starting_after is not None and not stream:
        raise InvalidJob("starting_after needs stream=true", param="starting_after")
    stored = await find_response(service, caller_of(request), response_id)
    if stream:
        return await _stream(request, service, stored, -1 if starting_after is None else starting_after)
    return JSONResponse(await stored.object(service), headers={JOB_ID_HEADER: stored.status.id})


@router.post("/{response_id}/cancel", responses=errors(404, 410, 503))
async def cancel_response(request: Request, response_id: str) -> dict[str, Any]:
    """End a response now, in the background or not. May be repeated; one that has ended stays as it is."""
    service, caller = service_of(request), caller_of(request)
    stored = await find_response(service, caller, response_id)
    if stored.status.seq:
        caller.check_scope("read")  # what it has said so far is in the answer
    await service.client.job(stored.status.id).cancel()
    return await (await find_response(service, caller, response_id)).object(service)


async def _stream(request: Request, service: Service, stored: StoredResponse, starting_after: int) -> Response:
    cursor, status = cursor_of(request, starting_after), stored.status
    if cursor >= 0:
        newest = (await stored.told(service)).num_told - 1
        if cursor > newest:
            raise StreamLost(f"the stream of {stored.shape.id} ends at {newest}; event {cursor} was of another one")
        if cursor == newest and status.state == "done":
            return Response(status_code=204, headers={JOB_ID_HEADER: status.id})
    frames = ResponseFrames(stored.shape, cursor)
    # What is in the log already goes out in the first write.
    hold_s = service.settings.headers_hold_s if status.seq else 0.0
    return EventStream(service.client.reader, status.id, frames, service.settings, StreamTerms(hold_s=hold_s))
