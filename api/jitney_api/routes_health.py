"""Is the process alive, can it serve, and who works for it."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jitney.cards import list_cards
from jitney.errors import QueueUnavailable
from jitney.messages import WIRE_VERSION
from jitney.workers import WorkerView, list_workers
from jitney_api.documents import errors
from jitney_api.failures import wire_of
from jitney_api.service import Service, answering, service_of

router = APIRouter(tags=["health"])


@router.get("/livez")
async def livez() -> dict[str, str]:
    """The process answers."""
    return {"status": "ok"}


@router.get("/version")
async def show_version() -> dict[str, Any]:
    """Of this program, and of what travels in jobs and events."""
    return {"version": version("jitney"), "wire_version": WIRE_VERSION}


@router.get("/readyz", responses={503: {"description": "not ready, and why"}})
async def readyz(request: Request) -> Response:
    """Redis answers and at least one queue is known. Workers are not needed: a job waits for them."""
    try:
        cards = await service_of(request).cards()
    except QueueUnavailable as error:
        return JSONResponse({"status": "unavailable", "reason": wire_of(error)["message"]}, 503)
    if not cards:
        return JSONResponse({"status": "unavailable", "reason": "no queue is known yet: start a worker"}, 503)
    return JSONResponse({"status": "ok"})


@router.get("/health", responses={503: {"description": "Redis does not answer"}})
async def health(request: Request) -> Response:
    """Every queue with what waits in it and the workers that are alive."""
    service = service_of(request)
    try:
        async with answering():
            cards = await list_cards(service.client.redis)
            queues = {name: await _queue(service, name, card.model) for name, card in cards.items()}
    except QueueUnavailable as error:
        return JSONResponse({"status": "unavailable", "reason": wire_of(error)["message"], "queues": {}}, 503)
    return JSONResponse({"status": "ok", "queues": queues})


@router.get("/v1/queue", tags=["queue"], responses=errors(400, 404, 503))
async def queue(request: Request, model: str | None = None) -> dict[str, Any]:
    """What waits, who works, and in how many seconds it is worked off. `model`: a queue, an alias or a model.

    For autoscalers: scale on `drain_seconds`; `num_waiting_jobs` > 0 with no workers means scale from zero.
    """
    service = service_of(request)
    name, card = await service.client.card(model)
    async with answering():
        backlog = await service.client.queue(name).backlog()
        workers = await list_workers(service.client.redis, name)
    return {
        "queue": name,
        "model": card.model,
        "num_waiting_jobs": backlog.num_jobs,
        "num_waiting_tokens": backlog.num_tokens,
        "num_workers": len(workers),
        "tokens_per_second": backlog.tokens_per_s,
        "drain_seconds": round(backlog.drain_s, 3),
    }


async def _queue(service: Service, name: str, model: str) -> dict[str, Any]:
    num_jobs, num_tokens = await service.client.queue(name).counts()
    workers = await list_workers(service.client.redis, name)
    return {
        "model": model,
        "num_waiting_jobs": num_jobs,
        "num_waiting_tokens": num_tokens,
        "workers": [_worker(view) for view in workers],
    }


def _worker(view: WorkerView) -> dict[str, Any]:
    return view.model_dump(
        include={"id", "state", "fingerprint", "num_running", "num_waiting", "max_num_seqs", "written_at"}
    )
