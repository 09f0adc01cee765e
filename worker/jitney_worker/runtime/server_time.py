"""The server's clock, as this process sees it: how long a job has waited is told by the clock that stamped it."""

from __future__ import annotations

import time
from typing import Final

from jitney.connection import Redis

MAX_ROUND_TRIP_S: Final = 0.05
"""Of a slower answer nobody knows when it was given; what was known before is better."""


class ServerTime:
    """The difference to our own steady clock. Before the first answer, this machine's clock stands in."""

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()
        self._is_known = False

    async def ask(self, redis: Redis) -> None:
        """Look at the server's clock. Raises what Redis raises."""
        began = time.monotonic()
        seconds, microseconds = await redis.time()
        ended = time.monotonic()
        if self._is_known and ended - began > MAX_ROUND_TRIP_S:
            return
        self._offset_s = seconds + microseconds / 1e6 - (began + ended) / 2
        self._is_known = True

    def at(self, monotonic_s: float) -> float:
        """Unix seconds by the server's clock, at that moment of ours."""
        return monotonic_s + self._offset_s

    def now(self) -> float:
        return self.at(time.monotonic())
