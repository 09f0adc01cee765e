"""The embeddings of one request as one body, once all of its jobs have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Literal

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jitney import AsyncJob
from jitney.cards import QueueCard
from jitney.errors import InvalidJob, JitneyError
from jitney.gathering import gather
from jitney.keys import queue_of
from jitney.reading import Reader
from jitney.result import Result
from jitney_api.failures import JOB_ID_HEADER, ApiStopping
from jitney_api.presence import ClientGone, client_leaves, unless
from jitney_api.service import Service
from jitney_api.together import together

Encoding = Literal["float", "base64"]


class EmbeddingsAnswer(Response):
    """Waits for all jobs. The ending of one that did not finish is raised, and the others are cancelled.

    cancels: if the client leaves, so do the jobs.
    """

    def __init__(self, service: Service, jobs: Sequence[AsyncJob], encoding: Encoding, *, cancels: bool) -> None:
        named = {JOB_ID_HEADER: jobs[0].id} if len(jobs) == 1 else {}
        super().__init__(headers=named, media_type="application/json")
        self._service = service
        self._jobs = jobs
        self._encoding = encoding
        self._cancels = cancels

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self.body = await unless(self._whole(), client_leaves(receive))
        except ClientGone:
            if self._cancels:
                await together(self._service.leave, [job.id for job in self._jobs])
            return
        except asyncio.CancelledError:  # only a server that stops cancels a request
            raise ApiStopping(self._jobs[0].id) from None
        except JitneyError:
            await self._service.cancel_all(self._jobs)
            raise
        self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)

    async def _whole(self) -> bytes:
        body, _ = await embeddings_answer(self._service.client.reader, self._jobs, self._encoding)
        return body


async def embeddings_answer(reader: Reader, jobs: Sequence[AsyncJob], encoding: Encoding) -> tuple[bytes, int]:
    """The body of an answer, once all jobs have ended, and the tokens of all inputs. Raises as `gather`.

    Written piece by piece: millions of numbers at once would hold up every other request.
    """

    async def item_of(one: tuple[int, AsyncJob]) -> tuple[bytes, int]:
        index, job = one
        result = await gather(reader, job.id)
        item = {"object": "embedding", "index": index, "embedding": _shown(result, encoding)}
        return orjson.dumps(item), result.usage.get("prompt_tokens", 0)

    items = await together(item_of, list(enumerate(jobs)))
    num_tokens = sum(num for _, num in items)
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    rest = orjson.dumps({"model": queue_of(jobs[0].id), "usage": usage})
    return b'{"object":"list","data":[' + b",".join(item for item, _ in items) + b"]," + rest[1:], num_tokens


def check_dimensions(card: QueueCard, dimensions: int | None) -> None:
    """The first numbers of a vector stand for the whole only where a model was trained for that. Raises InvalidJob."""
    if dimensions is not None and dimensions != card.hidden_size > 0:
        raise InvalidJob(
            f"dimensions={dimensions} is not supported: embeddings of {card.model} have {card.hidden_size}",
            param="dimensions",
            code="unsupported_parameter",
        )


def _shown(result: Result, encoding: Encoding) -> Any:
    if result.packed_embedding is None:
        raise JitneyError(f"job {result.id} has finished, but its worker gave no embedding")
    return result.packed_embedding if encoding == "base64" else result.embedding
