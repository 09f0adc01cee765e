"""For how long the engine has had work and got nowhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class StallClock:
    """Set by the engine thread, read by any.

    It measures progress, not steps: an engine may step for ever and compute nothing. It stands still while the
    engine has nothing to do, or waits for Redis to take what it computed: that is no fault of the engine.
    """

    def __init__(self) -> None:
        self._progress_at = time.monotonic()
        self._paused_at: float | None = None

    def progressed(self) -> None:
        self._progress_at = time.monotonic()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent inside does not count."""
        paused_at = self._paused_at = time.monotonic()
        try:
            yield
        finally:
            # In this order: a reader between the two lines sees too short a time, never too long a one.
            self._progress_at += time.monotonic() - paused_at
            self._paused_at = None

    def stalled_for_s(self) -> float:
        now = self._paused_at or time.monotonic()
        return now - self._progress_at
