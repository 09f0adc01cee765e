"""Ending tasks for certain."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

ASK_AGAIN_S = 0.5


async def end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel until every task is done; what they raise is not looked at.

    Once is not enough: a cancellation that meets a reply or a time limit in the same turn of the loop can
    be swallowed on the way (CPython before 3.12, `asyncio.wait_for`), and a loop would go on for ever.
    """
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=ASK_AGAIN_S)
