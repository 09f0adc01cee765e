"""Lines of an input file: each is a request, or an error that names its line and what is wrong with it."""

from __future__ import annotations

import io
from typing import Any

import orjson
import pytest

from jitney_api.batches import lines as lines_module
from jitney_api.batches.lines import MAX_CUSTOM_ID_CHARS, MAX_LINE_BYTES, Line, LineReader, in_blocks
from jitney_api.batches.records import MAX_FILE_BYTES, LineError

CHAT = "/v1/chat/completions"
SAID = [{"role": "user", "content": "hello"}]


def a_line(custom_id: Any = "a", *, body: dict[str, Any] | None = None, **fields: Any) -> bytes:
    """A good line with the fields given."""
    whole = {
        "custom_id": custom_id,
        "method": "POST",
        "url": CHAT,
        "body": {"model": "m", "messages": SAID} | (body or {}),
    } | fields
    return orjson.dumps(whole) + b"\n"


def read(*lines: bytes, **options: Any) -> list[Line | LineError]:
    return list(LineReader(io.BytesIO(b"".join(lines)), **{"endpoint": CHAT, **options}))


def errors(*lines: bytes, **options: Any) -> list[tuple[int | None, str, str | None]]:
    found = read(*lines, **options)
    return [(one.line, one.code, one.param) for one in found if isinstance(one, LineError)]


def test_lines_keep_their_numbers_and_empty_ones_count_but_are_no_requests() -> None:
    found = read(a_line("a"), b"\n", b"  \r\n", a_line("b").rstrip() + b"\r\n", a_line("c").rstrip())
    assert [(one.number, one.custom_id) for one in found if isinstance(one, Line)] == [(1, "a"), (4, "b"), (5, "c")]
    assert len(found) == 3


def test_a_byte_order_mark_is_no_error() -> None:
    assert errors(b"\xef\xbb\xbf" + a_line()) == []


@pytest.mark.parametrize(
    ("line", "code", "param"),
    [
        (b"{broken\n", "invalid_json_line", None),
        (b"[1]\n", "invalid_json_line", None),
        (b"[" * 200 + b"]" * 200 + b"\n", "invalid_json_line", None),
        (b'{"custom_id": "\xff"}\n', "invalid_json_line", None),
        (a_line(None), "missing_required_parameter", "custom_id"),
        (a_line(7), "invalid_value", "custom_id"),
        (a_line(""), "invalid_value", "custom_id"),
        (a_line("x" * (MAX_CUSTOM_ID_CHARS + 1)), "invalid_value", "custom_id"),
        (a_line(method="GET"), "invalid_value", "method"),
        (a_line(url="/v1/completions"), "mismatched_endpoint", "url"),
        (a_line(url=["/v1/completions"]), "mismatched_endpoint", "url"),
        (a_line(body=None).replace(b'"body":{', b'"nobody":{'), "missing_required_parameter", "body"),
        (orjson.dumps({"custom_id": "a", "method": "POST", "url": CHAT, "body": []}) + b"\n", "invalid_value", "body"),
        (a_line(body={"stream": True}), "unsupported_parameter", "body.stream"),
        (a_line(body={"model": None}), "missing_field", "body.model"),
        (a_line(body={"n": 0}), "invalid_value", "body.n"),
        (a_line(body={"messages": [{"role": "user"}]}), "invalid_value", "body.messages.0"),
        (a_line(body={"band": "interactive"}), "unsupported_parameter", "body.band"),
        (a_line(body={"idempotency_key": "k"}), "unsupported_parameter", "body.idempotency_key"),
        (a_line(body={"logits_processors": ["x"]}), "unsupported_parameter", "body.logits_processors"),
        (a_line("b" * (MAX_LINE_BYTES + 1)), "line_too_large", None),
    ],
)
def test_what_is_wrong_with_a_line_is_named_with_its_number(line: bytes, code: str, param: str | None) -> None:
    assert errors(a_line("first"), line, a_line("last")) == [(2, code, param)]


