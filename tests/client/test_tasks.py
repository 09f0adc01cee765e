"""Whatever is ended has ended: no task is left for the loop to find."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

from tests.client.scripted_worker import PATIENCE_S

from jitney.channel import ChannelReader
from jitney.keys import new_job_id
from jitney.tasks import end_tasks


async def deaf(num_times: int, begun: asyncio.Event) -> None:
    """Does not hear its first cancellations."""
    begun.set()
    for _ in range(num_times):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            continue
    await asyncio.Event().wait()


async def test_a_task_that_is_deaf_is_asked_again() -> None:
    begun = asyncio.Event()
    task = asyncio.create_task(deaf(2, begun))
    await begun.wait()
    async with asyncio.timeout(PATIENCE_S):
        await end_tasks([task])
    assert task.cancelled()


async def test_whoever_is_ended_while_it_ends_others_does_that_first() -> None:
    begun = asyncio.Event()
    inner = asyncio.create_task(deaf(3, begun))

    async def own() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await end_tasks([inner])

    outer = asyncio.create_task(own())
    await begun.wait()
    async with asyncio.timeout(PATIENCE_S):
        await end_tasks([outer])
    assert outer.cancelled()
    assert inner.cancelled(), "it was asked more often than its owner"


async def test_a_reader_that_is_closed_just_after_its_follower_left_leaves_no_task(
    redis_url: str, queue_name: str
) -> None:
    """The channel is being unsubscribed at that moment."""
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    before = asyncio.all_tasks()
    for _ in range(5):
        async with ChannelReader(redis_url) as reader, reader.follow(new_job_id(queue_name)):
            pass
    gc.collect()
    assert asyncio.all_tasks() == before
    assert reported == []
