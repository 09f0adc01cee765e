"""Which messages are taken: JSON, whatever else the application accepts. Nothing else is ever decoded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from celery.worker.strategy import default
from kombu.exceptions import ContentDisallowed

JSON: Final = ("application/json", "json")


def json_only(task: Any, app: Any, consumer: Any, **options: Any) -> Callable[..., Any]:
    """Celery's own strategy, behind a look at the content type."""
    take = default(task, app, consumer, **options)

    def take_json(message: Any, body: Any, *rest: Any) -> Any:
        if message.content_type not in JSON:
            raise ContentDisallowed(f"{task.name} takes JSON alone, and this message is {message.content_type!r}")
        return take(message, body, *rest)

    return take_json
