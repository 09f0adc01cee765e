"""A stuck engine: its jobs go to a peer at once, and when it does not come back, its process ends.

Liveness is progress. A worker that answers, renews and steps, but computes nothing for those who wait, is dead.
"""

from __future__ import annotations

import asyncio
from math import ceil
from typing import Final

from jitney.errors import JitneyError
from jitney.logs import logger
from jitney_worker.runtime.board import Board
from jitney_worker.runtime.engine_thread import EngineThread

LOOKS: Final = 8
"""How often the engine is looked at within the time that it is given."""

MAX_BETWEEN_LOOKS_S: Final = 1.0


class EngineStuck(JitneyError):
    """The engine has had work, and has computed nothing for too long."""

    code = "engine_stuck"


class StallWatch:
    """Watches one engine. stall_after_s: how long it may have work and make no progress."""

    def __init__(self, engine: EngineThread, stall_after_s: float) -> None:
        self._engine = engine
        self._stall_after_s = stall_after_s
        self._look_every_s = min(MAX_BETWEEN_LOOKS_S, stall_after_s / LOOKS)
        self._log = logger(part="stall")

    def is_stuck(self) -> bool:
        """Callable from any thread."""
        return self._engine.clock.stalled_for_s() > self._stall_after_s

    async def run(self, board: Board) -> None:
        """Until the engine is beyond hope. Raises EngineStuck then: a fresh process may do better.

        What is on board then is still to be handed back, by whoever first makes sure that nothing more is claimed.
        """
        error = EngineStuck(f"the engine computed nothing for {self._stall_after_s:g} s")
        num_computed_tokens = -1
        while True:
            await self._until_stuck()
            self._log.error("engine_stuck", stall_after_s=self._stall_after_s, num_jobs=len(board))
            board.reports.snapshot_came.set()  # the view turns red now
            if num_computed_tokens == self._engine.num_computed_tokens:
                raise error  # not one token since the last time: it would bury whatever it gets
            num_computed_tokens = self._engine.num_computed_tokens
            await board.retry_all(error)
            if not await self._recovers(board):
                raise error
            self._log.warning("engine_recovered")
            board.room.set()

    async def _until_stuck(self) -> None:
        """Seen twice: a process that was stopped itself has to let its engine step first."""
        num_seen = 0
        while num_seen < 2:
            await asyncio.sleep(self._look_every_s)
            num_seen = num_seen + 1 if self.is_stuck() else 0

    async def _recovers(self, board: Board) -> bool:
        """False if the engine got as much time again and is still stuck. What it says late is nobody's any more."""
        for _ in range(ceil(self._stall_after_s / self._look_every_s)):
            if not self.is_stuck():
                return True
            if len(board):  # came while it was found out; nothing has happened to it
                await board.release_all()
            await asyncio.sleep(self._look_every_s)
        return not self.is_stuck()
