"""Signs of life of held jobs, and a look at whether anybody still wants them: a thread beside RQ's main one.

The main thread runs the callbacks of an application, which may take their time; jobs that are held meanwhile must not
be taken for abandoned.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from redis.exceptions import RedisError

from jitney.logs import logger

WATCH_EVERY_S: Final = 1.0

_log = logger(part="rq")


class Pulse:
    """Calls `beat` every `beat_every_s`, and `watch` every WATCH_EVERY_S, until it is closed."""

    def __init__(self, beat: Callable[[], None], watch: Callable[[], None], *, beat_every_s: float) -> None:
        self._beat = beat
        self._watch = watch
        self._beat_every_s = beat_every_s
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jitney-pulse", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        beat_at = time.monotonic() + self._beat_every_s
        while not self._is_over.wait(min(WATCH_EVERY_S, self._beat_every_s)):
            try:
                if time.monotonic() >= beat_at:
                    self._beat()
                    beat_at = time.monotonic() + self._beat_every_s
                self._watch()
            except (RedisError, OSError) as error:  # the next one will do; RQ leaves room for two
                _log.warning("pulse_missed", error=str(error))
