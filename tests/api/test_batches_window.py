"""The window by itself: what its lines may do to it, and what it holds of them."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import orjson
import pytest
from tests.api.batch_work import PATIENCE_S, Echo, working
from tests.client.scripted_worker import ScriptedWorker, eventually

from jitney import AsyncClient, AsyncJob
from jitney.connection import Redis
from jitney.errors import QueueUnavailable
from jitney_api.batches import window as window_module
from jitney_api.batches.lines import Line, LineReader
from jitney_api.batches.output import Outcome
from jitney_api.batches.records import Usage
from jitney_api.batches.terms import Terms
from jitney_api.batches.window import Window
from jitney_api.tokenizers import Tokenizers


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(redis_url) as client:
        yield client


@pytest.fixture
async def worker(redis: Redis, queue_name: str, write_queue_card: Any) -> ScriptedWorker:
    await write_queue_card()
    return ScriptedWorker(redis, queue_name)


def lines_of(model: str, *custom_ids: str, **body: Any) -> list[Line]:
    asked = [
        {"custom_id": one, "method": "POST", "url": "/v1/completions", "body": {"model": model, "prompt": one, **body}}
        for one in custom_ids
    ]
    reader = LineReader(io.BytesIO(b"\n".join(map(orjson.dumps, asked))), endpoint=None)
    return [one for one in reader if isinstance(one, Line)]


async def ride(client: AsyncClient, lines: Sequence[Line], *, size: int = 8) -> dict[int, Outcome]:
    kept: dict[int, Outcome] = {}

    async def each() -> AsyncGenerator[Line, None]:
        for line in lines:
            yield line

    async def keep(outcomes: Sequence[Outcome]) -> None:
        assert not kept.keys() & {outcome.number for outcome in outcomes}
        kept.update((outcome.number, outcome) for outcome in outcomes)

    tokenizers = Tokenizers(client.redis, max_loaded=1, num_threads=1)
    window = Window(client, tokenizers, Terms(f"b-{id(kept)}", "-", None, 60), size=size, max_hold_s=0.1)
    await asyncio.wait_for(window.run(each(), keep), PATIENCE_S)
    await tokenizers.aclose()
    return kept


async def test_an_answer_that_redis_interrupts_is_read_again(
    client: AsyncClient, worker: ScriptedWorker, queue_name: str
) -> None:
    (line,) = lines_of(queue_name, "a")
    num_asked = 0

    async def answer(client: AsyncClient, jobs: Sequence[AsyncJob]) -> tuple[bytes, Usage]:
        nonlocal num_asked
        num_asked += 1
        if num_asked < 3:
            raise QueueUnavailable("away")
        return await line.request.answer(client, jobs)

    async with working(Echo(worker)):
        kept = await ride(client, [replace(line, request=replace(line.request, answer=answer))])
    assert (num_asked, kept[1].ending) == (3, "answered")


async def test_a_line_that_breaks_us_breaks_no_other(
    client: AsyncClient, worker: ScriptedWorker, queue_name: str
) -> None:
    odd, good = lines_of(queue_name, "odd", "good")

    async def answer(_client: AsyncClient, _jobs: Sequence[AsyncJob]) -> tuple[bytes, Usage]:
        raise ZeroDivisionError

    async with working(Echo(worker)):
        kept = await ride(client, [replace(odd, request=replace(odd.request, answer=answer)), good])
    assert (kept[1].ending, kept[2].ending) == ("failed", "answered")
    response = orjson.loads(kept[1].text)["response"]
    assert (response["status_code"], response["body"]["error"]["code"]) == (500, "internal_error")


async def test_of_large_lines_few_are_on_their_way(
    client: AsyncClient, worker: ScriptedWorker, queue_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = lines_of(queue_name, *(f"line {n}" for n in range(6)))
    monkeypatch.setattr(window_module, "MAX_BYTES", 2 * lines[0].num_bytes)
    riding = asyncio.create_task(ride(client, lines))

    async def wait() -> bool:
        return (await worker.queue.backlog()).num_jobs == 2

    await eventually(wait)
    echo = Echo(worker)
    async with working(echo):
        kept = await riding
    assert len(kept) == 6
    assert echo.most_waiting == 2


async def test_a_job_that_somebody_cancels_is_that_lines_error(
    client: AsyncClient, worker: ScriptedWorker, queue_name: str
) -> None:
    riding = asyncio.create_task(ride(client, lines_of(queue_name, "a")))
    turns: list[Any] = []

    async def claims() -> bool:
        turns.extend(await worker.claim())
        return bool(turns)

    await eventually(claims)
    await client.job(turns[0].id).cancel()
    kept = await riding
    assert kept[1].ending == "failed"
    assert orjson.loads(kept[1].text)["response"]["status_code"] == 499


async def test_a_limit_of_the_lines_own_is_that_lines_error(
    client: AsyncClient, worker: ScriptedWorker, queue_name: str
) -> None:
    riding = asyncio.create_task(ride(client, lines_of(queue_name, "a", timeout_s=0.2)))

    async def is_over() -> bool:
        await worker.queue.janitor()
        return riding.done()

    await eventually(is_over)
    assert orjson.loads((await riding)[1].text)["response"]["status_code"] == 504
