"""jitney's own endpoints: enqueue and leave, come back, watch from any cursor, cancel."""

from __future__ import annotations

from typing import Annotated, Any, Final

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jitney.errors import InvalidJob, JobEnded, StreamLost
from jitney.follower import parse as parse_event
from jitney.keys import JobId, queue_of
from jitney.records import JobStatus
from jitney.result import Choice, Collector, Result
from jitney.shapes import call_shape, usage_shape
from jitney_api.callers import caller_of
from jitney_api.cursor import cursor_of
from jitney_api.documents import documented, errors
from jitney_api.edge import read_object
from jitney_api.failures import JOB_ID_HEADER, wire_of
from jitney_api.fields import refuse_unsupported
from jitney_api.frames import StreamFormat, UsageTerms, frames_for
from jitney_api.schemas import CHAT_ONLY, JobRequest, parse
from jitney_api.service import Service, answering, service_of
from jitney_api.sse import EventStream, StreamTerms
from jitney_api.translate import detached_job

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])


@router.post("", **documented(JobRequest, status=202))
async def create_job(request: Request) -> Response:
    """Enqueue a job and leave. It runs to its end whoever watches; its id is all that is needed later.

    With an `Idempotency-Key` a repeated request answers the job that exists; the same key for another body is a 409.
    """
    service = service_of(request)
    body = await read_object(request, service.settings)
    refuse_unsupported(body, except_for=CHAT_ONLY)
    asked = parse(JobRequest, body)
    job = await service.enqueue(caller_of(request), asked, detached_job(asked))
    return JSONResponse(_links(job.id), 202, {JOB_ID_HEADER: job.id, "location": f"/v1/jobs/{job.id}"})


@router.get("/{job_id}", responses=errors(404, 503))
async def get_job(request: Request, job_id: str) -> dict[str, Any]:
    """Where the job stands; once it has ended also what it said, its usage, or its error."""
    service = service_of(request)
    status = await service.status(caller_of(request), job_id)
    return {**_links(status.id), "object": "job", **standing(status), **await _outcome(service, status)}


@router.delete("/{job_id}", responses=errors(404, 503))
async def cancel_job(request: Request, job_id: str) -> dict[str, Any]:
    """End the job now. May be repeated; a job that has already ended stays as it is.

    `cancelled`: whether it was this request that ended it.
    """
    service = service_of(request)
    caller = caller_of(request)
    status = await service.status(caller, job_id)
    cancelled = await service.client.job(status.id).cancel()
    now = standing(await service.status(caller, job_id))
    return {**_links(status.id), "object": "job", **now, "cancelled": cancelled}


@router.get("/{job_id}/events", responses={200: {"content": {"text/event-stream": {}}}, **errors(400, 404, 410, 503)})
async def job_events(
    request: Request,
    job_id: str,
    stream_format: Annotated[StreamFormat, Query(alias="format")] = "job",
    starting_after: Annotated[int, Query(ge=0, description="the last seq already seen")] = 0,
    include_usage: Annotated[bool, Query(description="as in stream_options")] = False,
    continuous_usage_stats: Annotated[bool, Query(description="as in stream_options")] = False,
) -> Response:
    """The job's events from a cursor on, past ones and then live ones, as server-sent events.

    `Last-Event-ID`, which a browser sends when it reconnects to the URL it began with, goes before `starting_after`;
    one that lies before it is refused, for such a reader contradicts itself. Watching never cancels. 204 when the job
    has ended and all of it was seen: it tells a browser to stop reconnecting. 410 when the log does not reach the
    cursor: Redis lost a part of it, and what was seen is no beginning of what is there now.
    """
    service = service_of(request)
    _refuse_unknown(request)
    cursor = cursor_of(request, starting_after)
    usage = UsageTerms(include_usage, continuous_usage_stats)
    status = await service.status(caller_of(request), job_id)
    if status.state == "done" and cursor == status.seq:
        return Response(status_code=204, headers={JOB_ID_HEADER: status.id})
    heading = await service.heading(status.id)
    from_start = stream_format == "chat.completion.chunk" and cursor > 0 and await service.has_calls(status.id)
    frames = frames_for(stream_format, heading, usage, from_start=from_start)
    if cursor > status.seq and (status.state != "running" or frames.needs_past):
        raise StreamLost(f"the log of job {status.id} ends at event {status.seq}; event {cursor} was of another one")
    # What is in the log already goes out in the first write; when there is nothing new the headers need not wait.
    hold_s = service.settings.headers_hold_s if status.seq != cursor else 0.0
    terms = StreamTerms(cursor=cursor, hold_s=hold_s)
    return EventStream(service.client.reader, status.id, frames, service.settings, terms)


