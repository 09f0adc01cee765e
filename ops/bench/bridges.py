"""One load, four ways: what people do with RQ and Celery today, and the same jobs through jitney's bridges.

    python -m ops.bench.bridges [--quick] [--write README.md] [--json FILE]

Prompts of mixed length, answers of very mixed length (greedy, of exactly the length that is asked for), all enqueued at
once by an ordinary RQ or Celery client, on one model:

    one `generate` for each RQ job, in a plain RQ worker
    celery-batches: static batches, each held until its longest answer has ended
    jitney's RQ bridge: `jitney rq-worker` and one jitney worker
    jitney's Celery consumer: `celery -A jitney.celery.app worker` and one jitney worker

From the first enqueue until the last result can be read. Five minutes; --quick one. The second way needs a package that
does not ask for this Celery, though it runs with it: `pip install --no-deps celery-batches==0.11`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from celery import Celery
from ops.bench import flags, page
from ops.bench.bridge_work import RQ_QUEUE, celery_app
from redis import Redis
from rq import Queue
from rq.job import Job
from rq.serializers import JSONSerializer

from jitney.embedded import EmbeddedServer
from jitney.errors import ServerError
from jitney.tether import tether
from jitney_worker.model.resolve import resolve
from jitney_worker.stack.local import LocalStack, StackSettings

PLACE = "bridges"
QUEUE = "bridges"
PATIENCE_S = 1_200.0
LOOK_EVERY_S = 0.02
QUICK_JOBS = 64
WAYS = {
    "rq": "`generate` for each RQ job, plain RQ worker",
    "batches": "celery-batches, static batches of {batch}",
    "rq-bridge": "**jitney's RQ bridge**",
    "celery-bridge": "**jitney's Celery consumer**",
}


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt, and how many tokens its answer has."""

    prompt: list[int]
    max_tokens: int


def load(num: int, mean_tokens: float, seed: int) -> list[Asked]:
    """Prompts of 8 to 128 tokens; answers exponential, 1 to six times the mean."""
    chance = random.Random(seed)
    return [
        Asked(
            [chance.randrange(3, 500) for _ in range(chance.randint(8, 128))],
            min(max(1, round(chance.expovariate(1 / mean_tokens))), round(6 * mean_tokens)),
        )
        for _ in range(num)
    ]


# Clients


def through_rq(queue: Queue, function: str, jobs: Sequence[Asked], **options: Any) -> float:
    """Seconds until RQ says of every job that it has a result."""
    start = time.perf_counter()
    sent = [
        queue.enqueue(function, args=(one.prompt,), kwargs={"max_tokens": one.max_tokens, **options}, job_timeout=-1)
        for one in jobs
    ]
    until(lambda: queue.finished_job_registry.count + queue.failed_job_registry.count >= len(sent))
    seconds = time.perf_counter() - start
    failed = queue.failed_job_registry.get_job_ids()
    if failed:
        result = Job.fetch(failed[0], connection=queue.connection, serializer=JSONSerializer).latest_result()
        raise ServerError(f"{len(failed)} jobs failed: {'' if result is None else result.exc_string}")
    return seconds


def through_celery(app: Celery, name: str, argument_lists: Sequence[tuple[list[Any], dict[str, Any]]]) -> float:
    """Seconds until every result is in the backend."""
    start = time.perf_counter()
    sent = [app.send_task(name, args, kwargs) for args, kwargs in argument_lists]
    for result in sent:
        result.get(timeout=PATIENCE_S, interval=LOOK_EVERY_S)
    return time.perf_counter() - start


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        if time.monotonic() > deadline:
            raise ServerError(f"no end within {PATIENCE_S:g} s")
        time.sleep(LOOK_EVERY_S)


# Ways


@contextmanager
def work(kind: str, url: str, asked: argparse.Namespace) -> Iterator[None]:
    """`bridge_work` for the length of the block."""
    environment = {**os.environ, "MODEL": str(resolve(asked.model)), "REDIS_URL": url, "BATCH": str(asked.batch)}
    command = [sys.executable, "-m", "ops.bench.bridge_work", kind]
    with subprocess.Popen(
        command,
        env=environment,
        cwd=page.ROOT,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        preexec_fn=tether(signal.SIGKILL),
    ) as program:
        assert program.stderr is not None
        words = [line.strip() for line in iter(program.stderr.readline, "ready\n") if line]
        try:
            if program.poll() is not None:
                raise ServerError(f"{kind} ended before it was ready: {words[-5:]}")
            yield
        finally:
            program.send_signal(signal.SIGTERM)
            try:
                program.communicate(timeout=30)
            except subprocess.TimeoutExpired:
                program.kill()


