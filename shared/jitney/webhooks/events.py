"""What is told: OpenAI's webhook events for what is OpenAI's, events of our own for jobs. Pure."""

from __future__ import annotations

import hashlib
from typing import Final, Literal

import orjson

Object = Literal["job", "response", "batch"]

_TYPES: Final[dict[tuple[str, str], str]] = {
    ("job", "finished"): "job.finished",
    ("job", "incomplete"): "job.finished",
    ("job", "failed"): "job.failed",
    ("job", "cancelled"): "job.cancelled",
    ("job", "expired"): "job.expired",
    # As `GET /v1/responses/{id}` would say of the same job.
    ("response", "finished"): "response.completed",
    ("response", "incomplete"): "response.incomplete",
    ("response", "failed"): "response.failed",
    ("response", "cancelled"): "response.cancelled",
    ("response", "expired"): "response.failed",
    ("batch", "completed"): "batch.completed",
    ("batch", "failed"): "batch.failed",
    ("batch", "expired"): "batch.expired",
    ("batch", "cancelled"): "batch.cancelled",
}
EVENT_TYPES: Final = frozenset(_TYPES.values())

_ID_PREFIXES: Final = {"response": "resp_"}
"""A response's id is its job's behind this."""


def event_type(object: str, ending: str) -> str:
    """The event's type. What a newer process may have written is passed on as it is."""
    return _TYPES.get((object, ending), f"{object}.{ending}")


def event_id(object: str, ending: str, id: str) -> str:
    """The event's own id, which is also its `webhook-id`: whatever tells of the same ending tells it under the same.

    It holds no full stop, as Standard Webhooks asks.
    """
    return "evt_" + hashlib.sha256(f"{event_type(object, ending)} {id}".encode()).hexdigest()[:32]


def event_body(object: str, ending: str, id: str, *, at: int) -> bytes:
    """The event as JSON. id: of the job or batch. at: when it ended, Unix seconds."""
    return orjson.dumps(
        {
            "object": "event",
            "id": event_id(object, ending, id),
            "type": event_type(object, ending),
            "created_at": at,
            "data": {"id": f"{_ID_PREFIXES.get(object, '')}{id}"},
        }
    )
