"""A child's standard error is read whatever stands in it."""

from __future__ import annotations

import asyncio

from jitney_worker.stack.children import _next_line


async def test_a_line_too_long_to_be_read_is_left_out_and_the_next_ones_are_read() -> None:
    """Unread, it would fill the pipe and block the child."""
    stream = asyncio.StreamReader(limit=64)
    stream.feed_data(b"before\n" + b"x" * 200 + b"\nafter\n")
    stream.feed_eof()
    assert [await _next_line(stream) for _ in range(3)] == [b"before\n", b"after\n", b""]
