"""`jitney.rq.generate` under RQ's own workers: one job at a time, in the worker or in a process of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from redis import Redis as SyncRedis
from rq import Callback, Queue, Retry
from rq.command import send_stop_job_command
from tests.e2e.programs import LIVENESS_S
from tests.rq_bridge.conftest import Jitney, abandon, eventually, has_status
from tests.rq_bridge.test_rq_worker import GENERATE, callbacks, failure_of

RunRqWorker = Callable[..., contextlib.AbstractContextManager[subprocess.Popen[bytes]]]


@pytest.fixture
def run_rq(redis_url: str, rq_queue: Queue) -> RunRqWorker:
    """`with run_rq("rq.SimpleWorker"):` RQ's own command on this test's queue."""

    @contextlib.contextmanager
    def run(kind: str) -> Iterator[subprocess.Popen[bytes]]:
        options = ["--url", redis_url, "--serializer", "json", "--worker-class", kind, "--path", os.getcwd()]
        with subprocess.Popen(
            [sys.executable, "-m", "rq.cli", "worker", rq_queue.name, *options, "--quiet"],
            env={**os.environ, "JITNEY_REDIS_URL": redis_url},
        ) as process:
            try:
                yield process
            finally:
                process.kill()
                process.wait(LIVENESS_S)

    return run


@pytest.mark.parametrize("kind", ["rq.SimpleWorker", "rq.worker.SpawnWorker", "rq.Worker"])
async def test_a_plain_rq_worker_generates(run_rq: RunRqWorker, rq_queue: Queue, jitney: Jitney, kind: str) -> None:
    job = rq_queue.enqueue(GENERATE, "Once", queue=jitney.queue_name, **callbacks())
    bad = rq_queue.enqueue(GENERATE, "x", queue=jitney.queue_name, max_tokens=-1, retry=Retry(max=3))
    late = rq_queue.enqueue(GENERATE, "late", queue=jitney.queue_name, job_timeout=2)
    with run_rq(kind):
        turn = await jitney.take_one()
        await turn.start()
        await turn.say(" upon")
        await eventually(lambda: job.get_meta().get("jitney", {}).get("id"), turn.id)
        await turn.finish(" a time")
        await has_status(job, "finished")
        assert job.return_value()["text"] == " upon a time"
        assert job.get_meta()["jitney"]["text"] == " upon a time"
        await has_status(bad, "failed")
        assert "max_tokens" in failure_of(bad)
        unheard = await jitney.take_one()
        await has_status(late, "failed")
        assert "JobTimeoutException" in failure_of(late)
        await jitney.ends(unheard.id, "cancelled")


async def test_a_plain_rq_worker_s_job_goes_on_when_it_was_killed(
    run_rq: RunRqWorker, rq_queue: Queue, jitney: Jitney
) -> None:
    job = rq_queue.enqueue(GENERATE, "Once", queue=jitney.queue_name, retry=Retry(max=1))
    with run_rq("rq.SimpleWorker") as process:
        turn = await jitney.take_one()
        process.kill()
        process.wait(LIVENESS_S)
    abandon(rq_queue)
    await turn.finish("x")
    with run_rq("rq.SimpleWorker"):
        await has_status(job, "finished")
    assert job.return_value()["id"] == turn.id


async def test_a_stopped_job_of_a_plain_rq_worker_is_cancelled_by_its_callback(
    run_rq: RunRqWorker, rq_queue: Queue, rq_connection: SyncRedis, jitney: Jitney
) -> None:
    stopped = Callback("jitney.rq.cancel")
    job = rq_queue.enqueue(GENERATE, "Once", queue=jitney.queue_name, on_stopped=stopped)
    with run_rq("rq.Worker"):
        turn = await jitney.take_one()
        await eventually(lambda: job.get_meta().get("jitney", {}).get("id"), turn.id)
        send_stop_job_command(rq_connection, job.id, serializer=rq_queue.serializer)
        await has_status(job, "stopped")
        await jitney.ends(turn.id, "cancelled")


def test_rq_functions_say_what_they_are_for_outside_of_rq() -> None:
    from jitney import SettingsError
    from jitney.rq import generate

    with pytest.raises(SettingsError, match=r"jitney\.rq\.generate is a job of RQ"):
        generate("Once")
