"""`jitney rq-worker`: many RQ jobs at once, each brought to its end as RQ's own workers do it."""

from __future__ import annotations

import asyncio
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
from redis import Redis as SyncRedis
from rq import Callback, Queue, Repeat, Retry
from rq.command import send_stop_job_command
from rq.executions import Execution
from rq.job import Job
from rq.worker import BaseWorker
from tests.client.scripted_worker import PATIENCE_S
from tests.rq_bridge.conftest import Jitney, StartRqWorker, abandon, eventually, has_status
from tests.rq_bridge.rq_functions import Touching, said

GENERATE = "jitney.rq.generate"
APP = "tests.rq_bridge.rq_functions"


def callbacks() -> dict[str, Callback]:
    return {name: Callback(f"{APP}.{name}") for name in ("on_success", "on_failure", "on_stopped")}


def failure_of(job: Job) -> str:
    result = job.latest_result()
    assert result is not None
    return str(result.exc_string)


async def test_an_rq_job_comes_to_its_result_and_lets_its_dependents_run(
    served: Queue, rq_connection: SyncRedis, jitney: Jitney
) -> None:
    job = served.enqueue(GENERATE, "Once", queue=jitney.queue_name, max_tokens=8, **callbacks())
    after = served.enqueue(GENERATE, "Twice", queue=jitney.queue_name, depends_on=job)
    turn = await jitney.take_one()
    assert (turn.spec.prompt, turn.spec.sampling.max_tokens) == ("Once", 8)
    assert (job.get_status(), after.get_status()) == ("started", "deferred")
    await turn.start()
    await turn.say(" upon", " a")
    await turn.finish(" time")
    await has_status(job, "finished")
    answer = job.return_value(refresh=True)
    assert (answer["id"], answer["text"], answer["finish_reason"]) == (turn.id, " upon a time", "stop")
    assert answer["usage"]["total_tokens"] == 6
    assert said(rq_connection, job.id) == ["success  upon a time"]
    following = await jitney.take_one()
    assert following.spec.prompt == "Twice"
    await following.finish()
    await has_status(after, "finished")
    await eventually(lambda: job.id in served.finished_job_registry.get_job_ids(), True)
    assert job.started_at is None
    job.refresh()
    assert job.started_at is not None
    assert job.ended_at is not None
    assert job.ended_at > job.started_at


async def test_an_rq_job_shows_its_text_in_meta_while_it_runs(served: Queue, jitney: Jitney) -> None:
    job = served.enqueue(GENERATE, "Once", queue=jitney.queue_name, meta={"user": "u7"})
    turn = await jitney.take_one()
    await turn.start()
    await turn.say(" upon", " a")
    shown = {"id": turn.id, "text": " upon a", "num_tokens": 3}
    await eventually(lambda: job.get_meta(), {"user": "u7", "jitney": shown})
    await turn.finish(" time")
    await has_status(job, "finished")
    assert job.get_meta()["jitney"]["text"] == " upon a time"


async def test_an_rq_job_that_failed_is_retried_with_a_new_job_of_ours(
    served: Queue, rq_connection: SyncRedis, jitney: Jitney
) -> None:
    job = served.enqueue(GENERATE, "Once", queue=jitney.queue_name, retry=Retry(max=1, interval=1), **callbacks())
    first = await jitney.take_one()
    await first.fail({"type": "server_error", "code": "model_error", "message": "the model broke"})
    await has_status(job, "scheduled")  # RQ's scheduler brings it back
    second = await jitney.take_one()
    assert second.id != first.id
    await second.fail({"type": "server_error", "code": "model_error", "message": "and broke again"})
    await has_status(job, "failed")
    assert "JobFailed" in failure_of(job)
    assert "and broke again" in failure_of(job)
    assert said(rq_connection, job.id) == ["failure JobFailed", "failure JobFailed"]
    assert job.id in served.failed_job_registry.get_job_ids()


@pytest.mark.parametrize(
    ("arguments", "options", "complaint"),
    [
        (("x",), {"max_tokens": -1}, "max_tokens"),
        (("x",), {"max_token": 1}, "unknown field max_token"),
        ((), {}, "give exactly one of prompt and messages"),
        (("x", None, 7), {}, "positional arguments"),
    ],
)
async def test_an_rq_job_that_asks_for_what_cannot_be_fails_once(
    served: Queue,
    rq_connection: SyncRedis,
    jitney: Jitney,
    arguments: tuple[Any, ...],
    options: dict[str, Any],
    complaint: str,
) -> None:
    kwargs = {"queue": jitney.queue_name, **options}
    job = served.enqueue(GENERATE, args=arguments, kwargs=kwargs, retry=Retry(max=3), **callbacks())
    await has_status(job, "failed")
    assert complaint in failure_of(job)
    assert said(rq_connection, job.id) == ["failure InvalidJob"]


