"""Every line of an input held against what can be known before any of it is enqueued."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from jitney import AsyncClient
from jitney.errors import InvalidJob
from jitney_api.batches.lines import Line, LineReader, in_blocks, of_body
from jitney_api.batches.patience import patiently
from jitney_api.batches.records import LineError
from jitney_api.batches.requests import LineRequest


async def find_errors(
    client: AsyncClient, reader: LineReader, *, good: Callable[[Line], None], most: int | None = None
) -> list[LineError]:
    """What is wrong with the lines, at most `most` of it. good: called with each line that nothing is wrong with."""
    check = _ModelCheck(client)
    errors: list[LineError] = []
    async with contextlib.aclosing(in_blocks(reader)) as ones:
        async for one in ones:
            found = one if isinstance(one, LineError) else await check.refusal(one)
            if found is not None:
                errors.append(found)
            elif isinstance(one, Line):
                good(one)
            if len(errors) == most:
                break
    return errors


class _ModelCheck:
    """Holds lines against the cards of the queues that they name."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._unknown: dict[str, InvalidJob] = {}

    async def refusal(self, line: Line) -> LineError | None:
        """What is wrong with the line, if its model can tell. A Redis that does not answer is waited for."""
        try:
            await patiently(lambda: self._check(line.request))
        except InvalidJob as error:
            named = of_body(error)
            return LineError(str(named.code), str(named), line.number, named.param)
        return None

    async def _check(self, request: LineRequest) -> None:
        unknown = self._unknown.get(request.model)
        if unknown is not None:  # looked up once: a file may name it fifty thousand times
            raise unknown
        try:
            _, card = await self._client.card(request.model)
        except InvalidJob as error:
            self._unknown[request.model] = error
            raise
        request.check_against(card)
