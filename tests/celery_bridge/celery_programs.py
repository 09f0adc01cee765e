"""A Celery application for tests, and the processes that work for it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from celery import Celery

from jitney.celery import install
from jitney.celery.tasks import Generation
from jitney.errors import JobFailed
from jitney.tether import tether

ROOT = Path(__file__).parents[2]
LIVENESS_S = 60.0
QUICK = ("--without-mingle", "--without-gossip")
"""A second less before a worker is ready."""
MODULE = "tests.celery_bridge.celery_programs"
CELERY = (
    "import signal; from celery.__main__ import main; from jitney.tether import tether_forks; "
    "tether_forks(signal.SIGKILL); main()"
)
"""`python -m celery`, whose forks (beat is one) end with it, also when it is killed."""


def make_app(url: str, visibility_s: float = 3_600.0) -> Celery:
    app = Celery("of-a-test", broker=url, backend=os.environ.get("OF_A_TEST_BACKEND", url))
    transport = {"visibility_timeout": visibility_s, "unacked_restore_throttle": 1, "polling_interval": 0.2}
    app.conf.update(
        accept_content=os.environ.get("OF_A_TEST_ACCEPT", "json").split(),
        task_serializer="json",
        result_serializer="json",
        broker_transport_options=transport,
        worker_send_task_events=True,
        task_send_sent_event=True,
        task_acks_late=True,
        worker_pool=os.environ.get("OF_A_TEST_POOL", "threads"),
        worker_concurrency=2,
        broker_connection_retry_on_startup=True,
    )
    install(app, hold=os.environ.get("OF_A_TEST_HOLD", "1") == "1", upkeep=False)
    app.register_task(Stubborn())
    app.register_task(Polite())
    for task in (echo, collect, note):
        app.task(task, name=f"test.{task.__name__}")
    return app


class Stubborn(Generation):
    """Asks once more when its job has failed."""

    name = "test.stubborn"
    autoretry_for = (JobFailed,)
    max_retries = 1
    default_retry_delay = 0
    retry_backoff = False


class Polite(Generation):
    """Asks for something else than its arguments say."""

    name = "test.polite"

    def run(self, topic: str) -> dict[str, Any]:
        return super().run(f"Tell me of {topic}, please")


def echo(answer: dict[str, Any]) -> str:
    return f"<{answer['text']}>"


def collect(answers: list[dict[str, Any]]) -> list[str]:
    return [answer["text"] for answer in answers]


def note(*seen: Any) -> None:
    """Leaves a mark in Redis, so that a test can count how often a callback ran."""
    from redis import Redis

    with contextlib.closing(Redis.from_url(os.environ["OF_A_TEST_URL"])) as redis:
        redis.rpush("noted", repr(seen)[:200])


class Worker:
    """A Celery worker in a process of its own."""

    def __init__(self, module: str, url: str, *options: str, cwd: Path, environment: Mapping[str, str]) -> None:
        self._log = tempfile.NamedTemporaryFile("w+", suffix=".log")  # noqa: SIM115 (as long as the worker)
        self.process = subprocess.Popen(
            [sys.executable, "-c", CELERY, "-A", module, "worker", "-l", "info", *QUICK, *options],
            cwd=cwd,
            env={**os.environ, "JITNEY_REDIS_URL": url, "OF_A_TEST_URL": url, "OMP_NUM_THREADS": "1", **environment},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=tether(signal.SIGKILL),
        )

    @property
    def log(self) -> str:
        return Path(self._log.name).read_text()

    def until(self, words: str) -> None:
        """Until its log holds them."""
        patience = time.monotonic() + LIVENESS_S
        while words not in self.log:
            assert self.process.poll() is None, self.log[-3_000:]
            assert time.monotonic() < patience, f"no {words!r}: {self.log[-3_000:]}"
            time.sleep(0.05)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> int:
        """Warm shutdown; the exit code."""
        self.send(signal.SIGTERM)
        return self.process.wait(LIVENESS_S)

    def kill(self) -> None:
        """With its children, if it has any."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(LIVENESS_S)
        self._log.close()


@contextlib.contextmanager
def running(url: str, *options: str, module: str = MODULE, cwd: Path = ROOT, **environment: str) -> Iterator[Worker]:
    """A worker that is ready, and is gone afterwards."""
    settings = {"JITNEY_CELERY__TELL_EVERY_S": "0.1", "JITNEY_CELERY__DRAIN_S": "0.2", **environment}
    worker = Worker(module, url, *options, cwd=cwd, environment=settings)
    try:
        worker.until(" ready.")
        yield worker
    finally:
        worker.kill()


if "OF_A_TEST_URL" in os.environ:
    app = make_app(os.environ["OF_A_TEST_URL"], float(os.environ.get("OF_A_TEST_VISIBILITY_S", "3600")))
