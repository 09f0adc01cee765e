"""An upload as it comes in: multipart/form-data, to a temporary file on disk, bounded in size and time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any, Final

from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from jitney.errors import InvalidJob
from jitney_api.batches.files import PIECE_BYTES, StoreUnavailable
from jitney_api.batches.schemas import ExpiresAfter
from jitney_api.batches.settings import BatchSettings
from jitney_api.failures import BadBody
from jitney_api.schemas import parse

FRAMING_BYTES: Final = 65_536
"""What a form may have besides the file: boundaries, names, the other fields."""

MAX_FIELDS: Final = 16
MAX_FIELD_BYTES: Final = 4_096
MAX_FILENAME_CHARS: Final = 255

_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"


@dataclass(frozen=True, slots=True)
class Upload:
    """What was sent. life_s: of `expires_after`; None where nothing was said of it."""

    filename: str
    num_bytes: int
    life_s: int | None
    _file: UploadFile

    async def parts(self) -> AsyncIterator[bytes]:
        """The content, once."""
        while part := await self._file.read(PIECE_BYTES):
            yield part


@contextlib.asynccontextmanager
async def received(request: Request, settings: BatchSettings) -> AsyncIterator[Upload]:
    """The whole form of the request; its file is gone behind the block.

    Raises InvalidJob that names the field; BadBody: 413, 408, 415, or 400 for what is no form; StoreUnavailable.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "multipart/form-data":
        raise BadBody("send content-type: multipart/form-data", code="unsupported_media_type")
    form = await _form_of(request, settings)
    try:
        yield _upload_of(form, settings.max_file_bytes)
    finally:
        await form.close()


class _WholeForm(MultiPartParser):
    """Starlette's parser takes a form that breaks off, says nothing, and leaves its temporary file open."""

    is_whole = False

    def on_end(self) -> None:
        self.is_whole = True

    async def parse(self) -> FormData:
        form = await super().parse()
        if not self.is_whole:
            for file in self._files_to_close_on_error:
                file.close()
            raise MultiPartException("it breaks off before its last boundary")
        return form


async def _form_of(request: Request, settings: BatchSettings) -> FormData:
    stream = _at_most(request, settings.max_file_bytes)
    parser = _WholeForm(request.headers, stream, max_files=1, max_fields=MAX_FIELDS, max_part_size=MAX_FIELD_BYTES)
    try:
        async with asyncio.timeout(settings.upload_timeout_s):
            return await parser.parse()
    except TimeoutError:
        slow = f"the upload took longer than {settings.upload_timeout_s:g} s"
        raise BadBody(slow, code="body_too_slow") from None
    except OSError as error:
        raise StoreUnavailable(f"no room for the upload: {error.strerror or type(error).__name__}") from error
    except MultiPartException as error:
        raise BadBody(f"the body is no form: {error.message}", code="invalid_form") from None


async def _at_most(request: Request, max_bytes: int) -> AsyncGenerator[bytes, None]:
    """The body as it comes. What the length header claims is believed only when it is already too much."""
    allowed = max_bytes + FRAMING_BYTES
    claimed = request.headers.get("content-length", "")
    if claimed.isdecimal() and int(claimed) > allowed:
        raise _too_large(max_bytes)
    num_bytes = 0
    async for piece in request.stream():
        num_bytes += len(piece)
        if num_bytes > allowed:
            raise _too_large(max_bytes)
        yield piece


def _too_large(max_bytes: int) -> BadBody:
    return BadBody(f"the file is larger than {max_bytes} bytes: split it", code="body_too_large")


def _upload_of(form: FormData, max_bytes: int) -> Upload:
    file = form.get("file")
    if file is None:
        raise InvalidJob("file is required", param="file", code="missing_field")
    if not isinstance(file, UploadFile):
        raise InvalidJob("file must be sent as a file, with a filename", param="file")
    _check_purpose(form)
    if not file.size:
        raise InvalidJob("file is empty; one request on each line is expected", param="file")
    if file.size > max_bytes:
        raise _too_large(max_bytes)
    return Upload(_shown(file.filename or ""), file.size, _life_of(form), file)


def _check_purpose(form: FormData) -> None:
    purpose = form.get("purpose")
    if purpose is None:
        raise InvalidJob("purpose is required; send purpose=batch", param="purpose", code="missing_field")
    if purpose != "batch":
        given = _shown(str(purpose))[:64]
        raise InvalidJob(f"purpose must be batch: no other files are kept here (given: {given!r})", param="purpose")


def _life_of(form: FormData) -> int | None:
    given: dict[str, Any] = {
        name: form[field] for name, field in (("anchor", _ANCHOR), ("seconds", _SECONDS)) if field in form
    }
    if not given:
        return None
    seconds = given.get("seconds")
    if isinstance(seconds, str) and seconds.isascii() and seconds.isdecimal() and len(seconds) < 16:
        given["seconds"] = int(seconds)
    given = {name: _shown(value) if isinstance(value, str) else value for name, value in given.items()}
    try:
        return parse(ExpiresAfter, given).seconds
    except InvalidJob as error:
        raise InvalidJob(f"expires_after.{error}", param=f"expires_after.{error.param}", code=error.code) from None


def _shown(text: str) -> str:
    """As it can be told again: a form may name an encoding that makes halves of characters."""
    return text.encode("utf-8", "replace").decode()[:MAX_FILENAME_CHARS]
