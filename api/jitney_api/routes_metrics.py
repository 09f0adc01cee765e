"""What Prometheus scrapes: this process, every queue, and the workers that are alive."""

from __future__ import annotations

from fastapi import APIRouter
from redis.exceptions import RedisError
from starlette.requests import Request
from starlette.responses import Response

from jitney.cards import list_cards
from jitney.connection import Redis
from jitney.depth import read_queue
from jitney.metrics.exposition import Source, render
from jitney.metrics.readings import Readings
from jitney.metrics.table import OF_API, OF_QUEUE, OF_WORKER, QUEUE_LABELS, WORKER_LABELS
from jitney.workers import list_readings, list_workers
from jitney_api.service import service_of

router = APIRouter(tags=["health"])

Labelled = list[tuple[tuple[str, ...], Readings]]


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"description": "in Prometheus' text format", "content": {"text/plain": {}}}},
)
async def metrics(request: Request) -> Response:
    """Prometheus metrics of this process, of every queue, and of every worker that is alive (docs/METRICS.md).

    Workers publish theirs at least every third of a lease, and twice a second while they work. With Redis away this is
    a 200 with the process' own metrics and `jitney_redis_up 0`: that is what somebody should be woken for.
    """
    own: Readings = request.app.state.traffic
    queues, workers = Labelled(), Labelled()
    try:
        queues, workers = await _read_all(service_of(request).client.redis)
        own.set("jitney_redis_up", 1)
    except (RedisError, OSError):
        own.set("jitney_redis_up", 0)
    sources = [
        Source(OF_API, (), [((), own)]),
        Source(OF_QUEUE, QUEUE_LABELS, queues),
        Source(OF_WORKER, WORKER_LABELS, workers),
    ]
    page, content_type = render(sources, request.headers.get("accept", ""))
    return Response(page, headers={"content-type": content_type})


async def _read_all(redis: Redis) -> tuple[Labelled, Labelled]:
    queues, workers = Labelled(), Labelled()
    for name, card in (await list_cards(redis)).items():
        views = await list_workers(redis, name)
        queues.append(((card.model, name), await read_queue(redis, name, views)))
        workers += [((view.model, name, view.id), readings) for view, readings in await list_readings(redis, name)]
    return queues, workers
