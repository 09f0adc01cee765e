"""Enqueue a job for each line of a file, and one more that runs when all of them have a label."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from redis import Redis
from rq import Callback, Queue, Retry
from rq.job import Job

GENERATE = "jitney.rq.generate"  # by name: this program needs rq, not jitney


def enqueue_labels(rq_queue: Queue, tickets: list[str], **options: Any) -> list[Job]:
    """A job for each ticket. options: of jitney, such as `queue` or `temperature`."""
    return [
        rq_queue.enqueue(
            GENERATE,
            messages=[
                {"role": "system", "content": "Answer with one word: delivery, billing, account or bug."},
                {"role": "user", "content": ticket},
            ],
            max_tokens=8,
            meta={"ticket": str(number)},
            retry=Retry(max=3, interval=1),
            job_timeout="1h",
            on_success=Callback("examples.rq_app.callbacks.keep_label"),
            on_failure=Callback("examples.rq_app.callbacks.count_failure"),
            **options,
        )
        for number, ticket in enumerate(tickets)
    ]


def enqueue_summary(rq_queue: Queue, labels: list[Job], **options: Any) -> Job:
    """A job that runs once every label is there."""
    prompt = f"{len(labels)} customers have written today. In one sentence, thank the team:"
    return rq_queue.enqueue(GENERATE, prompt, max_tokens=32, depends_on=labels, job_timeout="1h", **options)


def connect(url: str) -> Redis:
    """With redis-py's own `socket_timeout`, five seconds, every longer wait for a result would be an error."""
    return Redis.from_url(url, socket_timeout=None)


def main() -> None:
    """Show every label, then the last sentence."""
    queue = Queue("jitney", connection=connect(os.environ["RQ_REDIS_URL"]), serializer="json")
    tickets = Path(sys.argv[1]).read_text().splitlines()
    labels = enqueue_labels(queue, tickets)
    summary = enqueue_summary(queue, labels)
    for ticket, job in zip(tickets, labels, strict=True):
        result = job.latest_result(timeout=3_600)
        assert result is not None
        print(f"{result.return_value['text'].strip():<12} {ticket}")
    result = summary.latest_result(timeout=3_600)
    assert result is not None
    print(result.return_value["text"].strip())


if __name__ == "__main__":
    main()
