"""Batches and their files as values: what Redis holds of each, and how it is told in OpenAI's words. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Literal, get_args

import orjson

from jitney.errors import JitneyError
from jitney.keys import new_tail

BatchState = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
FilePurpose = Literal["batch", "batch_output"]
Kind = Literal["output", "error"]

ENDED: Final[frozenset[BatchState]] = frozenset({"failed", "completed", "expired", "cancelled"})
ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
"""What the lines of a batch may ask."""

MAX_LINES: Final = 50_000
MAX_FILE_BYTES: Final = 200 * 2**20
MAX_ERRORS: Final = 100
"""Kept of a batch that failed its validation. Source of all three: OpenAI's limits, as far as they are documented."""

_BATCH_ID = re.compile(r"batch_[0-9A-Za-z]{22}")
_FILE_ID = re.compile(r"file-[0-9A-Za-z]{22}")


class FileUnknown(JitneyError):
    """No file of this tenant has this id, it has expired, or its content is gone."""

    type = "invalid_request_error"
    code = "file_not_found"
    param = "file_id"

    def __init__(self, file_id: str, *, what: str = "it never existed, was deleted, or has expired") -> None:
        super().__init__(f"no file {file_id[:96]}: {what}")


class FileInUse(JitneyError):
    """A batch that has not ended reads this file."""

    type = "invalid_request_error"
    code = "file_in_use"
    param = "file_id"

    def __init__(self, file_id: str) -> None:
        super().__init__(f"file {file_id} is the input of a batch that has not ended: cancel that, or wait for it")


class BatchUnknown(JitneyError):
    """No batch of this tenant has this id, or its record has expired."""

    type = "invalid_request_error"
    code = "batch_not_found"
    param = "batch_id"

    def __init__(self, batch_id: str) -> None:
        super().__init__(f"no batch {batch_id[:96]}: it never existed, or its record has expired")


class BatchTaken(JitneyError):
    """Another assembler has taken the batch since, or it has ended: whoever hears this stops without a word."""

    code = "batch_taken"

    def __init__(self, batch_id: str) -> None:
        super().__init__(f"batch {batch_id} belongs to another assembler now")


def new_batch_id() -> str:
    """128 random bits, never taken from a user's text; without ':', for it is its RQ job's id as well."""
    return f"batch_{new_tail()}"


def new_file_id() -> str:
    return f"file-{new_tail()}"


def is_batch_id(text: str) -> bool:
    return _BATCH_ID.fullmatch(text) is not None


def is_file_id(text: str) -> bool:
    return _FILE_ID.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class LineError:
    """Why a batch failed before it ran. line: of the input file, from 1; None where it is about all of it."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of the requests that were answered."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.input_tokens + other.input_tokens,
            self.cached_tokens + other.cached_tokens,
            self.output_tokens + other.output_tokens,
        )

    def object(self) -> dict[str, Any]:
        return {
            "input_tokens": self.input_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": self.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.input_tokens + self.output_tokens,
        }


NOTHING: Final = Usage()


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file whose content lies in the store under its id. Times: Unix seconds of Redis' clock.

    filename: as the caller named it; it is shown, and nothing else is done with it. expires_at: None = never.
    """

    id: str
    tenant: str
    filename: str
    purpose: FilePurpose
    num_bytes: int
    created_at: float = 0.0
    expires_at: float | None = None

    def object(self) -> dict[str, Any]:
        """OpenAI's File object. Source: `openai.types.FileObject`."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": int(self.created_at),
            "expires_at": None if self.expires_at is None else int(self.expires_at),
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }

    @classmethod
    def decode(cls, file_id: str, stored: Mapping[bytes, bytes]) -> FileRecord:
        """From the fields of its hash."""
        text = _texts(stored)
        return cls(
            id=file_id,
            tenant=text["tenant"],
            filename=text["filename"],
            purpose="batch" if text["purpose"] == "batch" else "batch_output",
            num_bytes=int(text["num_bytes"]),
            created_at=int(text["created_at"]) / 1_000,
            expires_at=_seconds(text.get("expires_at")),
        )


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch as it stands. Times: Unix seconds of Redis' clock; None = not yet, or never.

    fence: how often an assembler has taken it; the newest one alone may write. expires_at: when its window closes.
    total: lines of the input file, 0 until it is validated. output_expires_s: the life of its two files, where asked.
    """

    id: str
    tenant: str
    state: BatchState
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: float
    expires_at: float
    fence: int = 0
    metadata: dict[str, str] | None = None
    model: str | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    usage: Usage = NOTHING
    errors: tuple[LineError, ...] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None
    output_expires_s: int | None = None
    in_progress_at: float | None = None
    finalizing_at: float | None = None
    completed_at: float | None = None
    failed_at: float | None = None
    expired_at: float | None = None
    cancelling_at: float | None = None
    cancelled_at: float | None = None

    @property
    def is_ended(self) -> bool:
        return self.state in ENDED

    def object(self) -> dict[str, Any]:
        """OpenAI's Batch object. Source: `openai.types.Batch`."""
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": {"object": "list", "data": [asdict(one) for one in self.errors]} if self.errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.state,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": int(self.created_at),
            "in_progress_at": _whole(self.in_progress_at),
            "expires_at": int(self.expires_at),
            "finalizing_at": _whole(self.finalizing_at),
            "completed_at": _whole(self.completed_at),
            "failed_at": _whole(self.failed_at),
            "expired_at": _whole(self.expired_at),
            "cancelling_at": _whole(self.cancelling_at),
            "cancelled_at": _whole(self.cancelled_at),
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "usage": self.usage.object(),
            "metadata": self.metadata,
        }

    @classmethod
    def decode(cls, batch_id: str, stored: Mapping[bytes, bytes]) -> Batch:
        """From the fields of its hash."""
        text = _texts(stored)
        numbers = {name: int(text.get(name, 0)) for name in ("fence", "total", "completed", "failed")}
        times = {field.name: _seconds(text.get(field.name)) for field in fields(cls) if field.name.endswith("ed_at")}
        times |= {name: _seconds(text.get(name)) for name in ("in_progress_at", "finalizing_at", "cancelling_at")}
        return cls(
            id=batch_id,
            tenant=text["tenant"],
            state=_state(text["state"]),
            endpoint=text["endpoint"],
            input_file_id=text["input_file_id"],
            completion_window=text["completion_window"],
            expires_at=int(text["expires_at"]) / 1_000,
            metadata=orjson.loads(text["metadata"]) if "metadata" in text else None,
            model=text.get("model"),
            usage=Usage(*(int(text.get(field.name, 0)) for field in fields(Usage))),
            errors=tuple(LineError(**one) for one in orjson.loads(text.get("errors", "[]"))),
            output_file_id=text.get("output_file_id"),
            error_file_id=text.get("error_file_id"),
            output_expires_s=int(text["output_expires_s"]) if "output_expires_s" in text else None,
            **numbers,
            **times,  # type: ignore[arg-type]
        )


def _state(text: str) -> BatchState:
    found: BatchState = next(state for state in get_args(BatchState) if state == text)
    return found


def _texts(stored: Mapping[bytes, bytes]) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in stored.items()}


def _seconds(milliseconds: str | None) -> float | None:
    return None if milliseconds is None else int(milliseconds) / 1_000


def _whole(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds)
