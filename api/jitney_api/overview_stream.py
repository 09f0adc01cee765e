"""The overview as server-sent events, for as long as a page is open."""

from __future__ import annotations

import asyncio

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jitney_api.callers import Caller
from jitney_api.presence import ClientGone, Pen, SlowReader, client_leaves, unless
from jitney_api.settings import ApiSettings
from jitney_api.watchtower import Sight, Watchtower


class OverviewStream(Response):
    """`you` (whose page it is), `curves` (what was seen before), then an `overview` or `trouble` for every look.

    Each with the look's number as its id. Whoever is slow gets the newest one, and none twice.
    """

    def __init__(self, tower: Watchtower, caller: Caller, settings: ApiSettings) -> None:
        super().__init__(
            headers={"cache-control": "no-cache", "x-accel-buffering": "no"}, media_type="text/event-stream"
        )
        # No length is known, and one would end the stream at once.
        del self.headers["content-length"]
        self._tower = tower
        self._caller = caller
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        settings = self._settings
        pen = Pen(send, keep_alive_s=settings.keep_alive_s, write_timeout_s=settings.write_timeout_s)
        try:
            await unless(self._tell(pen), client_leaves(receive), pen.keep_alive())
        except (ClientGone, SlowReader):
            return
        except asyncio.CancelledError:  # the server stops; the page comes back by itself
            if pen.has_started:
                await pen.finish()

    async def _tell(self, pen: Pen) -> None:
        you = {"key": self._caller.key, "tenant": self._caller.tenant, "scopes": self._caller.scopes}
        await pen.start(self.status_code, self.raw_headers)
        async with self._tower.watching() as watcher:
            await pen.write(_frame("you", orjson.dumps(you)) + _frame("curves", self._tower.curves()))
            while True:
                await pen.write(_of(await watcher.next()))


def _of(sight: Sight) -> bytes:
    if sight.trouble:
        return _frame("trouble", orjson.dumps({"message": sight.trouble}), sight.number)
    return _frame("overview", sight.overview, sight.number)


def _frame(name: str, data: bytes, number: int | None = None) -> bytes:
    """JSON has no line breaks of its own."""
    numbered = "" if number is None else f"id: {number}\n"
    return f"{numbered}event: {name}\n".encode() + b"data: " + data + b"\n\n"
