"""What an operator does: look at anybody's job, end it, and raise the dead."""

from __future__ import annotations

from typing import Any, Final

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from jitney.cards import list_cards
from jitney.dead_view import Letter, as_json
from jitney.keys import queue_of
from jitney_api.callers import ANYBODY, caller_of
from jitney_api.documents import documented, errors
from jitney_api.edge import read_object
from jitney_api.routes_jobs import standing
from jitney_api.schemas import RequeueRequest, parse
from jitney_api.service import answering, service_of
from jitney_api.timeline import timeline_of

router = APIRouter()

NUM_LETTERS: Final = 100


@router.get("/v1/jobs/{job_id}/timeline", tags=["jobs"], responses=errors(404, 503))
async def job_timeline(request: Request, job_id: str) -> dict[str, Any]:
    """What became of a job: queued, claimed, its seats, preemptions and hand-overs, its end. No prompt, no text."""
    service = service_of(request)
    status = await service.status(caller_of(request), job_id)
    return {"id": status.id, **standing(status), **await timeline_of(service, status, with_texts=False)}


@router.get("/v1/admin/jobs/{job_id}", tags=["admin"], responses=errors(404, 503))
async def admin_job(request: Request, job_id: str) -> dict[str, Any]:
    """The timeline of any tenant's job, with its owner, its prompt while that is kept, and what it has said."""
    service = service_of(request)
    status = await service.status(ANYBODY, job_id)
    told = await timeline_of(service, status, with_texts=True)
    return {"id": status.id, "owner": status.owner, **standing(status), **told}


@router.delete("/v1/admin/jobs/{job_id}", tags=["admin"], responses=errors(404, 503))
async def admin_cancel(request: Request, job_id: str) -> dict[str, Any]:
    """End any tenant's job now. `cancelled`: whether it was this request that ended it."""
    service = service_of(request)
    status = await service.status(ANYBODY, job_id)
    cancelled = await service.client.job(status.id).cancel()
    return {"id": status.id, **standing(await service.status(ANYBODY, job_id)), "cancelled": cancelled}


@router.get("/v1/admin/dead", tags=["admin"], responses={200: {"content": {"application/json": {}}}, **errors(503)})
async def dead_letters(request: Request) -> Response:
    """The youngest dead letters of every queue, youngest first, a hundred of each at most, with their last errors."""
    service = service_of(request)
    letters: list[Letter] = []
    async with answering():
        for name in await list_cards(service.client.redis):
            letters += [Letter(name, dead) for dead in await service.client.queue(name).dead(count=NUM_LETTERS)]
    letters.sort(key=lambda letter: letter.dead.buried_at, reverse=True)
    data = [orjson.loads(as_json(letter, whole=False)) for letter in letters]
    return Response(orjson.dumps({"object": "list", "data": data}), media_type="application/json")


@router.post("/v1/admin/dead/requeue", tags=["admin"], **documented(RequeueRequest))
async def requeue_dead(request: Request) -> dict[str, Any]:
    """Queue a dead letter anew, as another job. `id`: the job's that was buried; answers with the new one's."""
    service = service_of(request)
    asked = parse(RequeueRequest, await read_object(request, service.settings))
    queue = service.client.queue(queue_of(asked.id))
    async with answering():
        anew = await queue.requeue_dead(asked.id, service.settings.limits)
    return {"id": asked.id, "requeued_as": anew}
