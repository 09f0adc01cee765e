"""`jitney up --bulk`: RQ jobs and Celery tasks are taken beside all else, and nothing of it outlives the stack."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from celery import Celery
from redis import Redis
from rq import Queue
from rq.job import Job
from rq.serializers import JSONSerializer
from tests.e2e.programs import LIVENESS_S, Program, children_of, is_alive, program, words

from jitney.embedded import EmbeddedServer
from jitney.errors import SettingsError
from jitney_worker.stack import bridges

UP = ("--port", "0", "--max-num-seqs", "4", "--num-kv-blocks", "64", "--num-threads", "1", "--bulk")
OPTIONS = {"max_tokens": 8, "ignore_eos": True, "temperature": 0}


def up(model: Path, data_dir: Path, *more: str) -> tuple[str, ...]:
    return ("up", "--model", str(model), "--data-dir", str(data_dir), *UP, *more)


def is_running(pid: int, word: str) -> bool:
    try:
        return word.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def those(stack: Program, word: str) -> set[int]:
    return {pid for pid in children_of(stack.pid) if is_running(pid, word)}


def until_beat_runs(stack: Program) -> None:
    """The stack is ready before Celery is: the worker, and its beat."""
    deadline = time.monotonic() + LIVENESS_S
    while len(those(stack, "celery_program")) != 2:
        assert time.monotonic() < deadline, stack.lines
        time.sleep(0.05)


def enqueue(url: str) -> Job:
    queue = Queue("jitney", connection=Redis.from_url(url), serializer=JSONSerializer)
    return queue.enqueue("jitney.rq.generate", args=([1, 2, 3],), kwargs=OPTIONS)


def until_finished(job: Job) -> None:
    deadline = time.monotonic() + LIVENESS_S
    while job.get_status() != "finished":
        assert job.get_status() != "failed", job.latest_result()
        assert time.monotonic() < deadline, job.get_status()
        time.sleep(0.05)


def test_rq_jobs_and_celery_tasks_are_taken_and_all_programs_end_with_the_stack(
    tiny_model: Path, tmp_path: Path
) -> None:
    with program(*up(tiny_model, tmp_path)) as stack:
        ready = words(stack.until_line("ready redis="))
        said = words(stack.until_line("ready "))
        assert said.keys() == {"rq-worker", "queues", "celery"}
        assert said["queues"] == "jitney"
        job = enqueue(ready["redis"])
        app = Celery("shop", broker=ready["redis"], backend=ready["redis"], set_as_current=False)
        app.conf.task_default_queue = "jitney"
        answer = app.send_task("jitney.generate", [[1, 2, 3]], OPTIONS).get(timeout=LIVENESS_S)
        until_finished(job)
        result = job.latest_result()
        assert result is not None
        assert result.return_value["text"] == answer["text"] != ""
        pids = children_of(stack.pid)
        assert len(those(stack, "celery_program")) == 2, "the worker, and its beat"
        stack.terminate()
        assert stack.wait() == 0
    assert not any(is_alive(pid) for pid in pids)
    assert not any("Traceback" in line for line in stack.lines), stack.lines


def test_an_rq_worker_that_is_killed_is_started_again_and_a_killed_stack_leaves_neither_it_nor_celery_behind(
    tiny_model: Path, tmp_path: Path
) -> None:
    """On a server of its own, which goes on: nobody ends because it is gone."""
    with (
        EmbeddedServer(tmp_path / "server", tethered=True) as server,
        program(*up(tiny_model, tmp_path / "data", "--redis-url", server.url)) as stack,
    ):
        stack.until_line("ready redis=")
        (rq_worker,) = those(stack, "rq-worker")
        os.kill(rq_worker, signal.SIGKILL)
        stack.until_line("rq-worker was ended by SIGKILL; starting it again")
        until_finished(enqueue(server.url))
        until_beat_runs(stack)
        pids = children_of(stack.pid)
        stack.kill()
        stack.wait()
        deadline = time.monotonic() + LIVENESS_S
        while any(is_alive(pid) for pid in pids):
            assert time.monotonic() < deadline, "children outlived their parent"


def test_rq_or_celery_that_is_not_installed_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridges, "NEEDED", ("rq", "celery_of_nobody"))
    with pytest.raises(SettingsError, match=r"needs celery_of_nobody: pip install 'jitney\[celery_of_nobody\]'"):
        bridges.check_bridges()
