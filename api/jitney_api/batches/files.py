"""Where the content of files lies: in a directory, or wherever an fsspec URL leads (remote_files.py).

Names are ids that were made here, or `<batch id>/<fence>-<number>.jsonl`: no part of them is a user's text.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable
from pathlib import Path
from typing import BinaryIO, Final, ParamSpec, Protocol, TypeVar

from jitney.errors import JitneyError
from jitney_api.batches.records import FileUnknown
from jitney_api.batches.settings import BatchSettings

P = ParamSpec("P")
T = TypeVar("T")

PIECE_BYTES: Final = 256 * 1024
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}(/[A-Za-z0-9_.-]{1,64})?")


class StoreUnavailable(JitneyError):
    """The place of the files does not answer, is full, or refuses."""

    type = "service_unavailable_error"
    code = "file_store_unavailable"


class FileStore(Protocol):
    """Content by name. Every method but `open_read` leaves the event loop free. All raise StoreUnavailable."""

    async def put(self, name: str, parts: AsyncIterable[bytes]) -> int:
        """Keep all parts under `name`, in the place of what was there. Returns the number of bytes.

        Nobody ever reads a part of it; when it returns, the content outlives a power cut of this machine.
        """

    def read(self, name: str) -> AsyncGenerator[bytes, None]:
        """The content in pieces of at most PIECE_BYTES. Raises FileUnknown with the first piece."""

    def open_read(self, name: str) -> BinaryIO:
        """The content as a file, for a thread of the caller's own. Raises FileUnknown."""

    async def delete(self, name: str) -> bool:
        """False if there was nothing."""

    async def names(self, folder: str) -> list[str]:
        """What lies in `<folder>/`."""


def open_store(settings: BatchSettings) -> FileStore:
    """The store that the settings name. Raises SettingsError for a URL that nothing here knows."""
    place = settings.place
    if "://" in place and not place.startswith("file://"):
        from jitney_api.batches.remote_files import RemoteStore

        return RemoteStore(place)
    return DirectoryStore(Path(place.removeprefix("file://")).expanduser())


def check_name(name: str) -> str:
    """`name`: an assertion, for no name comes from outside."""
    assert _NAME.fullmatch(name), f"{name[:80]!r} is no name of a stored file"
    assert ".." not in name
    return name


async def pieces_of(opening: Callable[[], Awaitable[BinaryIO]]) -> AsyncGenerator[bytes, None]:
    """The content of a file, read on threads. Whoever does not read to the end closes the generator."""
    file = await opening()
    try:
        while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
            yield piece
    finally:
        file.close()


class DirectoryStore:
    """Files in a directory, made when the first one comes: written aside, synced to disk, then renamed."""

    def __init__(self, root: Path) -> None:
        self._root = root

    async def put(self, name: str, parts: AsyncIterable[bytes]) -> int:
        target = self._root / check_name(name)
        aside = target.with_name(f".{target.name}.{secrets.token_hex(8)}.part")
        num_bytes = 0
        try:
            file = await _on_thread(_create, aside)
            try:
                async for part in parts:
                    await _on_thread(file.write, part)
                    num_bytes += len(part)
                await _on_thread(_sync, file)
            finally:
                file.close()
            await _on_thread(_rename, aside, target)
        except BaseException:
            with contextlib.suppress(OSError):  # it may be what did not work
                aside.unlink(missing_ok=True)
            raise
        return num_bytes

    def read(self, name: str) -> AsyncGenerator[bytes, None]:
        return pieces_of(lambda: _on_thread(self.open_read, name))

    def open_read(self, name: str) -> BinaryIO:
        try:
            return (self._root / check_name(name)).open("rb")
        except FileNotFoundError:
            raise FileUnknown(name, what="its content is gone") from None
        except OSError as error:
            raise _unavailable(error) from error

    async def delete(self, name: str) -> bool:
        return await _on_thread(_unlink, self._root / check_name(name))

    async def names(self, folder: str) -> list[str]:
        return [f"{folder}/{one}" for one in await _on_thread(_listed, self._root / check_name(folder))]


async def _on_thread(work: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Raises StoreUnavailable for what the system says."""
    try:
        return await asyncio.to_thread(work, *arguments, **options)
    except OSError as error:
        raise _unavailable(error) from error


def _unavailable(error: OSError) -> StoreUnavailable:
    return StoreUnavailable(f"the store of files does not work: {error.strerror or type(error).__name__}")


def _create(path: Path) -> BinaryIO:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _rename(aside: Path, target: Path) -> None:
    aside.replace(target)
    # Without it the name may be gone after a power cut, though Redis tells of the file.
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _unlink(path: Path) -> bool:
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    # The folder of a batch goes with its last chunk.
    if path.parent.name.startswith("batch_") and not any(path.parent.iterdir()):
        path.parent.rmdir()
    return True


def _listed(folder: Path) -> list[str]:
    """Those that were given up half-way, too."""
    return sorted(one.name for one in folder.iterdir()) if folder.is_dir() else []
