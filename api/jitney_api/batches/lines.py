"""The lines of an input file, each a request or what is wrong with it. A file is never held as a whole."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final, Protocol

from jitney.errors import InvalidJob
from jitney.messages import MAX_BODY_BYTES
from jitney_api.batches.records import MAX_FILE_BYTES, MAX_LINES, LineError
from jitney_api.batches.requests import ENDPOINTS, LineRequest, read_request
from jitney_api.edge import parse_object
from jitney_api.failures import MAX_ECHO_CHARS

MAX_LINE_BYTES: Final = MAX_BODY_BYTES + 4_096
"""A body as large as the API takes it, and what stands around it."""

MAX_CUSTOM_ID_CHARS: Final = 512
BLOCK_LINES: Final = 64
BLOCK_BYTES: Final = 1 << 20
"""What is read and checked at once on another thread ends with the first of the two."""

_BOM: Final = b"\xef\xbb\xbf"
_MEMBERS: Final = ("custom_id", "method", "url", "body")


@dataclass(frozen=True, slots=True)
class Line:
    """A line that can be worked on. number: counted from 1, as editors do, empty lines included."""

    number: int
    custom_id: str
    request: LineRequest
    num_bytes: int


class Readable(Protocol):
    """A binary file, as far as it is read here."""

    def readline(self, size: int, /) -> bytes: ...


def _nothing_is_done(_number: int) -> bool:
    return False


class LineReader:
    """Reads one file from its beginning to its end, once.

    endpoint: the url that every line must name; None: any that a batch may be for. model: of bodies that name none.
    is_done: lines (by number) that are passed over unread.
    """

    def __init__(
        self,
        file: Readable,
        *,
        endpoint: str | None,
        model: str | None = None,
        is_done: Callable[[int], bool] = _nothing_is_done,
        max_lines: int = MAX_LINES,
    ) -> None:
        self._file = file
        self._endpoint = endpoint
        self._model = model
        self._is_done = is_done
        self._max_lines = max_lines
        self._seen: set[bytes] = set()
        self.num_lines = 0
        """Those that are not empty, so far."""

    def __iter__(self) -> Iterator[Line | LineError]:
        num_bytes = 0
        for number in itertools.count(1):
            raw = self._file.readline(MAX_LINE_BYTES + 1)
            num_bytes += len(raw)
            if not raw:
                break
            if len(raw) > MAX_LINE_BYTES and not raw.endswith(b"\n"):
                num_bytes += self._pass_over_rest()
            if num_bytes > MAX_FILE_BYTES:
                yield LineError("file_too_large", f"the file is larger than {MAX_FILE_BYTES} bytes: split it")
                return
            if raw.isspace():
                continue
            self.num_lines += 1
            if self.num_lines > self._max_lines:
                yield LineError("too_many_lines", f"the file has more than {self._max_lines} lines: split it", number)
                return
            if not self._is_done(number):
                yield self._read(raw.removeprefix(_BOM) if number == 1 else raw, number)
        if not self.num_lines:
            yield LineError("empty_file", "the file has no line: write one request a line, as JSON")

    def _pass_over_rest(self) -> int:
        """The rest of a line that is too long anyway; its size."""
        num_bytes = 0
        while piece := self._file.readline(MAX_LINE_BYTES):
            num_bytes += len(piece)
            if piece.endswith(b"\n") or num_bytes > MAX_FILE_BYTES:
                break
        return num_bytes

    def _read(self, raw: bytes, number: int) -> Line | LineError:
        try:
            return self._line(raw, number)
        except InvalidJob as error:
            return LineError(str(error.code), str(error), number, error.param)

    def _line(self, raw: bytes, number: int) -> Line:
        if len(raw) > MAX_LINE_BYTES:
            raise InvalidJob(f"the line is larger than {MAX_LINE_BYTES} bytes", code="line_too_large")
        fields = _object(raw)
        for name in _MEMBERS:
            if name not in fields:
                raise InvalidJob(f"{name} is required", param=name, code="missing_required_parameter")
        custom_id = self._new_custom_id(fields["custom_id"])
        if fields["method"] != "POST":
            raise InvalidJob(f"method must be POST (given: {_shown(fields['method'])})", param="method")
        url = self._url(fields["url"])
        body = fields["body"]
        if not isinstance(body, dict):
            raise InvalidJob(f"body must be an object (given: {_shown(body)})", param="body")
        given = {name: value for name, value in body.items() if value is not None}
        if self._model is not None:
            given.setdefault("model", self._model)
        try:
            return Line(number, custom_id, read_request(url, given), len(raw))
        except InvalidJob as error:
            raise of_body(error) from None

    def _new_custom_id(self, given: Any) -> str:
        if not isinstance(given, str) or not 0 < len(given) <= MAX_CUSTOM_ID_CHARS:
            raise InvalidJob(
                f"custom_id must be a string of 1 to {MAX_CUSTOM_ID_CHARS} characters (given: {_shown(given)})",
                param="custom_id",
            )
        digest = blake2b(given.encode(), digest_size=16).digest()  # fifty thousand long names are many megabytes
        if digest in self._seen:
            raise InvalidJob(
                f"custom_id {_shown(given)} stands in an earlier line too: make each unique",
                param="custom_id",
                code="duplicate_custom_id",
            )
        self._seen.add(digest)
        return given

    def _url(self, given: Any) -> str:
        allowed = list(ENDPOINTS) if self._endpoint is None else [self._endpoint]
        if given not in allowed:
            wanted = allowed[0] if len(allowed) == 1 else f"one of {', '.join(allowed)}"
            whose = "" if self._endpoint is None else ", as the batch's endpoint is"
            raise InvalidJob(
                f"url must be {wanted}{whose} (given: {_shown(given)})", param="url", code="mismatched_endpoint"
            )
        return str(given)


def of_body(error: InvalidJob) -> InvalidJob:
    """A complaint about a field of the body, named by its place in the line."""
    where = "body" if error.param is None else f"body.{error.param}"
    return InvalidJob(str(error), param=where, code=error.code)


def _object(raw: bytes) -> dict[str, Any]:
    try:
        return parse_object(raw, what="the line")
    except InvalidJob as error:
        raise InvalidJob(str(error), code="invalid_json_line") from None


def _shown(value: Any) -> str:
    """A value of a stranger's in a message: never the whole of it."""
    text = repr(value)
    return text if len(text) <= MAX_ECHO_CHARS else f"{text[:MAX_ECHO_CHARS]}..."


async def in_blocks(ones: Iterable[Line | LineError]) -> AsyncGenerator[Line | LineError, None]:
    """Lines from an iterable that reads and parses, taken from it on other threads, a block at a time."""
    left = iter(ones)
    while block := await asyncio.to_thread(_block, left):
        for one in block:
            yield one


def _block(left: Iterator[Line | LineError]) -> list[Line | LineError]:
    block: list[Line | LineError] = []
    num_bytes = 0
    for one in left:
        block.append(one)
        num_bytes += one.num_bytes if isinstance(one, Line) else 0
        if len(block) == BLOCK_LINES or num_bytes >= BLOCK_BYTES:
            break
    return block