async def test_a_stopped_rq_job_cancels_ours_and_the_others_go_on(
    served: Queue, rq_connection: SyncRedis, jitney: Jitney
) -> None:
    jobs = [served.enqueue(GENERATE, f"p{n}", queue=jitney.queue_name, retry=Retry(max=3)) for n in range(2)]
    last = served.enqueue(GENERATE, "last", queue=jitney.queue_name, retry=Retry(max=3), **callbacks())
    turns = {turn.spec.prompt: turn for turn in await jitney.take(3)}
    await turns["last"].start()
    send_stop_job_command(rq_connection, last.id, serializer=served.serializer)
    await has_status(last, "stopped")
    await jitney.ends(turns["last"].id, "cancelled")
    assert said(rq_connection, last.id) == ["stopped"]
    for number, job in enumerate(jobs):
        await turns[f"p{number}"].finish("done")
        await has_status(job, "finished")


@pytest.mark.parametrize("withdraw", [Job.cancel, Job.delete])
async def test_an_rq_job_that_is_cancelled_or_deleted_while_it_runs_cancels_ours(
    served: Queue, rq_connection: SyncRedis, jitney: Jitney, withdraw: Any
) -> None:
    job = served.enqueue(GENERATE, "Once", queue=jitney.queue_name, retry=Retry(max=3), **callbacks())
    turn = await jitney.take_one()
    withdraw(job)
    await jitney.ends(turn.id, "cancelled")
    worker = BaseWorker.all(queue=served)[0]
    await eventually(lambda: worker.current_execution_count, 0)
    if withdraw is Job.cancel:
        assert job.get_status() == "canceled"
    else:
        assert not Job.exists(job.id, rq_connection)
    assert said(rq_connection, job.id) == []


async def test_an_rq_job_that_is_out_of_time_fails_and_cancels_ours(served: Queue, jitney: Jitney) -> None:
    job = served.enqueue(GENERATE, "Once", queue=jitney.queue_name, job_timeout=1)
    turn = await jitney.take_one()
    await has_status(job, "failed")
    assert "JobTimeoutException: Task exceeded maximum timeout value (1 seconds)" in failure_of(job)
    await jitney.ends(turn.id, "cancelled")


async def test_every_held_rq_job_and_the_worker_give_signs_of_life(
    served: Queue, rq_connection: SyncRedis, jitney: Jitney
) -> None:
    jobs = [served.enqueue(GENERATE, f"p{n}", queue=jitney.queue_name) for n in range(3)]
    turns = await jitney.take(3)
    registry = served.started_job_registry

    def signs() -> list[Any]:
        scores = rq_connection.zrange(registry.key, 0, -1, withscores=True)
        beats = [rq_connection.hget(job.key, "last_heartbeat") for job in jobs]
        keys = [Execution.from_composite_key(key.decode(), rq_connection).key for key, _ in scores]
        lives = [rq_connection.hget(key, "last_heartbeat") for key in keys]
        return [*[score for _, score in scores], *beats, *lives, BaseWorker.all(queue=served)[0].last_heartbeat]

    first = signs()
    assert len(first) == 10
    await eventually(lambda: all(new > old for new, old in zip(signs(), first, strict=True)), True)
    for turn in turns:
        await turn.finish()
    for job in jobs:
        await has_status(job, "finished")


async def test_rq_sees_the_worker_and_all_that_it_holds(
    served: Queue, rq_connection: SyncRedis, jitney: Jitney
) -> None:
    jobs = [served.enqueue(GENERATE, f"p{n}", queue=jitney.queue_name) for n in range(3)]
    turns = await jitney.take(3)
    (worker,) = BaseWorker.all(queue=served)
    assert worker.get_state() == "busy"
    assert {execution.job_id for execution in worker.get_current_executions()} == {job.id for job in jobs}
    for turn in turns:
        await turn.finish()
    await eventually(lambda: BaseWorker.all(queue=served)[0].get_state(), "idle")
    assert worker.current_execution_count == 0
    assert served.started_job_registry.count == 0


async def test_a_result_that_nobody_wants_leaves_nothing_behind(
    served: Queue, rq_connection: SyncRedis, jitney: Jitney
) -> None:
    job = served.enqueue(GENERATE, "Once", queue=jitney.queue_name, result_ttl=0)
    await (await jitney.take_one()).finish("x")
    await eventually(lambda: rq_connection.keys(f"rq:*{job.id}*"), [])


