"""The content of files behind an fsspec URL, such as s3://bucket/jitney. fsspec and its drivers are an extra."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncGenerator, AsyncIterable, Callable
from functools import partial
from typing import Any, BinaryIO, TypeVar, cast

from jitney.errors import JitneyError, SettingsError
from jitney_api.batches.files import StoreUnavailable, check_name, pieces_of
from jitney_api.batches.records import FileUnknown

T = TypeVar("T")


class RemoteStore:
    """Content is gathered in a temporary file and sent in one go: an object store shows it whole, or not at all."""

    def __init__(self, url: str) -> None:
        """Raises SettingsError when the URL's driver is not installed, or nobody knows its scheme."""
        scheme = url.partition("://")[0]
        try:
            from fsspec.core import url_to_fs

            # Other processes put and delete here as well: what was listed once is not believed.
            self._system, root = url_to_fs(url, use_listings_cache=False)
        except ImportError as error:
            raise SettingsError(
                f"batch.files={scheme}://… needs a package that is not installed ({error}): "
                "pip install 'jitney[s3]', or the fsspec driver of that scheme"
            ) from None
        except ValueError as error:
            raise SettingsError(f"batch.files={scheme}://…: {error}") from None
        self._root = str(root).rstrip("/")

    async def put(self, name: str, parts: AsyncIterable[bytes]) -> int:
        path = self._path(name)
        with await self._on_thread(
            lambda: tempfile.NamedTemporaryFile(prefix="jitney-", buffering=0), name
        ) as gathered:
            num_bytes = 0
            async for part in parts:
                num_bytes += await self._on_thread(partial(gathered.write, part), name)
            await self._on_thread(lambda: self._send(gathered.name, path), name)
        return num_bytes

    def read(self, name: str) -> AsyncGenerator[bytes, None]:
        return pieces_of(lambda: asyncio.to_thread(self.open_read, name))

    def open_read(self, name: str) -> BinaryIO:
        return self._guarded(lambda: cast(BinaryIO, self._system.open(self._path(name), "rb")), name)

    async def delete(self, name: str) -> bool:
        try:
            await self._on_thread(lambda: self._system.rm_file(self._path(name)), name)
        except FileUnknown:
            return False
        return True

    async def names(self, folder: str) -> list[str]:
        try:
            paths: list[Any] = await self._on_thread(lambda: self._system.ls(self._path(folder), detail=False), folder)
        except FileUnknown:
            return []
        return sorted(f"{folder}/{str(path).rstrip('/').rpartition('/')[2]}" for path in paths)

    def _path(self, name: str) -> str:
        return f"{self._root}/{check_name(name)}"

    def _send(self, local: str, path: str) -> None:
        self._system.makedirs(path.rpartition("/")[0], exist_ok=True)
        self._system.put_file(local, path)

    async def _on_thread(self, work: Callable[[], T], name: str) -> T:
        return await asyncio.to_thread(self._guarded, work, name)

    def _guarded(self, work: Callable[[], T], name: str) -> T:
        """Raises FileUnknown, or StoreUnavailable for whatever else a driver raises: each has errors of its own."""
        try:
            return work()
        except FileNotFoundError:
            raise FileUnknown(name, what="its content is gone") from None
        except JitneyError:
            raise
        except Exception as error:
            raise StoreUnavailable(f"the store of files does not work: {type(error).__name__}") from error
