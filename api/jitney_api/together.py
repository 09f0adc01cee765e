"""Many calls of one request, a few at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

from jitney.tasks import end_tasks

AT_ONCE: Final = 16
"""Fewer than the connections of a client and than the texts that may wait for a tokenizer: others come, too."""

Given = TypeVar("Given")
Found = TypeVar("Found")


async def together(call: Callable[[Given], Awaitable[Found]], items: Sequence[Given]) -> list[Found]:
    """What `call` gives for each, in order. The first failure ends the calls under way, and is raised."""
    found: dict[int, Found] = {}
    waiting = iter(enumerate(items))

    async def take_turns() -> None:
        for number, item in waiting:
            found[number] = await call(item)

    tasks = [asyncio.create_task(take_turns()) for _ in range(min(AT_ONCE, len(items)))]
    try:
        await asyncio.gather(*tasks)
    finally:
        await end_tasks(tasks)
    return [found[number] for number in range(len(items))]
