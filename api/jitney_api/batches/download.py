"""A file on its way to whoever asked for it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Final

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from jitney_api.batches.records import FileRecord

# What somebody uploaded must never be taken for a page of this origin.
_HEADERS: Final = {"x-content-type-options": "nosniff"}


class FileContent(StreamingResponse):
    """Piece by piece, as fast as they are taken; the file is closed also when the other end goes away."""

    def __init__(self, file: FileRecord, first: bytes, others: AsyncGenerator[bytes, None]) -> None:
        async def pieces() -> AsyncIterator[bytes]:
            yield first
            async for piece in others:
                yield piece

        headers = {"content-length": str(file.num_bytes), **_HEADERS}
        super().__init__(pieces(), headers=headers, media_type="application/octet-stream")
        self._others = others

    @classmethod
    async def begin(cls, file: FileRecord, content: AsyncGenerator[bytes, None]) -> FileContent:
        """Its first piece is read before anything is answered. Raises FileUnknown, StoreUnavailable."""
        return cls(file, await anext(content, b""), content)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._others):
            await super().__call__(scope, receive, send)
