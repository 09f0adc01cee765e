"""Many streams through one API process: each reader hears its own answer, and a slow one is in nobody's way."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.api.api_wire import PATIENCE_S, Frame, num_readers, until

NUM_STREAMS = 200
NUM_ROUNDS = 6
LONG = 400_000
"""Characters of one text of the slow reader's job: a few of them are more than sockets and buffers hold."""


def said(name: str, number: int) -> str:
    return f"{name}/{number};"


async def test_two_hundred_streams_are_not_mixed_and_a_slow_reader_is_cut_and_comes_back(
    start_api: Any, write_queue_card: Any, worker: Any, redis: Any
) -> None:
    await write_queue_card()
    api = await start_api(write_timeout_s=0.5)
    names = [f"reader-{number}" for number in range(NUM_STREAMS)]
    asking = [asyncio.create_task(api.chat(name, stream=True)) for name in names]
    jobs = {}
    for _ in names:
        job = await worker.claim()
        jobs[job.spec.messages[0]["content"]] = job
        await job.say(said(job.spec.messages[0]["content"], 0))
    assert sorted(jobs) == sorted(names)
    answers = dict(zip(names, await asyncio.gather(*asking), strict=True))
    assert {name: answer.headers["x-jitney-job-id"] for name, answer in answers.items()} == {
        name: job.id for name, job in jobs.items()
    }

    slow, *others = names
    answers[slow].writer.transport.pause_reading()
    hearing = [asyncio.create_task(heard(answers[name])) for name in others]
    for number in range(1, NUM_ROUNDS):
        for name in reversed(names):  # in another order than they were asked
            padding = "." * LONG if name == slow else ""
            await jobs[name].say(said(name, number) + padding, said(name, number + 100) + padding)
    await until(lambda: num_readers(redis, jobs[slow].id), 0)
    assert all([await num_readers(redis, jobs[name].id) == 1 for name in others]), "only the slow one was cut"
    for name in reversed(names):
        await jobs[name].finish()
    for name, frames in zip(others, await asyncio.gather(*hearing), strict=True):
        assert text_of(frames) == whole(name)
        assert frames[-1].data == "[DONE]"

    answers[slow].writer.transport.resume_reading()
    before = list[Frame]()

    async def what_came() -> None:
        async for frame in answers[slow].frames():
            before.append(frame)

    with pytest.raises(asyncio.IncompleteReadError):
        await what_came()
    assert text_of(before) != whole(slow, LONG), "the fault has hit: it was cut before its end"
    path = f"/v1/jobs/{jobs[slow].id}/events?format=chat.completion.chunk"
    rest = await heard(await api.get(path, last_event_id=before[-1].id))
    assert text_of(before) + text_of(rest) == whole(slow, LONG)
    assert rest[-1].data == "[DONE]"


def whole(name: str, padding: int = 0) -> str:
    """All that was said to a reader."""
    rest = ((number, number + 100) for number in range(1, NUM_ROUNDS))
    return said(name, 0) + "".join(said(name, number) + "." * padding for pair in rest for number in pair)


async def heard(answer: Any) -> list[Frame]:
    async with asyncio.timeout(3 * PATIENCE_S):
        return [frame async for frame in answer.frames()]


def text_of(frames: list[Frame]) -> str:
    chunks = [frame.json() for frame in frames if frame.data != "[DONE]"]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
