"""What the application of these tests has: callbacks, which say in Redis that they were called, and jobs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from redis import Redis
from redis.exceptions import ConnectionError
from rq.job import Job


def said(connection: Redis, job_id: str) -> list[str]:
    """What the callbacks of a job have said, in order."""
    return [line.decode() for line in connection.lrange(f"said:{job_id}", 0, -1)]


def on_success(job: Job, connection: Redis, result: dict[str, Any]) -> None:
    connection.rpush(f"said:{job.id}", f"success {result['text']}")


def on_failure(job: Job, connection: Redis, kind: type[BaseException], error: BaseException, _: Any) -> None:
    connection.rpush(f"said:{job.id}", f"failure {kind.__name__}")


def on_stopped(job: Job, connection: Redis) -> None:
    connection.rpush(f"said:{job.id}", "stopped")


def note_in_file(job: Job, connection: Redis, result: Any) -> None:
    """A callback that asks nothing of the server."""
    with Path(job.meta["path"]).open("a") as file:
        file.write(f"{job.id}\n")


def lose_redis(job: Job, connection: Redis, result: Any) -> None:
    raise ConnectionError("the application's own Redis is away")


async def lose_it_too(held: Any) -> None:
    """A held job of the application's own."""
    raise ConnectionError("the application's own Redis is away")


def break_down(job: Job, connection: Redis, result: Any) -> None:
    raise RuntimeError("a callback of the application is broken")


def add(first: int, second: int) -> int:
    """A job of the application's own."""
    return first + second


class Touching:
    """Unpickling it makes a directory."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (self.path,))
