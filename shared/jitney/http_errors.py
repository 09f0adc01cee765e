"""Errors of the API as the errors they were before they became HTTP. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import orjson

from jitney.errors import (
    IdempotencyConflict,
    InvalidJob,
    JitneyError,
    JobNotFound,
    KeyRefused,
    NotDurable,
    Overloaded,
    PromptTooLong,
    QueueUnavailable,
    ScopeMissing,
    SettingsError,
    StreamLost,
    UnknownQueue,
)

TOLD_HEADER: Final = "x-jitney-error"
"""The numbers behind an error's words, a JSON object: the body has OpenAI's members and no others."""

MAX_TOLD_BYTES: Final = 2_048
DEFAULT_RETRY_S: Final = 1.0

_BY_CODE: Final[dict[str, type[JitneyError]]] = {
    "invalid_api_key": KeyRefused,
    "insufficient_scope": ScopeMissing,
    "context_length_exceeded": PromptTooLong,
    "model_not_found": UnknownQueue,
    "idempotency_conflict": IdempotencyConflict,
    "queue_full": Overloaded,
    "job_not_found": JobNotFound,
    "stream_lost": StreamLost,
    "not_durable": NotDurable,
    "bad_settings": SettingsError,
    "unknown_url": SettingsError,
    "method_not_allowed": SettingsError,
}
_BY_TYPE: Final[dict[str, type[JitneyError]]] = {
    "invalid_request_error": InvalidJob,
    "rate_limit_error": Overloaded,
    "service_unavailable_error": QueueUnavailable,
}
_BY_STATUS: Final[dict[int, type[JitneyError]]] = {
    401: KeyRefused,
    403: ScopeMissing,
    404: SettingsError,
    408: QueueUnavailable,
    429: Overloaded,
}
"""Where the body says nothing: some proxy's own words."""

_UNTOLD: Final[dict[str, Any]] = {
    "num_tokens": 0,
    "max_tokens": 0,
    "name": "",
    "known": [],
    "needed": "",
    "held": [],
    "which": "",
    "waiting_jobs": 0,
    "waiting_tokens": 0,
    "job_id": "",
}


def told_by(error: JitneyError) -> str | None:
    """The header's value; None when there is nothing to tell, or too much."""
    told = {name: getattr(error, name) for name in error.told}
    value = json.dumps(told, separators=(",", ":")) if told else ""  # orjson writes UTF-8, and a header is ASCII
    return value if 0 < len(value) <= MAX_TOLD_BYTES else None


def error_of_answer(status: int, headers: Mapping[str, str], body: bytes) -> JitneyError:
    """The error that an answer of this status stands for."""
    wire = _wire(body)
    if wire is None:
        kind = _BY_STATUS.get(status) or (QueueUnavailable if status >= 502 else JitneyError)
        wire = {"message": f"HTTP {status}, not in the words of a jitney API: is this its address?"}
        return _revived(kind, wire, {"retry_after_s": retry_after_s(headers)})
    return error_of_wire(wire, {"retry_after_s": retry_after_s(headers), **_told(headers)})


def error_of_wire(wire: Mapping[str, Any], told: Mapping[str, Any] | None = None) -> JitneyError:
    """The error behind the object that stands under `error`, in an answer or in a frame of a stream."""
    kind = _BY_CODE.get(str(wire.get("code"))) or _BY_TYPE.get(str(wire.get("type")), JitneyError)
    return _revived(kind, wire, told or {})


def retry_after_s(headers: Mapping[str, str]) -> float:
    """Seconds after which to try again. A date, which RFC 9110 allows too, is answered by DEFAULT_RETRY_S."""
    for name, unit_s in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        value = headers.get(name, "")
        if value.isascii() and value.isdecimal() and len(value) < 10:
            return int(value) * unit_s
    return DEFAULT_RETRY_S


def _revived(kind: type[JitneyError], wire: Mapping[str, Any], told: Mapping[str, Any]) -> JitneyError:
    """An error in the words in which it was raised elsewhere, as unpickling would make it: no constructor runs."""
    error = kind.__new__(kind, str(wire.get("message", ""))[:1_000])
    for name in ("type", "code"):
        if isinstance(wire.get(name), str):
            setattr(error, name, wire[name])
    if isinstance(wire.get("param"), str):
        error.param = wire["param"]
    for name in kind.told:
        setattr(error, name, told.get(name, _UNTOLD.get(name, DEFAULT_RETRY_S)))
    return error


def _wire(body: bytes) -> dict[str, Any] | None:
    try:
        wire = orjson.loads(body)["error"]
    except (ValueError, TypeError, KeyError):
        return None
    return wire if isinstance(wire, dict) else None


def _told(headers: Mapping[str, str]) -> dict[str, Any]:
    try:
        told = orjson.loads(headers.get(TOLD_HEADER, "{}"))
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}
