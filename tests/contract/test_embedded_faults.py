"""Files that a crash or a bad disk left: the embedded server starts with all that is whole, or says what to do."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import redis
from contract_servers import SERVERS, binary_of

from jitney.autopsy import is_full
from jitney.embedded import EmbeddedServer
from jitney.errors import ServerError

NUM_KEYS = 500


@pytest.fixture(params=SERVERS)
def binary(request: pytest.FixtureRequest) -> Path:
    return binary_of(request.param)


@pytest.fixture
def data_dir(binary: Path, tmp_path: Path) -> Path:
    """Of a server that was killed after NUM_KEYS writes."""
    server = EmbeddedServer(tmp_path, binary=binary, tethered=True).start()
    with closing(client_of(server)) as client:
        for number in range(NUM_KEYS):
            client.set(f"k{number}", "v" * 50)
    server.kill()
    return tmp_path


def client_of(server: EmbeddedServer) -> redis.Redis:
    return redis.Redis(port=server.port, password=server.password)


def keys_of(server: EmbeddedServer) -> set[str]:
    with closing(client_of(server)) as client:
        return {name.decode() for name in client.keys("*")}


def aof(data_dir: Path, ending: str) -> Path:
    (file,) = (data_dir / "appendonlydir").glob(f"*{ending}")
    return file


def refusal(data_dir: Path, binary: Path) -> str:
    with pytest.raises(ServerError) as caught:
        EmbeddedServer(data_dir, binary=binary, tethered=True).start()
    return str(caught.value)


def damage(file: Path) -> bytes:
    """Overwrite some of its middle; what it was before."""
    before = file.read_bytes()
    middle = len(before) // 2
    file.write_bytes(before[:middle] + b"\xff" * 40 + before[middle + 40 :])
    return before


def test_a_file_whose_end_is_cut_off_loses_the_last_write_alone(data_dir: Path, binary: Path) -> None:
    file = aof(data_dir, ".incr.aof")
    file.write_bytes(file.read_bytes()[:-5])
    with EmbeddedServer(data_dir, binary=binary, tethered=True) as server:
        assert keys_of(server) == {f"k{number}" for number in range(NUM_KEYS - 1)}


def test_a_damaged_file_is_named_kept_and_mended_by_the_command_that_is_told(data_dir: Path, binary: Path) -> None:
    file = aof(data_dir, ".incr.aof")
    damage(file)
    damaged = file.read_bytes()
    told = refusal(data_dir, binary)
    assert f"its append-only file {file} is damaged" in told
    assert "no empty queue was started in its place" in told
    assert file.read_bytes() == damaged
    command = told.partition("then run: ")[2].partition(" : ")[0]
    mended = subprocess.run(["sh", "-c", command], input="y\n", capture_output=True, text=True, timeout=30)
    assert mended.returncode == 0, mended
    with EmbeddedServer(data_dir, binary=binary, tethered=True) as server:
        kept = keys_of(server)
    assert kept == {f"k{number}" for number in range(len(kept))}, "what came before the damage"
    assert NUM_KEYS // 2 - 5 < len(kept) < NUM_KEYS


def test_a_damaged_base_is_named(data_dir: Path, binary: Path) -> None:
    file = aof(data_dir, ".base.rdb")
    file.write_bytes(b"\xff" * len(file.read_bytes()))
    told = refusal(data_dir, binary)
    assert f"{file} is damaged" in told
    assert "Put it back from a copy" in told


def test_a_missing_file_is_named(data_dir: Path, binary: Path) -> None:
    file = aof(data_dir, ".incr.aof")
    file.rename(data_dir / "elsewhere")
    assert f"{file} is missing" in refusal(data_dir, binary)
    (data_dir / "elsewhere").rename(file)
    with EmbeddedServer(data_dir, binary=binary, tethered=True) as server:
        assert len(keys_of(server)) == NUM_KEYS


def test_a_damaged_list_of_files_is_named(data_dir: Path, binary: Path) -> None:
    file = aof(data_dir, ".manifest")
    file.write_text("not a list\n")
    assert f"{file}, is damaged" in refusal(data_dir, binary)


def test_the_trouble_of_an_earlier_start_is_none_of_this_one(data_dir: Path, binary: Path) -> None:
    file = aof(data_dir, ".incr.aof")
    before = damage(file)
    assert "damaged" in refusal(data_dir, binary)
    file.write_bytes(before)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ServerError) as caught:
        EmbeddedServer(data_dir, binary=binary, port=taken.getsockname()[1], tethered=True).start()
    assert "damaged" not in str(caught.value)
    assert "in use" in str(caught.value)


# --- a full disk ------------------------------------------------------------------------------------------


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """Of 512 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("a small disk cannot be mounted here")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True, timeout=30)


def fill(disk: Path, but: int = 0) -> None:
    with (disk / "filler").open("wb", buffering=0) as filler:
        try:
            while True:
                filler.write(b"x" * 4_096)
        except OSError:
            filler.truncate(max(0, filler.tell() - but))


@pytest.mark.parametrize("but", [0, 4_096, 12_288], ids=["nothing", "one block", "three blocks"])
def test_a_full_disk_is_named_at_the_start(tiny_disk: Path, binary: Path, but: int) -> None:
    fill(tiny_disk, but)
    assert is_full(tiny_disk)
    told = refusal(tiny_disk / "data", binary)
    assert "No space left" in told or "disk of" in told, told
    (tiny_disk / "filler").unlink()
    with EmbeddedServer(tiny_disk / "data", binary=binary, tethered=True) as server:
        assert keys_of(server) == set()
