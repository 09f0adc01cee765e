"""The endpoints of OpenAI that a queue can answer: completions, chat completions, models."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from jitney.cards import QueueCard
from jitney.errors import UnknownQueue
from jitney.messages import JobSpec
from jitney_api.answers import chat_answer, completion_answer
from jitney_api.callers import caller_of
from jitney_api.documents import documented, errors
from jitney_api.edge import read_object
from jitney_api.failures import refuse_if_failed
from jitney_api.fields import refuse_unsupported
from jitney_api.frames import NO_USAGE, StreamFormat, UsageTerms, frames_for
from jitney_api.schemas import CHAT_ONLY, ChatRequest, CompletionRequest, StreamOptions, check_stream_options, parse
from jitney_api.service import service_of
from jitney_api.sse import EventStream, StreamTerms
from jitney_api.structure import named_as_asked
from jitney_api.translate import chat_job, completion_job
from jitney_api.whole import Shape, WholeAnswer

router = APIRouter(tags=["openai"])


@router.post("/v1/chat/completions", **documented(ChatRequest, streams=True))
async def chat_completions(request: Request) -> Response:
    """Answer a chat, streamed or whole. The header `x-jitney-job-id` names the job behind it."""
    asked = parse(ChatRequest, await _supported_body(request, CHAT_ONLY))
    check_stream_options(asked)
    with named_as_asked(asked):
        return await _answer(request, asked, chat_job(asked), "chat.completion.chunk", chat_answer)


@router.post("/v1/completions", **documented(CompletionRequest, streams=True))
async def completions(request: Request) -> Response:
    """Continue a text, streamed or whole. A prompt is taken as it is; control tokens in it count as such."""
    asked = parse(CompletionRequest, await _supported_body(request))
    check_stream_options(asked)
    with named_as_asked(asked):
        return await _answer(request, asked, completion_job(asked), "completion", completion_answer)


@router.get("/v1/models", responses=errors(503))
async def list_models(request: Request) -> dict[str, Any]:
    """Every queue and alias: the names that `model` knows."""
    cards = await service_of(request).cards()
    return {"object": "list", "data": [_model(name, card) for name, card in cards.items()]}


@router.get("/v1/models/{model:path}", responses=errors(404, 503))
async def get_model(request: Request, model: str) -> dict[str, Any]:
    """One queue, by its own name or an alias."""
    service = service_of(request)
    if not model:
        raise UnknownQueue(model, list(await service.cards()))
    _, card = await service.client.card(model)
    return _model(model, card)


def _model(name: str, card: QueueCard) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(card.created),
        "owned_by": "jitney",
        "root": card.model,
        "max_model_len": card.max_model_len,
    }


async def _supported_body(request: Request, also: Container[str] = ()) -> dict[str, Any]:
    body = await read_object(request, service_of(request).settings)
    refuse_unsupported(body, except_for=also)
    return body


async def _answer(
    request: Request,
    asked: ChatRequest | CompletionRequest,
    spec: JobSpec,
    stream_format: StreamFormat,
    whole: Shape,
) -> Response:
    """Enqueue, and answer as asked. Nothing is written before everything that can be checked here was checked."""
    service = service_of(request)
    usage = _usage_terms(asked.stream_options)
    job = await service.enqueue(caller_of(request), asked, spec)
    heading = await service.heading(job.id)

    async def on_gone() -> None:
        if spec.on_disconnect == "cancel":
            await service.leave(job.id)

    if not asked.stream:
        return WholeAnswer(service.client.reader, heading, whole, on_gone=on_gone)
    terms = StreamTerms(hold_s=service.settings.headers_hold_s, on_first=refuse_if_failed, on_gone=on_gone)
    frames = frames_for(stream_format, heading, usage)
    return EventStream(service.client.reader, job.id, frames, service.settings, terms)


def _usage_terms(options: StreamOptions | None) -> UsageTerms:
    if options is None:
        return NO_USAGE
    return UsageTerms(bool(options.include_usage), bool(options.continuous_usage_stats), where="stream_options.")
