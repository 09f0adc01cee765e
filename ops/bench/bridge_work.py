"""What answers without jitney: transformers' `generate` in a plain RQ worker, and on static batches in Celery.

    python -m ops.bench.bridge_work rq       one `generate` for each RQ job
    python -m ops.bench.bridge_work celery   celery-batches: a batch is padded, and held until its longest has ended

Started by `ops.bench.bridges`, with MODEL, REDIS_URL and BATCH in the environment; says `ready` on standard error. Both
are kinder than what one meets: the model is loaded once and warm, and RQ forks no process for each job.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from celery import Celery
from celery.signals import worker_ready
from redis import Redis
from rq import SimpleWorker
from rq.serializers import JSONSerializer

from jitney_worker.bench.naive import generate, load_naive
from jitney_worker.bench.workloads import BenchJob

RQ_QUEUE = "bench"
FLUSH_S = 0.5
PAD = 0


@cache
def model() -> Any:
    return load_naive(Path(os.environ["MODEL"]), "auto", None)


def answer(prompt: list[int], max_tokens: int) -> list[int]:
    """An RQ job."""
    return generate(model(), BenchJob(tuple(prompt), max_tokens))


@torch.inference_mode()
def answer_all(jobs: Sequence[tuple[list[int], int]]) -> list[list[int]]:
    """One call for all: prompts padded on the left, everybody computed as long as the longest answer."""
    width, longest = max(len(prompt) for prompt, _ in jobs), max(most for _, most in jobs)
    rows = [[PAD] * (width - len(prompt)) + prompt for prompt, _ in jobs]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in jobs]
    output = model().generate(
        input_ids=torch.tensor(rows), attention_mask=torch.tensor(mask), max_new_tokens=longest, do_sample=False
    )
    return [row[width : width + most].tolist() for row, (_, most) in zip(output, jobs, strict=True)]


def celery_app(url: str, batch: int) -> Celery:
    """An application with the task `answer`, which takes a batch at a time."""
    from celery_batches import Batches

    app = Celery("bench", broker=url, backend=url, set_as_current=False)
    app.conf.update(worker_prefetch_multiplier=0, task_default_queue="bench", broker_connection_retry_on_startup=True)

    @app.task(name="answer", base=Batches, flush_every=batch, flush_interval=FLUSH_S)  # type: ignore[untyped-decorator]
    def answer_batch(requests: Sequence[Any]) -> None:
        answers = answer_all([(request.args[0], request.args[1]) for request in requests])
        for request, said in zip(requests, answers, strict=True):
            app.backend.mark_as_done(request.id, said, request=request)

    return app


def say_ready(**_: Any) -> None:
    print("ready", file=sys.__stderr__, flush=True)  # Celery takes over the other


def main(words: Sequence[str]) -> None:
    url = os.environ["REDIS_URL"]
    answer_all([(list(range(3, 40)), 4)] * 2)
    if words == ["rq"]:
        worker = SimpleWorker([RQ_QUEUE], connection=Redis.from_url(url), serializer=JSONSerializer)
        say_ready()
        worker.work(logging_level="WARNING")
    elif words == ["celery"]:
        worker_ready.connect(say_ready, weak=False)
        app = celery_app(url, int(os.environ["BATCH"]))
        app.worker_main(["--quiet", "worker", "--pool", "solo", "--loglevel", "error"])
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    # RQ and Celery find the functions by the module's name, which is not the one that a script has.
    from ops.bench import bridge_work

    bridge_work.main(sys.argv[1:])
