"""One call for all who ask at the same time."""

from __future__ import annotations

import asyncio

import pytest

from jitney.errors import QueueUnavailable
from jitney.single_flight import SingleFlight


async def test_whoever_asks_meanwhile_shares_the_call_and_whoever_asks_afterwards_does_not() -> None:
    flight, answers, num_calls = SingleFlight[int](), asyncio.Queue[int](), 0

    async def call() -> int:
        nonlocal num_calls
        num_calls += 1
        return await answers.get()

    asking = [asyncio.create_task(flight.ask("a", call)) for _ in range(5)]
    other = asyncio.create_task(flight.ask("b", call))
    for _ in range(2):  # one round for the callers, one for their calls
        await asyncio.sleep(0)
    assert num_calls == 2
    answers.put_nowait(1)
    answers.put_nowait(2)
    assert await asyncio.gather(*asking) == [1] * 5
    assert await other == 2
    answers.put_nowait(3)
    assert await flight.ask("a", call) == 3


async def test_an_error_is_everybodys() -> None:
    flight = SingleFlight[int]()

    async def call() -> int:
        await asyncio.sleep(0)
        raise ValueError("no")

    outcomes = await asyncio.gather(*(flight.ask("a", call) for _ in range(3)), return_exceptions=True)
    assert [repr(outcome) for outcome in outcomes] == ["ValueError('no')"] * 3


async def test_a_caller_who_leaves_takes_nothing_from_the_others() -> None:
    flight, answer = SingleFlight[int](), asyncio.Event()

    async def call() -> int:
        await answer.wait()
        return 7

    first, second = (asyncio.create_task(flight.ask("a", call)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    answer.set()
    assert await second == 7


async def test_nothing_is_under_way_after_the_end() -> None:
    flight = SingleFlight[None]()
    waiting = asyncio.create_task(flight.ask("a", asyncio.Event().wait))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    await flight.aclose()
    with pytest.raises(QueueUnavailable, match="closed"):
        await waiting
    assert asyncio.all_tasks() == {asyncio.current_task()}