def test_a_custom_id_stands_once_in_a_file() -> None:
    assert errors(a_line("a"), a_line("b"), a_line("a")) == [(3, "duplicate_custom_id", "custom_id")]


def test_every_bad_line_is_told_not_only_the_first() -> None:
    assert [line for line, _, _ in errors(b"x\n", a_line("a"), b"y\n", b"z\n")] == [1, 3, 4]


def test_a_message_shows_a_part_of_what_was_given() -> None:
    (found,) = [one for one in read(a_line("a", url="u" * 5_000)) if isinstance(one, LineError)]
    assert len(found.message) < 300


def test_a_file_without_lines_is_an_error() -> None:
    assert errors(b"") == errors(b"\n\n") == [(None, "empty_file", None)]


def test_a_file_has_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    four = [a_line("a"), b"\n", a_line("b"), a_line("c"), a_line("d")]
    assert errors(*four, max_lines=2) == [(4, "too_many_lines", None)]
    monkeypatch.setattr(lines_module, "MAX_FILE_BYTES", 200)
    assert errors(a_line("a"), a_line("b")) == [(None, "file_too_large", None)]


def test_a_line_without_end_is_never_held_as_a_whole() -> None:
    class Endless(io.RawIOBase):
        largest = num_bytes = 0

        def readline(self, size: int | None = -1, /) -> bytes:  # type: ignore[override]
            assert size
            self.largest = max(self.largest, size)
            self.num_bytes += size
            return b"x" * size

    endless = Endless()
    (error,) = list(LineReader(endless, endpoint=CHAT))
    assert isinstance(error, LineError)
    assert error.code == "file_too_large"
    assert endless.largest <= MAX_LINE_BYTES + 1
    assert endless.num_bytes <= MAX_FILE_BYTES + 2 * MAX_LINE_BYTES


def test_lines_that_are_done_are_passed_over_and_counted() -> None:
    reader = LineReader(io.BytesIO(a_line("a") + b"broken\n" + a_line("c")), endpoint=CHAT, is_done={1, 2}.__contains__)
    assert [one.custom_id for one in reader if isinstance(one, Line)] == ["c"]
    assert reader.num_lines == 3


def test_bodies_without_a_model_take_the_one_given() -> None:
    line = a_line(body={"model": None})
    (found,) = read(line, model="other")
    assert isinstance(found, Line)
    assert found.request.model == "other"
    (found,) = read(a_line(), model="other")
    assert isinstance(found, Line)
    assert found.request.model == "m"


def test_each_endpoint_reads_its_own_bodies() -> None:
    completion = a_line(url="/v1/completions", body={"prompt": "once", "messages": None})
    embedding = a_line("b", url="/v1/embeddings", body={"input": ["x", "y"], "messages": None})
    first, second = read(completion, embedding, endpoint=None)
    assert isinstance(first, Line)
    assert isinstance(second, Line)
    assert [spec.prompt for spec in first.request.specs] == ["once"]
    assert [spec.prompt for spec in second.request.specs] == ["x", "y"]


async def test_blocks_are_read_on_other_threads_and_nothing_is_lost() -> None:
    reader = LineReader(io.BytesIO(b"".join(a_line(f"line {n}") for n in range(500))), endpoint=CHAT)
    assert [one.custom_id async for one in in_blocks(reader) if isinstance(one, Line)] == [
        f"line {n}" for n in range(500)
    ]


async def test_of_large_lines_few_are_read_ahead() -> None:
    large = [a_line(f"line {n}", body={"user": "x" * 600_000}) for n in range(20)]
    file = io.BytesIO(b"".join(large))
    ones = in_blocks(LineReader(file, endpoint=CHAT))
    await anext(ones)
    assert file.tell() == len(large[0]) + len(large[1])
    await ones.aclose()