async def test_a_broken_callback_fails_the_rq_job_and_its_retry_finds_the_answer_that_is_there(
    served: Queue, jitney: Jitney
) -> None:
    broken = Callback(f"{APP}.break_down")
    job = served.enqueue(GENERATE, "Once", queue=jitney.queue_name, on_success=broken, retry=Retry(max=1))
    await (await jitney.take_one()).finish("x")
    await has_status(job, "failed")
    assert "a callback of the application is broken" in failure_of(job)
    assert await jitney.num_waiting() == 0


async def test_a_redis_of_the_callbacks_own_that_is_away_fails_the_rq_job_and_holds_up_no_other(
    served: Queue, jitney: Jitney
) -> None:
    lost = Callback(f"{APP}.lose_redis")
    job = served.enqueue(GENERATE, "Once", queue=jitney.queue_name, on_success=lost)
    await (await jitney.take_one()).finish("x")
    await has_status(job, "failed")
    assert "the application's own Redis is away" in failure_of(job)
    behind = served.enqueue(GENERATE, "Twice", queue=jitney.queue_name)
    await (await jitney.take_one()).finish("y")
    await has_status(behind, "finished")


OWN_HELD_JOB = """
import sys
from importlib.metadata import EntryPoint
from redis import Redis
from jitney.rq.held import HeldJobs
from jitney.rq.worker import HoldingWorker
entry = EntryPoint("my_app.lose", "tests.rq_bridge.rq_functions:lose_it_too", "jitney.held_jobs")
url, name = sys.argv[1:]
HoldingWorker([name], connection=Redis.from_url(url), client_url=url, held_jobs=HeldJobs([entry])).work(burst=True)
"""


async def test_an_rq_job_that_cannot_reach_a_redis_of_its_own_fails(redis_url: str, rq_queue: Queue) -> None:
    job = rq_queue.enqueue("my_app.lose")
    worker = await asyncio.create_subprocess_exec(sys.executable, "-c", OWN_HELD_JOB, redis_url, rq_queue.name)
    try:
        await asyncio.wait_for(worker.wait(), PATIENCE_S)
    finally:
        if worker.returncode is None:
            worker.kill()
            await worker.wait()
    assert job.get_status() == "failed"
    assert "the application's own Redis is away" in failure_of(job)


async def test_a_repeated_rq_job_is_generated_anew(served: Queue, jitney: Jitney) -> None:
    job = served.enqueue(GENERATE, "Once", queue=jitney.queue_name, repeat=Repeat(times=1))
    await (await jitney.take_one()).finish("first")
    await (await jitney.take_one()).finish("second")
    await eventually(lambda: [result.return_value["text"] for result in job.results()], ["second", "first"])


async def test_a_pickled_rq_job_is_failed_and_never_loaded(
    served: Queue, rq_connection: SyncRedis, tmp_path: Path
) -> None:
    touching = Touching(str(tmp_path / "touched"))
    loose = Queue(served.name, connection=rq_connection)  # as RQ has it without a word about serializers
    job = loose.enqueue(GENERATE, touching, meta={"also": touching}, retry=Retry(max=3))
    await has_status(job, "failed")
    assert f"RQ job {job.id} was not written in JSON" in failure_of(job)
    assert not (tmp_path / "touched").exists()
    pickle.loads(job.data)
    assert (tmp_path / "touched").exists()  # so it would have been


async def test_rq_jobs_for_others_are_left_to_them(
    start_rq_worker: StartRqWorker, rq_queue: Queue, jitney: Jitney
) -> None:
    strange = [rq_queue.enqueue(f"{APP}.add", 1, n) for n in range(3)]
    unknown = rq_queue.enqueue("jitney.rq.unheard_of", retry=Retry(max=2))
    ours = rq_queue.enqueue(GENERATE, "Once", queue=jitney.queue_name)
    with start_rq_worker() as process:
        await (await jitney.take_one()).finish("x")
        await has_status(ours, "finished")
        await has_status(unknown, "failed")
        assert "no held job is called 'jitney.rq.unheard_of'" in failure_of(unknown)
        assert sorted(rq_queue.job_ids) == sorted(job.id for job in strange)
        assert {job.get_status().value for job in strange} == {"queued"}
        process.terminate()
        assert process.wait() == 0
    assert rq_queue.intermediate_queue.get_job_ids() == []
    assert sum("job_put_back" in line for line in process.lines) == 1


