"""Where the reader of a stream goes on: the URL's cursor, or the id with which a browser reconnects."""

from __future__ import annotations

from starlette.requests import Request

from jitney.errors import InvalidJob


def cursor_of(request: Request, starting_after: int) -> int:
    """Raises InvalidJob for a header that is no seq, or that has seen less than the URL says."""
    header = request.headers.get("last-event-id", "")
    if not header:
        return starting_after
    if not (header.isascii() and header.isdecimal() and len(header) <= 18):
        raise InvalidJob(f"Last-Event-ID {header[:64]!r} is not a seq: a whole number from 0", param="Last-Event-ID")
    seen = int(header)
    if seen < starting_after:
        raise InvalidJob(
            f"Last-Event-ID {seen} lies before starting_after={starting_after}: send one of them", param="Last-Event-ID"
        )
    return seen
