"""OpenAI's embeddings: each input is a job, computed in the same batch as everybody's answers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from jitney.errors import InvalidJob, PromptTooLong
from jitney_api.callers import caller_of
from jitney_api.documents import documented
from jitney_api.edge import read_object
from jitney_api.embeddings import EmbeddingsAnswer, check_dimensions
from jitney_api.fields import REFUSED, REFUSED_IN_EMBEDDINGS, refuse_unsupported
from jitney_api.schemas import EmbeddingRequest, parse
from jitney_api.service import service_of
from jitney_api.translate import embedding_jobs

router = APIRouter(tags=["openai"])


@router.post("/v1/embeddings", **documented(EmbeddingRequest))
async def embeddings(request: Request) -> Response:
    """Embed one text or several. With one input the header `x-jitney-job-id` names the job behind it."""
    service = service_of(request)
    body = await read_object(request, service.settings)
    refuse_unsupported(body, refused=REFUSED | REFUSED_IN_EMBEDDINGS)
    asked = parse(EmbeddingRequest, body)
    _, card = await service.client.card(asked.model)
    check_dimensions(card, asked.dimensions)
    specs = embedding_jobs(asked)
    with _named_as_asked():
        jobs = await service.enqueue_all(caller_of(request), asked.model, specs)
    return EmbeddingsAnswer(service, jobs, asked.encoding_format, cancels=specs[0].on_disconnect == "cancel")


@contextlib.contextmanager
def _named_as_asked() -> Iterator[None]:
    """What is `prompt` to a job was `input` to its caller."""
    try:
        yield
    except InvalidJob as error:
        if error.param != "prompt":
            raise
        if isinstance(error, PromptTooLong):  # its numbers are told, too
            error.param = "input"
            raise
        raise InvalidJob(str(error), param="input", code=error.code) from None
