"""Why an embedded server did not start, and what to do: its log in plain words."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Final

LAST_WORDS: Final = 400
AOF_DIR: Final = "appendonlydir"
LEAST_FREE_BYTES: Final = 1 << 20

_DAMAGED = re.compile(
    r"(?:Bad file format reading the append only file"
    r"|Unexpected end of file reading the append only file"
    r"|Error reading the RDB preamble of the append only file"
    r"|Unrecoverable error reading the append only file) (\S+?)[:,.]?\s"
)
_MISSING = re.compile(r"Unable to obtain the AOF file (\S+) length|The AOF file (\S+) doesn't exist")


def why_it_ended(log: str, data_dir: Path, binary: Path) -> str:
    """One sentence or two. log: what the server said since it was launched. binary: the server's own."""
    folder = data_dir.resolve() / AOF_DIR
    if damaged := _DAMAGED.search(log):
        return _damaged(folder / damaged[1], binary)
    if missing := _MISSING.search(log):
        return f"its append-only file {folder / (missing[1] or missing[2])} is missing: put it back from a copy"
    if "FATAL AOF MANIFEST FILE ERROR" in log:
        return f"the list of its append-only files, {_manifest(folder)}, is damaged: put it back from a copy"
    if "No space left on device" in log or is_full(data_dir):
        return f"the disk of {data_dir} is full: make room there, or give another data directory"
    return log[-LAST_WORDS:].strip() or "it said nothing"


def is_full(data_dir: Path) -> bool:
    """Less is left than a server needs to write its first words."""
    try:
        return shutil.disk_usage(data_dir).free < LEAST_FREE_BYTES
    except OSError:
        return False


def _damaged(file: Path, binary: Path) -> str:
    found = f"its append-only file {file} is damaged. Nothing was changed, and no empty queue was started in its place"
    if file != max(file.parent.glob("*.incr.aof"), key=_number, default=None):
        return f"{found}. Put it back from a copy: what follows it was written on top of it, so it cannot be cut"
    return (
        f"{found}. Copy {file.parent}, then run: {repair_command(binary, file)} : it cuts the file where the damage "
        f"begins, and what was written after that is lost"
    )


def _number(file: Path) -> int:
    """Of `appendonly.aof.<number>.incr.aof`."""
    number = file.name.split(".")[-3]
    return int(number) if number.isdigit() else 0


def repair_command(binary: Path, file: Path) -> str:
    """What a shell takes. The server's binary is the checker too, under the checker's name.

    For the file alone: given the whole list, the checker of Valkey 9.1 takes its base for damaged.
    """
    path = binary.absolute()  # not resolved: distributions make one binary of all, and tell them apart by their links
    checker = path.with_name(path.name.replace("-server", "-check-aof"))
    if checker.is_file():
        return f"{checker} --fix {file}"
    return f"bash -c 'exec -a {checker.name} {path} --fix {file}'"


def _manifest(folder: Path) -> Path:
    return next(iter(sorted(folder.glob("*.manifest"))), folder / "appendonly.aof.manifest")
