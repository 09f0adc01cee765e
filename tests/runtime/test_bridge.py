"""The bridge: order, wake-ups, and how far the engine may run ahead of Redis."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

from jitney_worker.engine.protocol import Capacity
from jitney_worker.engine.sequence import SequenceId
from jitney_worker.runtime.bridge import Abort, Bridge, Report, StepReport

LIVENESS_S = 10.0
REPORT = StepReport((), Capacity(free_seats=1, num_running=0, num_waiting=0, num_free_blocks=1, num_blocks=1))


def run_steps(bridge: Bridge, count: int, taken: list[int]) -> threading.Thread:
    """A thread that asks for room before each of `count` steps and notes each one it took."""

    def work() -> None:
        for number in range(count):
            bridge.await_room()
            taken.append(number)
            bridge.give(REPORT)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


async def test_the_engine_runs_no_more_steps_ahead_than_allowed_and_goes_on_when_they_are_published() -> None:
    bridge, taken = Bridge(3), list[int]()
    arrived: asyncio.Queue[Report] = asyncio.Queue()
    bridge.connect(asyncio.get_running_loop(), lambda: [arrived.put_nowait(report) for report in bridge.collect()])
    thread = run_steps(bridge, 5, taken)
    async with asyncio.timeout(LIVENESS_S):
        for _ in range(3):
            await arrived.get()
        assert thread.is_alive()
        assert taken == [0, 1, 2]
        assert bridge.num_unpublished == 3
        bridge.published(1)
        await arrived.get()
        assert taken == [0, 1, 2, 3]
        bridge.published(3)
        await asyncio.to_thread(thread.join)
    assert taken == [0, 1, 2, 3, 4]
    assert bridge.num_unpublished == 1


async def test_reports_that_wake_nobody_are_collected_in_order_with_the_next_that_does() -> None:
    bridge, woken = Bridge(8), asyncio.Event()
    bridge.connect(asyncio.get_running_loop(), woken.set)
    reports = [replace(REPORT, at=float(number)) for number in range(3)]
    for report in reports[:2]:
        await asyncio.to_thread(bridge.give, report, wakes=False)
    assert not woken.is_set()
    await asyncio.to_thread(bridge.give, reports[2])
    async with asyncio.timeout(LIVENESS_S):
        await woken.wait()
    assert bridge.collect() == reports
    assert bridge.collect() == []


def test_room_that_was_given_back_is_no_step() -> None:
    bridge = Bridge(2)
    bridge.await_room()
    bridge.await_room()
    bridge.return_room()
    assert bridge.num_unpublished == 1


def test_a_write_that_no_step_was_part_of_lets_the_engine_no_further() -> None:
    bridge = Bridge(1)
    bridge.await_room()
    bridge.published(0)
    thread = threading.Thread(target=bridge.await_room)
    thread.start()
    bridge.published(1)
    thread.join(LIVENESS_S)
    assert not thread.is_alive()


def test_commands_are_taken_all_at_once_in_the_order_in_which_they_were_sent() -> None:
    bridge = Bridge(1)
    sent = [Abort(SequenceId(str(number))) for number in range(100)]
    for command in sent:
        bridge.send(command)
    assert bridge.take() == sent
    assert bridge.take() == []


def test_a_waiting_engine_wakes_for_a_command_and_for_the_end() -> None:
    bridge = Bridge(1)
    for wake in (lambda: bridge.send(Abort(SequenceId("x"))), bridge.stop):
        thread = threading.Thread(target=bridge.wait)
        thread.start()
        wake()
        thread.join(LIVENESS_S)
        assert not thread.is_alive()
        bridge.take()
    assert bridge.stopped


async def test_an_engine_that_waits_for_room_is_let_go_at_the_end() -> None:
    bridge, taken = Bridge(1), list[int]()
    bridge.connect(asyncio.get_running_loop(), lambda: None)
    thread = run_steps(bridge, 2, taken)
    bridge.stop()
    await asyncio.to_thread(thread.join, LIVENESS_S)
    assert not thread.is_alive()
