"""What Prometheus scrapes: this process, every queue, and the workers that are alive."""

from __future__ import annotations

import asyncio
from typing import Final

from fastapi import APIRouter
from redis.exceptions import RedisError, ResponseError
from starlette.requests import Request
from starlette.responses import Response

from jitney.calls import is_wrong_kind, slices
from jitney.cards import QueueCard, list_cards
from jitney.connection import Redis
from jitney.depth import read_queue
from jitney.metrics.exposition import Source, render
from jitney.metrics.readings import Readings
from jitney.metrics.table import OF_API, OF_QUEUE, OF_WORKER, QUEUE_LABELS, WORKER_LABELS
from jitney.workers import list_readings
from jitney_api.service import service_of

router = APIRouter(tags=["health"])

Labelled = list[tuple[tuple[str, ...], Readings]]

QUEUES_AT_ONCE: Final = 8
"""Fewer than the connections that requests have."""


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
    # Beside the loop: a worker's part takes five milliseconds, and every stream would wait for those of all workers.
    page, content_type = await asyncio.to_thread(render, sources, request.headers.get("accept", ""))
    return Response(page, headers={"content-type": content_type})


async def _read_all(redis: Redis) -> tuple[Labelled, Labelled]:
    seconds, microseconds = await redis.time()
    now = seconds + microseconds / 1e6
    queues, workers = Labelled(), Labelled()
    for part in slices(list((await list_cards(redis)).items()), QUEUES_AT_ONCE):
        for of_queue, of_workers in await asyncio.gather(*(_read(redis, name, card, now) for name, card in part)):
            queues += of_queue
            workers += of_workers
    return queues, workers


async def _read(redis: Redis, name: str, card: QueueCard, now: float) -> tuple[Labelled, Labelled]:
    """Nothing of a queue under whose keys somebody has put something else: that is no reason to be silent of others."""
    try:
        found = await list_readings(redis, name)
        queue = await read_queue(redis, name, [view for view, _ in found], now)
    except ResponseError as error:
        if is_wrong_kind(error):
            return [], []
        raise
    workers = Labelled(((view.model, name, view.id), told) for view, told in found if told is not None)
    return [((card.model, name), queue)], workers