def _links(job_id: JobId) -> dict[str, Any]:
    here = f"/v1/jobs/{job_id}"
    return {"id": job_id, "queue": queue_of(job_id), "status_url": here, "events_url": f"{here}/events"}


def _refuse_unknown(request: Request) -> None:
    """Raises InvalidJob for a misspelt cursor, say: ignored, it would tell a reader everything once more."""
    for name in request.query_params:
        if name not in _PARAMETERS:
            known = ", ".join(_PARAMETERS)
            raise InvalidJob(f"unknown parameter {name[:64]}; known: {known}", param=name[:64], code="unknown_field")


_PARAMETERS: Final = ("format", "starting_after", "include_usage", "continuous_usage_stats")


def standing(status: JobStatus) -> dict[str, Any]:
    """`status`: queued, delayed, running, or the type of the job's last event. No `owner`: workers are for `admin`."""
    words = {"waiting": "queued", "returned": "queued", "later": "delayed", "running": "running"}
    return {
        "status": words.get(status.state, status.reason),
        "state": status.state,
        "reason": status.reason,
        "band": status.band,
        "tenant": status.tenant,
        "seq": status.seq,
        "attempts": status.tries,
        "strikes": status.strikes,
        "num_prompt_tokens": status.num_prompt_tokens,
        "num_tokens": status.num_tokens,
        "created_at": status.created_at,
        "started_at": status.started_at,
        "ended_at": status.ended_at,
        "deadline": status.deadline,
    }


async def _outcome(service: Service, status: JobStatus) -> dict[str, Any]:
    """`choices` and `usage` of a finished job, and `prompt_logprobs` or `embedding` if it asked for them.

    `text` so far and `error` of one that ended otherwise.
    """
    if status.state != "done":
        return {}
    try:
        result = await _result(service, status.id)
    except JobEnded as ended:
        return {"text": ended.text, "error": wire_of(ended)}
    if result is None:
        return {}
    choices = [
        {
            "index": choice.index,
            "text": choice.text,
            "token_ids": choice.token_ids,
            "finish_reason": choice.finish_reason,
            "logprobs": choice.logprobs,
            **_called(choice),
        }
        for choice in result.choices
    ]
    asked_for: dict[str, Any] = {} if result.prompt_logprobs is None else {"prompt_logprobs": result.prompt_logprobs}
    if result.embedding is not None:
        asked_for["embedding"] = result.embedding
    return {"choices": choices, "usage": usage_shape(result.usage), **asked_for}


def _called(choice: Choice) -> dict[str, Any]:
    """Of a choice that made calls: those, and what it said besides."""
    if not choice.tool_calls:
        return {}
    return {"content": choice.content, "tool_calls": [call_shape(call) for call in choice.tool_calls]}


async def _result(service: Service, job_id: JobId) -> Result | None:
    """The log of an ended job, added up. None when it is gone already. Raises JobEnded."""
    queue = service.client.queue(queue_of(job_id))
    collector, seq = Collector(job_id), 0
    while True:
        async with answering():
            payloads = await queue.read_log(job_id, seq)
        if not payloads:
            return None
        for payload in payloads:
            message = parse_event(payload)
            if message is None:
                return None
            seq = message.event.seq
            result = collector.add(message.event)
            if result is not None:
                return result
