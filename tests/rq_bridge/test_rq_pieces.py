"""The pieces of `jitney.rq` that need no worker process."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint
from typing import Any

import pytest
from redis import Redis as SyncRedis
from rq import Queue
from rq.job import Job
from rq.registry import FailedJobRegistry
from rq.serializers import JSONSerializer

from jitney import InvalidJob, JobCancelled, JobFailed, Overloaded, SettingsError, UnknownQueue
from jitney.rq import strangers
from jitney.rq.generation import run_key
from jitney.rq.held import HeldJobs, JobUnreadable, function_name, is_hopeless
from jitney.rq.settings import RqSettings
from jitney.rq.standing import standing
from jitney.rq.strangers import Strangers
from jitney.rq.worker import HoldingWorker


@pytest.mark.parametrize(
    ("status", "started_until", "found"),
    [
        (b"started", 1.0, "ours"),
        (b"started", None, "lost"),
        (b"queued", None, "lost"),
        (b"finished", 1.0, "lost"),
        (b"canceled", None, "withdrawn"),
        (None, None, "withdrawn"),
    ],
)
def test_where_an_rq_job_stands(status: bytes | None, started_until: float | None, found: str) -> None:
    assert standing(status, started_until) == found


def test_the_attempts_of_one_run_of_an_rq_job_have_one_key(rq_queue: Queue) -> None:
    job = rq_queue.enqueue("jitney.rq.generate", "x", job_id="a")
    same = Job.fetch("a", connection=rq_queue.connection, serializer=JSONSerializer)
    same.retries_left = 7
    assert run_key(same) == run_key(job)
    FailedJobRegistry(queue=rq_queue).add(job)
    assert run_key(job.requeue()) == run_key(same)


def test_other_runs_of_an_rq_job_have_other_keys(rq_queue: Queue) -> None:
    jobs = [rq_queue.enqueue("jitney.rq.generate", "x", job_id=name) for name in ("a", "a", "b")]
    repeated = Job.fetch("b", connection=rq_queue.connection, serializer=JSONSerializer)
    repeated.repeats_left = 1
    assert len({run_key(job) for job in [*jobs, repeated]}) == 4


@pytest.mark.parametrize(
    ("error", "hopeless"),
    [
        (InvalidJob("x"), True),
        (JobFailed("x", job_id="q.1", error={"type": "invalid_request_error"}), True),
        (JobFailed("x", job_id="q.1", error={"type": "server_error"}), False),
        (JobCancelled("x", job_id="q.1"), True),
        (UnknownQueue("x", []), False),
        (Overloaded("x", waiting_jobs=1, waiting_tokens=1, retry_after_s=1.0), False),
        (RuntimeError("x"), False),
    ],
)
def test_which_rq_jobs_are_not_worth_a_retry(error: Exception, hopeless: bool) -> None:
    assert is_hopeless(error) is hopeless


@pytest.mark.parametrize(
    "written", [b"\x80\x05K\x01.", b"[1, 2]", b'"x"', b'["f", null, {}, []]', b'["f", 7, [], {}]', b"{", b"\xff"]
)
def test_an_rq_job_that_is_no_call_in_json_is_not_read(rq_connection: SyncRedis, written: bytes) -> None:
    job = Job("odd", connection=rq_connection, serializer=JSONSerializer)
    job.data = written
    with pytest.raises(JobUnreadable, match="RQ job odd was not written in JSON"):
        function_name(job)


def test_held_jobs_are_found_by_their_names() -> None:
    jobs = HeldJobs([EntryPoint("x.y", "jitney.rq.generation:generate", "jitney.held_jobs")])
    assert jobs.find("x.y").__name__ == "generate"
    with pytest.raises(InvalidJob, match=r"no held job is called 'x\.z'; known: x\.y"):
        jobs.find("x.z")


def test_generate_is_a_held_job_that_is_installed() -> None:
    assert HeldJobs().find("jitney.rq.generate").__module__ == "jitney.rq.generation"


def test_a_queue_that_holds_nothing_but_strangers_rests(rq_queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(strangers.time, "monotonic", lambda: now)
    known = Strangers()
    known.note(rq_queue, "f", num_waiting=2)
    assert known.allow(rq_queue)
    known.note(rq_queue, "f", num_waiting=2)
    assert not known.allow(rq_queue)
    assert known.are_resting
    now += strangers.REST_S
    assert known.allow(rq_queue)
    assert not known.are_resting


def test_a_queue_that_unpickles_is_refused(rq_connection: SyncRedis) -> None:
    with pytest.raises(SettingsError, match="queue loose unpickles what is in it"):
        HoldingWorker([Queue("loose", connection=rq_connection)], connection=rq_connection)


def test_an_rq_worker_whose_client_cannot_be_does_not_begin(rq_queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITNEY_DURABILITY", "hopeful")
    worker = HoldingWorker([rq_queue], connection=rq_queue.connection)
    with pytest.raises(SettingsError, match="JITNEY_DURABILITY"):
        worker.work(burst=True)
    assert HoldingWorker.all_keys(queue=rq_queue) == []


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"concurrency": 0}, "JITNEY_RQ__CONCURRENCY: Input should be greater than or equal to 1"),
        ({"url": "http://:secret@x"}, "JITNEY_RQ__URL: not a Redis address"),
    ],
)
def test_settings_of_the_rq_worker_that_cannot_be_are_refused(given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SettingsError, match=complaint) as refused:
        RqSettings.load(**given)
    assert "secret" not in str(refused.value)


def test_rq_s_own_url_is_taken_where_ours_is_not_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITNEY_REDIS_URL", "redis://a")
    assert RqSettings.load().rq_url == "redis://a"
    monkeypatch.setenv("RQ_REDIS_URL", "redis://b")
    assert RqSettings.load().rq_url == "redis://b"
    monkeypatch.setenv("JITNEY_RQ__URL", "redis://c")
    assert RqSettings.load().rq_url == "redis://c"


def test_jitney_itself_needs_no_rq() -> None:
    code = "import jitney, jitney.cli, sys; sys.exit('rq' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_rq_in_our_package_is_rq() -> None:
    code = "import jitney.rq.worker, rq, sys; print(rq.__version__, sys.modules['rq'].Queue.__module__)"
    ended = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    assert ended.stdout.split()[1] == "rq.queue"
