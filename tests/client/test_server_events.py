"""Server-sent events: the same frames, wherever the bytes were cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitney.server_events import Frame, Frames

STREAM = (
    b': keep-alive\n\nid: 1\ndata: {"a":1}\n\nid: 2\r\ndata: x\r\ndata:y\r\n\r\n\n\n'
    b'data: {"error":{}}\n\nid: 3\ndata: cut'
)
FRAMES = [
    Frame(None, has_id=False),
    Frame(b'{"a":1}', has_id=True),
    Frame(b"x\ny", has_id=True),
    Frame(b'{"error":{}}', has_id=False),
]


@given(st.lists(st.integers(0, len(STREAM))))
def test_frames_are_the_same_however_the_stream_was_cut(cuts: list[int]) -> None:
    frames, found = Frames(), list[Frame]()
    edges = [0, *sorted(cuts), len(STREAM)]
    for start, end in itertools.pairwise(edges):
        found += frames.feed(STREAM[start:end])
    assert found == FRAMES


@pytest.mark.parametrize("incomplete", [b"id: 3\ndata: whole line\n", b"id: 3\ndata: ", b": ", b""])
def test_what_the_end_cut_off_is_no_frame(incomplete: bytes) -> None:
    frames = Frames()
    assert frames.feed(b"data: a\n\n" + incomplete) == [Frame(b"a", has_id=False)]


def test_a_bare_carriage_return_and_spaces_belong_to_the_data() -> None:
    assert Frames().feed(b"data:  a\rb \n\n") == [Frame(b" a\rb ", has_id=False)]
