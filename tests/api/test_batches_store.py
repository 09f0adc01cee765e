"""Where files lie: a directory and an fsspec URL behave the same; nobody ever reads half of one."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from jitney.errors import SettingsError
from jitney_api.batches.files import PIECE_BYTES, DirectoryStore, FileStore, StoreUnavailable, open_store
from jitney_api.batches.records import FileUnknown
from jitney_api.batches.remote_files import RemoteStore
from jitney_api.batches.settings import BatchSettings


async def parts(*given: bytes) -> AsyncIterator[bytes]:
    for one in given:
        yield one


def parts_left(root: Path) -> list[Path]:
    return list(root.rglob("*.part"))


async def content(store: FileStore, name: str) -> bytes:
    return b"".join([piece async for piece in store.read(name)])


@pytest.fixture(params=["directory", "file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> FileStore:
    place = {
        "directory": str(tmp_path / "a" / "b"),
        "file": f"file://{tmp_path}/c",
        "memory": f"memory://{tmp_path.name}-{os.getpid()}",
    }[request.param]
    return open_store(BatchSettings(files=place))


async def test_batches_content_is_put_whole_replaced_listed_and_deleted(store: FileStore) -> None:
    assert await store.put("file-1", parts(b"ab", b"", b"c")) == 3
    assert await content(store, "file-1") == b"abc"
    with store.open_read("file-1") as file:
        assert file.read() == b"abc"
    await store.put("file-1", parts(b"x" * (2 * PIECE_BYTES + 1)))
    pieces = [piece async for piece in store.read("file-1")]
    assert ([len(piece) for piece in pieces], set(b"".join(pieces))) == ([PIECE_BYTES, PIECE_BYTES, 1], {ord("x")})
    for name in ("batch_x/1-2.jsonl", "batch_x/1-1.jsonl"):
        await store.put(name, parts(b"y"))
    assert await store.names("batch_x") == ["batch_x/1-1.jsonl", "batch_x/1-2.jsonl"]
    assert await store.names("batch_y") == []
    for name in await store.names("batch_x"):
        assert await store.delete(name)
    assert await store.names("batch_x") == []
    assert [await store.delete("file-1"), await store.delete("file-1")] == [True, False]


async def test_batches_content_that_is_not_there_is_said_to_be_gone(store: FileStore) -> None:
    with pytest.raises(FileUnknown, match="its content is gone"):
        await content(store, "file-1")
    with pytest.raises(FileUnknown):
        store.open_read("file-1")


async def test_batches_content_whose_source_breaks_off_leaves_what_was_there(store: FileStore, tmp_path: Path) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"half"
        raise ConnectionError("gone")

    await store.put("file-1", parts(b"before"))
    with pytest.raises(ConnectionError):
        await store.put("file-1", broken())
    assert await content(store, "file-1") == b"before"
    assert parts_left(tmp_path) == []


@pytest.mark.parametrize("name", ["../x", "a/../b", "/etc/passwd", "a/b/c", "", ".", "x\0", "a/.."])
async def test_batches_content_has_no_name_that_leads_elsewhere(store: FileStore, name: str) -> None:
    """A bug of ours: no name comes from outside."""
    with pytest.raises(AssertionError):
        await store.put(name, parts(b"x"))


async def test_batches_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    await DirectoryStore(tmp_path / "new").put("file-1", parts(b"secret"))
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "new" / "file-1").stat().st_mode & 0o777 == 0o600


async def test_batches_store_that_does_not_work_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreUnavailable, match="does not work"):
        await DirectoryStore(tmp_path / "file").put("file-1", parts(b"x"))


def test_batches_urls_that_nothing_here_knows_are_refused_with_what_to_install() -> None:
    with pytest.raises(SettingsError, match=r"batch\.files=nothing://"):
        open_store(BatchSettings(files="nothing://x"))
    with pytest.raises(SettingsError, match=re.escape("pip install 'jitney[s3]'")):
        open_store(BatchSettings(files="s3://bucket/x"))


def test_batches_files_lie_where_jitney_keeps_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JITNEY_DATA_DIR", str(tmp_path))
    assert BatchSettings.load().place == str(tmp_path / "files")
    monkeypatch.setenv("JITNEY_BATCH__FILES", "memory://x")
    assert isinstance(open_store(BatchSettings.load()), RemoteStore)


def test_batches_settings_that_make_no_sense_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITNEY_BATCH__MAX_FILE_BYTES", str(2**40))
    with pytest.raises(SettingsError, match=r"batch\.max_file_bytes.*209715200"):
        BatchSettings.load()