def alone(way: str, jobs: Sequence[Asked], asked: argparse.Namespace) -> float:
    """Without jitney."""
    with tempfile.TemporaryDirectory() as folder, EmbeddedServer(Path(folder), tethered=True) as server:
        with work("rq" if way == "rq" else "celery", server.url, asked):
            if way == "rq":
                queue = Queue(RQ_QUEUE, connection=Redis.from_url(server.url), serializer=JSONSerializer)
                return through_rq(queue, "ops.bench.bridge_work.answer", jobs)
            calls = [([one.prompt, one.max_tokens], dict[str, Any]()) for one in jobs]
            return through_celery(celery_app(server.url, asked.batch), "answer", calls)


async def bridged(way: str, jobs: Sequence[Asked], asked: argparse.Namespace) -> float:
    """Through one worker of ours, with both bridges up; the one that is not asked waits."""
    with tempfile.TemporaryDirectory(prefix="jitney-bridges-") as folder:
        settings = StackSettings(
            data_dir=Path(folder),
            queue=QUEUE,
            port=0,
            bulk=True,
            worker_flags=("--model", str(resolve(asked.model)), "--queue", QUEUE, "--max-num-seqs", str(asked.seats)),
        )
        async with LocalStack(settings) as stack:
            return await asyncio.to_thread(_ask, way, stack.redis_url, jobs)


def _ask(way: str, url: str, jobs: Sequence[Asked]) -> float:
    options = {"ignore_eos": True, "temperature": 0.0}
    if way == "rq-bridge":
        queue = Queue("jitney", connection=Redis.from_url(url), serializer=JSONSerializer)
        return through_rq(queue, "jitney.rq.generate", jobs, **options)
    app = Celery("asking", broker=url, backend=url, set_as_current=False)
    app.conf.update(task_default_queue="jitney", task_serializer="json", accept_content=["json"])
    calls = [([one.prompt], {"max_tokens": one.max_tokens, **options}) for one in jobs]
    return through_celery(app, "jitney.generate", calls)


def measure(asked: argparse.Namespace) -> dict[str, float]:
    """Seconds of each way."""
    jobs, found = load(asked.jobs, asked.mean_tokens, asked.seed), dict[str, float]()
    for way in asked.ways:
        if way == "batches" and find_spec("celery_batches") is None:
            flags.say("celery-batches is not installed (pip install --no-deps celery-batches==0.11): left out")
            continue
        seconds = alone(way, jobs, asked) if way in ("rq", "batches") else asyncio.run(bridged(way, jobs, asked))
        found[way] = seconds
        flags.say(f"{way}: {seconds:.1f} s, {asked.jobs / seconds:.2f} jobs/s")
    return found


def text(found: dict[str, float], asked: argparse.Namespace, machine: str) -> str:
    num_tokens = sum(one.max_tokens for one in load(asked.jobs, asked.mean_tokens, asked.seed))
    first = next(iter(found.values()))
    rows = [
        [
            WAYS[way].format(batch=asked.batch),
            f"{asked.jobs / seconds:.1f}",
            f"{num_tokens / seconds:,.0f}",
            page.times(first, seconds, digits=1),
        ]
        for way, seconds in found.items()
    ]
    return "\n\n".join(
        (
            page.table(["way", "jobs/s", "tokens/s", "of the first"], rows),
            page.paragraph(
                f"`make bench-bridges`: {asked.jobs} prompts of 8 to 128 tokens, {num_tokens:,} tokens of answers",
                f"(exponential, mean {asked.mean_tokens:g}), {asked.model}; one run. {machine}.",
            ),
        )
    )


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = flags.parser(__doc__)
    parser.add_argument("--model", default=flags.MODEL, help="registered name or directory; %(default)s")
    parser.add_argument("--jobs", type=flags.positive, default=512)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_JOBS} jobs")
    parser.add_argument("--mean-tokens", type=flags.above_zero, default=14.0, help="of an answer; %(default)g")
    parser.add_argument("--batch", type=flags.positive, default=32, help="of the static way; %(default)s")
    parser.add_argument("--seats", type=flags.positive, default=64, help="of jitney's worker; %(default)s")
    parser.add_argument("--ways", type=flags.listed(str, tuple(WAYS)), default=tuple(WAYS), metavar=",".join(WAYS))
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args(words)
    asked.jobs = QUICK_JOBS if asked.quick else asked.jobs
    return asked


@flags.told()
def main(words: Sequence[str] | None = None) -> None:
    asked = arguments(words)
    page.check_place(asked.write, PLACE)
    machine = page.machine()
    found = measure(asked)
    report = {"machine": machine, "jobs": asked.jobs, "model": asked.model, "seconds": found}
    flags.leave_behind(asked, PLACE, text(found, asked, machine), report)


if __name__ == "__main__":
    main()
