"""Ending asyncio tasks for certain."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

_ASK_AGAIN_S = 0.1


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until each has ended, however.

    Again and again: before Python 3.12 `asyncio.wait_for`, which redis-py uses for every call, swallows a
    cancellation that arrives together with the reply, and the task would live on. A caller that is cancelled
    meanwhile ends when they have ended: whoever ends it asks again and again too, and would leave them behind.
    """
    pending = {task for task in tasks if not task.done()}
    interruption: asyncio.CancelledError | None = None
    while pending:
        for task in pending:
            task.cancel()
        try:
            await asyncio.wait(pending, timeout=_ASK_AGAIN_S)
        except asyncio.CancelledError as error:
            interruption = error
        pending = {task for task in pending if not task.done()}
    if interruption is not None:
        raise interruption