async def test_a_killed_worker_s_rq_jobs_go_on_as_the_same_jobs_of_ours(
    start_rq_worker: StartRqWorker, rq_queue: Queue, jitney: Jitney
) -> None:
    with start_rq_worker() as first:
        jobs = [rq_queue.enqueue(GENERATE, f"p{n}", queue=jitney.queue_name, retry=Retry(max=1)) for n in range(3)]
        turns = {turn.spec.prompt: turn for turn in await jitney.take(3)}
        await turns["p0"].start()
        first.kill()
        first.wait()
    await turns["p1"].finish("while nobody looked")
    abandon(rq_queue)
    assert sorted(rq_queue.job_ids) == sorted(job.id for job in jobs)
    with start_rq_worker() as second:
        second.until_line("ready")
        await has_status(jobs[1], "finished")
        await turns["p0"].finish("zero")
        await turns["p2"].finish("two")
        for number, job in enumerate(jobs):
            await has_status(job, "finished")
            assert job.return_value()["id"] == turns[f"p{number}"].id
        assert await jitney.num_waiting() == 0


async def test_a_worker_that_was_taken_for_dead_does_not_end_what_another_one_holds(
    start_rq_worker: StartRqWorker, rq_queue: Queue, rq_connection: SyncRedis, jitney: Jitney
) -> None:
    job = rq_queue.enqueue(GENERATE, "Once", queue=jitney.queue_name, retry=Retry(max=1), **callbacks())
    with start_rq_worker("--concurrency", "1", "--name", f"a{rq_queue.name}"):
        turn = await jitney.take_one()
        abandon(rq_queue)  # and takes it up again itself, or the other one does
        with start_rq_worker("--name", f"b{rq_queue.name}") as second:
            second.until_line("ready")
            await eventually(lambda: rq_queue.count, 0)
            await turn.finish("x")
            await has_status(job, "finished")
            await eventually(lambda: rq_queue.started_job_registry.get_job_ids(), [])
    assert said(rq_connection, job.id) == ["failure AbandonedJobError", "success x"]
    assert len(job.results()) == 1


async def test_sigterm_lets_rq_jobs_end_and_a_second_one_gives_the_rest_back_with_all_their_retries(
    start_rq_worker: StartRqWorker, rq_queue: Queue, jitney: Jitney
) -> None:
    with start_rq_worker("--drain-timeout-s", "3600") as process:
        jobs = [rq_queue.enqueue(GENERATE, f"p{n}", queue=jitney.queue_name, retry=Retry(max=2)) for n in range(4)]
        turns = {turn.spec.prompt: turn for turn in await jitney.take(4)}
        process.terminate()
        await eventually(lambda: BaseWorker.all(queue=rq_queue)[0].shutdown_requested_date is not None, True)
        late = rq_queue.enqueue(GENERATE, "late", queue=jitney.queue_name)
        await turns["p1"].finish("in time")
        await has_status(jobs[1], "finished")
        assert rq_queue.job_ids == [late.id]
        left = [jobs[0], jobs[2], jobs[3]]
        expected = [*[job.id for job in left], late.id]
        await eventually(lambda: process.terminate() or rq_queue.job_ids, expected)  # RQ ignores one that is too soon
        process.wait()
    assert rq_queue.started_job_registry.get_job_ids() == []
    for job in left:
        job.refresh()
        assert (job.get_status(), job.retries_left) == ("queued", 2)
        assert await jitney.reason(turns[f"p{jobs.index(job)}"].id) == ""
    with start_rq_worker():
        for number in (0, 2, 3):
            await turns[f"p{number}"].finish("after all")
            await has_status(jobs[number], "finished")
            assert jobs[number].return_value()["id"] == turns[f"p{number}"].id


async def test_an_rq_job_that_does_not_end_while_its_worker_leaves_is_given_back(
    start_rq_worker: StartRqWorker, rq_queue: Queue, jitney: Jitney
) -> None:
    with start_rq_worker("--drain-timeout-s", "0.2") as process:
        job = rq_queue.enqueue(GENERATE, "Once", queue=jitney.queue_name)
        turn = await jitney.take_one()
        process.terminate()
        assert process.wait() == 0
    assert rq_queue.job_ids == [job.id]
    assert await jitney.reason(turn.id) == ""
    assert [line for line in process.lines if "Traceback" in line or "was destroyed" in line] == []


async def test_no_more_rq_jobs_are_held_than_asked_for(
    start_rq_worker: StartRqWorker, rq_queue: Queue, jitney: Jitney
) -> None:
    jobs = [rq_queue.enqueue(GENERATE, f"p{n}", queue=jitney.queue_name) for n in range(5)]
    with start_rq_worker("--concurrency", "2"):
        for _ in range(5):
            turn = await jitney.take_one()
            assert rq_queue.started_job_registry.get_job_count(cleanup=False) <= 2
            await turn.finish()
        for job in jobs:
            await has_status(job, "finished")
