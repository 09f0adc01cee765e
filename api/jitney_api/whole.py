"""A job's answer as one body, once the job has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jitney.channel import ChannelReader
from jitney.gathering import gather
from jitney.result import Result
from jitney_api.answers import Heading
from jitney_api.failures import JOB_ID_HEADER, ApiStopping
from jitney_api.presence import ClientGone, client_leaves, unless
from jitney_api.sse import OnGone

Shape = Callable[[Heading, Result], dict[str, Any]]


class WholeAnswer(Response):
    """Waits for the job's end; an ending other than `finished` is raised, and becomes its own status."""

    def __init__(self, reader: ChannelReader, heading: Heading, shape: Shape, *, on_gone: OnGone) -> None:
        super().__init__(headers={JOB_ID_HEADER: heading.job_id}, media_type="application/json")
        self._reader = reader
        self._heading = heading
        self._shape = shape
        self._on_gone = on_gone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            result = await unless(gather(self._reader, self._heading.job_id), client_leaves(receive))
        except ClientGone:
            await self._on_gone()
            return
        except asyncio.CancelledError:  # only a server that stops cancels a request
            raise ApiStopping(self._heading.job_id) from None
        self.body = orjson.dumps(self._shape(self._heading, result))
        self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)
