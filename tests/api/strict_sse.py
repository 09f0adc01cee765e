"""A strict reader of server-sent events: what the standard says, and nothing beside it.

Source: HTML Living Standard, 9.2.6, "Interpreting an event stream".
"""

from __future__ import annotations

from typing import NamedTuple


class Dispatched(NamedTuple):
    """One event as a browser hands it to a page. id: the last event id in force."""

    id: str
    data: str


def dispatched(body: bytes) -> list[Dispatched]:
    """The events of a whole stream. AssertionError for whatever a reader would have to guess at."""
    found, last_id, data = list[Dispatched](), "", list[str]()
    assert body.endswith(b"\n\n"), "cut off within an event"
    assert b"\r" not in body, "two kinds of line ends"
    for line in body.decode("utf-8", "strict").removesuffix("\n").split("\n"):
        name, colon, value = line.partition(":")
        if not line:
            if data:
                found.append(Dispatched(last_id, "\n".join(data)))
            data = []
        elif name:
            assert colon + value[:1] == ": ", f"no value: {line!r}"
            assert name in ("id", "data"), f"unknown field: {line!r}"
            if name == "data":
                data.append(value[1:])
            else:
                assert value[1:].isdecimal(), f"an id must be a seq: {line!r}"
                assert not data, f"an id must stand before its data: {line!r}"
                assert int(value) > int(last_id or 0), f"ids must grow: {line!r}"
                last_id = value[1:]
    assert not data, "cut off within an event"
    return found
