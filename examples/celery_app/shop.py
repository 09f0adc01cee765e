"""A Celery application that uses a language model: `celery -A shop worker`, in this directory.

The worker holds `jitney.generate` tasks, hundreds at once, and runs the two tasks below in its threads.
"""

from __future__ import annotations

import os
from typing import Any

from celery import Celery, chain, chord

from jitney.celery import install

app = Celery("shop", broker=os.environ["SHOP_REDIS_URL"], backend=os.environ["SHOP_REDIS_URL"])
app.conf.update(
    task_serializer="json",
    result_serializer="json",
    accept_content=["json"],
    # Of a worker that is gone. What a living one holds is not handed out again, however long it takes.
    broker_transport_options={"visibility_timeout": 300},
)
install(app)


@app.task
def keep_text(answer: dict[str, Any]) -> str:
    """What a chain does with an answer."""
    return str(answer["text"]).strip()


@app.task
def join(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """What a chord does with all of them."""
    return {
        "texts": [answer["text"] for answer in answers],
        "tokens": sum(answer["usage"]["completion_tokens"] for answer in answers),
    }


def label(review: str) -> Any:
    """One review. Sent by name: this process need not know the task, and no model is imported anywhere here."""
    return app.send_task("jitney.generate", args=[f"Is this review good or bad? {review}"], kwargs={"max_tokens": 8})


def summary(reviews: list[str]) -> Any:
    """One after the other: the answer to the first prompt is the second one's input."""
    generate = app.tasks["jitney.generate"]
    return chain(generate.s("Sum up: " + " ".join(reviews), max_tokens=64), keep_text.s()).apply_async()


def labels(reviews: list[str]) -> Any:
    """Any number at once. They share forward passes."""
    generate = app.tasks["jitney.generate"]
    return chord((generate.s(f"Good or bad? {review}", max_tokens=8, band="bulk") for review in reviews), join.s())()
