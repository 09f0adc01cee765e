"""What became of a line, as it stands in the output or the error file. OpenAI's shape, one JSON object a line.

Source: OpenAI, "The request output object", Batch API reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final, Literal

import orjson

from jitney.errors import JitneyError, JobEnded
from jitney_api.batches.lines import Line
from jitney_api.batches.records import Usage
from jitney_api.failures import error_body, status_of, wire_of

NO_USAGE: Final = Usage()
Ending = Literal["answered", "failed", "not_run"]
NotRun = Literal["batch_expired", "batch_cancelled"]

_WORDS: Final[dict[NotRun, str]] = {
    "batch_expired": "This request could not be executed before the completion window expired.",
    "batch_cancelled": "This request was not executed before the batch was cancelled.",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """A line of an output file (`answered`) or of an error file. text: with its line end."""

    number: int
    ending: Ending
    text: bytes
    usage: Usage = NO_USAGE


def answered(batch_id: str, line: Line, job_id: str, body: bytes, usage: Usage) -> Outcome:
    """A line that has its answer: the body that the API would have sent."""
    text = _line(batch_id, line, response=_response(200, job_id, body))
    return Outcome(line.number, "answered", text, usage)


def failed(batch_id: str, line: Line, error: JitneyError) -> Outcome:
    """A line that the API would have answered with an error. The request's id is the job's where there was one."""
    wire = wire_of(error)
    request_id = error.job_id if isinstance(error, JobEnded) else f"req_{_digest(batch_id, line)}"
    text = _line(batch_id, line, response=_response(status_of(wire), request_id, error_body(wire)))
    return Outcome(line.number, "failed", text)


def not_run(batch_id: str, line: Line, why: NotRun) -> Outcome:
    """A line that nobody has answered, because the batch ended first."""
    return Outcome(line.number, "not_run", _line(batch_id, line, error={"code": why, "message": _WORDS[why]}))


def _response(status: int, request_id: str, body: bytes) -> dict[str, Any]:
    return {"status_code": status, "request_id": request_id, "body": orjson.Fragment(body)}


def _line(
    batch_id: str, line: Line, *, response: dict[str, Any] | None = None, error: dict[str, str] | None = None
) -> bytes:
    """The id is the same whoever writes the line: it may be written twice before it counts once."""
    fields = {
        "id": f"batch_req_{_digest(batch_id, line)}",
        "custom_id": line.custom_id,
        "response": response,
        "error": error,
    }
    return orjson.dumps(fields, option=orjson.OPT_APPEND_NEWLINE)


def _digest(batch_id: str, line: Line) -> str:
    return sha256(f"{batch_id}-{line.number}".encode()).hexdigest()[:24]
