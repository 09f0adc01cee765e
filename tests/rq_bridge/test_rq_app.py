"""The application of examples/rq_app: real worker processes, a real broker, three hundred jobs held at once."""

from __future__ import annotations

import asyncio
import os
import sys

from examples.rq_app.callbacks import FAILURES, LABELS
from examples.rq_app.label import connect, enqueue_labels, enqueue_summary
from redis import Redis as SyncRedis
from rq import Queue
from rq.command import send_stop_job_command
from rq.worker import BaseWorker
from tests.client.scripted_worker import Turn
from tests.rq_bridge.conftest import Jitney, StartRqWorker, eventually, has_status

NUM_TICKETS = 300


async def test_three_hundred_rq_jobs_are_held_by_one_process_and_each_ends_as_rq_has_it(
    start_rq_worker: StartRqWorker, rq_queue: Queue, rq_connection: SyncRedis, jitney: Jitney
) -> None:
    """None of them is answered before all of them have been claimed: they are in flight together."""
    rq_connection.delete(LABELS, FAILURES)
    labels = enqueue_labels(rq_queue, [f"ticket {n}" for n in range(NUM_TICKETS)], queue=jitney.queue_name)
    summary = enqueue_summary(rq_queue, labels[2:], queue=jitney.queue_name)
    with start_rq_worker() as process:
        turns = {ticket_of(turn): turn for turn in await jitney.take(NUM_TICKETS)}
        assert len(turns) == NUM_TICKETS
        (worker,) = BaseWorker.all(queue=rq_queue)
        assert worker.pid == process.pid
        assert worker.current_execution_count == NUM_TICKETS
        held = worker.get_current_executions()
        await eventually(lambda: all(lives_on(rq_queue, key.composite_key) for key in held), True)

        send_stop_job_command(rq_connection, labels[0].id, serializer=rq_queue.serializer)
        await has_status(labels[0], "stopped")
        await jitney.ends(turns["ticket 0"].id, "cancelled")

        await turns["ticket 1"].fail({"type": "server_error", "code": "model_error", "message": "broke"})
        again = await jitney.take_one()
        assert ticket_of(again) == "ticket 1"
        turns["ticket 1"] = again
        await asyncio.gather(*(turn.finish(f" {name} ") for name, turn in turns.items() if name != "ticket 0"))

        last = await jitney.take_one()
        assert "298 customers" in str(last.spec.prompt)
        await last.finish("Thanks.")
        await has_status(summary, "finished")
    assert {job.get_status().value for job in labels[1:]} == {"finished"}
    assert rq_connection.hgetall(LABELS) == {str(n).encode(): f"ticket {n}".encode() for n in range(1, NUM_TICKETS)}
    assert rq_connection.hgetall(FAILURES) == {b"1": b"1"}


def ticket_of(turn: Turn) -> str:
    assert turn.spec.messages is not None
    return str(turn.spec.messages[-1]["content"])


def lives_on(rq_queue: Queue, key: str) -> bool:
    """Whether RQ has had a sign of life of this execution since it began."""
    began, beat = rq_queue.connection.hmget(f"rq:execution:{key}", "created_at", "last_heartbeat")
    return float(beat) > float(began)


async def test_the_rq_app_runs_as_its_readme_says(
    redis_url: str, start_rq_worker: StartRqWorker, jitney: Jitney
) -> None:
    """But for the queue, which is everybody's here."""
    with start_rq_worker("jitney", JITNEY_QUEUE=jitney.queue_name):
        app = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "examples.rq_app.label", "examples/rq_app/tickets.txt"),
            env={**os.environ, "RQ_REDIS_URL": redis_url},
            stdout=asyncio.subprocess.PIPE,
        )
        for turn in await jitney.take(4):
            await turn.finish(" bug")
        await (await jitney.take_one()).finish(" Well done.")
        shown, _ = await app.communicate()
    assert app.returncode == 0
    lines = shown.decode().splitlines()
    assert lines[0] == "bug          My parcel has not arrived."
    assert lines[-1] == "Well done."
    assert len(lines) == 5


def test_the_rq_app_waits_for_a_result_as_long_as_it_says(redis_url: str) -> None:
    with connect(redis_url) as connection:
        assert connection.connection_pool.make_connection().socket_timeout is None
