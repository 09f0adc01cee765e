"""The body of a line as the jobs that it asks for, and its answer as the endpoint's own route would have given it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import orjson

from jitney import AsyncClient, AsyncJob
from jitney.cards import QueueCard
from jitney.gathering import gather
from jitney.messages import JobSpec
from jitney.submission import check_against
from jitney_api.answers import chat_answer, completion_answer
from jitney_api.batches.records import Usage
from jitney_api.embeddings import check_dimensions, embeddings_answer
from jitney_api.fields import REFUSED, REFUSED_IN_EMBEDDINGS, refuse_unsupported
from jitney_api.schemas import (
    CHAT_ONLY,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    check_stream_options,
    parse,
)
from jitney_api.service import heading_of
from jitney_api.structure import named, named_as_asked
from jitney_api.translate import chat_job, completion_job, embedding_jobs
from jitney_api.whole import Shape

Answer = Callable[[AsyncClient, Sequence[AsyncJob]], Awaitable[tuple[bytes, Usage]]]

REFUSED_IN_BATCHES: Final[dict[str, tuple[Any, ...]]] = {
    # The batch itself says how its lines wait, end and are kept. Field: the values that change nothing.
    "stream": (False,),
    "band": ("bulk",),
    "idempotency_key": (),
    "on_disconnect": ("continue",),
    "result_ttl_s": (),
}


@dataclass(frozen=True, slots=True)
class LineRequest:
    """What a line asks for.

    specs: its jobs, one for each input of an embedding. answer: body and tokens, once they have ended; raises as
    `gather`. naming: inside it, an InvalidJob names the field that the caller wrote. limit_name: the field that limits
    the answer, None if nobody gave one. has_own_limit: a job of it may expire before the batch does.
    """

    model: str
    specs: tuple[JobSpec, ...]
    answer: Answer
    naming: Callable[[], AbstractContextManager[None]]
    limit_name: str | None = None
    dimensions: int | None = None

    @property
    def has_own_limit(self) -> bool:
        return any(limit is not None for limit in _limits_of(self.specs[0]))

    def check_against(self, card: QueueCard) -> None:
        """What only the queue's model can tell. Raises InvalidJob."""
        with self.naming():
            check_dimensions(card, self.dimensions)
            for spec in self.specs:
                check_against(card, spec)


def _limits_of(spec: JobSpec) -> tuple[float | None, ...]:
    return spec.timeout_s, spec.queue_timeout_s, spec.deadline


def read_request(url: str, body: dict[str, Any]) -> LineRequest:
    """The request that `body` (members that are `null` left out) is to the endpoint `url`. Raises InvalidJob."""
    refuse_unsupported(body, refused=REFUSED_IN_BATCHES, renamed={})
    return ENDPOINTS[url](body)


def _chat(body: dict[str, Any]) -> LineRequest:
    refuse_unsupported(body, except_for=CHAT_ONLY)
    asked = parse(ChatRequest, body)
    return _generation(asked, chat_job, chat_answer)


def _completion(body: dict[str, Any]) -> LineRequest:
    refuse_unsupported(body)
    asked = parse(CompletionRequest, body)
    return _generation(asked, completion_job, completion_answer)


def _generation(asked: Any, job: Callable[[Any], JobSpec], shape: Shape) -> LineRequest:
    check_stream_options(asked)
    naming = partial(named_as_asked, asked)
    with naming():
        return LineRequest(asked.model, (job(asked),), partial(_whole, shape), naming, asked.limit_name)


def _embedding(body: dict[str, Any]) -> LineRequest:
    refuse_unsupported(body, refused=REFUSED | REFUSED_IN_EMBEDDINGS)
    asked = parse(EmbeddingRequest, body)
    naming = partial(named, {"prompt": "input"})
    with naming():
        specs = tuple(embedding_jobs(asked))
    return LineRequest(asked.model, specs, partial(_vectors, asked), naming, dimensions=asked.dimensions)


ENDPOINTS: Final[dict[str, Callable[[dict[str, Any]], LineRequest]]] = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completion,
    "/v1/embeddings": _embedding,
}
"""What a batch may be for."""


async def _whole(shape: Shape, client: AsyncClient, jobs: Sequence[AsyncJob]) -> tuple[bytes, Usage]:
    (job,) = jobs
    result = await gather(client.reader, job.id)
    counted = result.usage
    usage = Usage(counted.get("prompt_tokens", 0), counted.get("cached_tokens", 0), counted.get("completion_tokens", 0))
    return orjson.dumps(shape(await heading_of(client, job.id), result)), usage


async def _vectors(asked: EmbeddingRequest, client: AsyncClient, jobs: Sequence[AsyncJob]) -> tuple[bytes, Usage]:
    body, num_tokens = await embeddings_answer(client.reader, jobs, asked.encoding_format)
    return body, Usage(input_tokens=num_tokens)
