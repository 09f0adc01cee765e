"""The two files of `jitney batch run`: what they hold is what is done, whoever was killed while writing them.

Beside the output file stands `<name>.run` for as long as the run is not complete: which run it is, and of which input.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, Final

import orjson

from jitney.errors import SettingsError
from jitney_api.batches.output import Outcome

RUN_SUFFIX: Final = ".run"


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one input. id: what the idempotency keys of its lines begin with. digest: SHA-256 of the input."""

    id: str
    digest: str


class OutputFile:
    """JSON lines that are only ever added to, by one process at a time. Raises SettingsError where it is another's."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.exists() and not path.is_file() and not path.is_dir():
            raise SettingsError(
                f"cannot write {path}: it is a pipe or a device, and what is done must be kept in a file"
            )
        try:
            self._file: BinaryIO = path.open("a+b")
        except OSError as error:
            raise SettingsError(f"cannot write {path}: {error.strerror}") from None
        if not _is_ours(self._file):
            self._file.close()
            raise SettingsError(f"{path} is being written by another run: wait for it, or name another file")

    def held(self) -> list[str]:
        """The custom ids of its lines. A last line that was torn off is cut away.

        Raises SettingsError for a line that no run has written.
        """
        self._file.seek(0)
        ids, end = [], 0
        for number, raw in enumerate(self._file, 1):
            if not raw.endswith(b"\n"):
                break
            ids.append(self._custom_id(raw, number))
            end += len(raw)
        self._file.truncate(end)
        return ids

    def _custom_id(self, raw: bytes, number: int) -> str:
        try:
            custom_id = orjson.loads(raw)["custom_id"]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            custom_id = None
        if not isinstance(custom_id, str):
            raise SettingsError(f"{self.path} holds something else in line {number}: name another file, or remove it")
        return custom_id

    def clear(self) -> None:
        self._file.truncate(0)

    def add(self, outcomes: Sequence[Outcome]) -> None:
        """On disk when it returns. Raises SettingsError where there is no room."""
        if not outcomes:
            return
        try:
            self._file.write(b"".join(outcome.text for outcome in outcomes))
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise SettingsError(
                f"cannot write {self.path}: {error.strerror}; once that is mended, the same command goes on from here"
            ) from None

    def close(self, *, keep_empty: bool) -> None:
        is_empty = self.path.stat().st_size == 0
        with contextlib.suppress(OSError):  # what found no room is tried once more, and was told already
            self._file.close()
        if is_empty and not keep_empty:
            self.path.unlink()


def begin(output: Path, digest: str) -> tuple[Run, bool]:
    """The run that writes `output`, and whether it had begun before. Raises SettingsError if that was of another input.

    It is on disk before the first line comes in: whoever is killed then finds his jobs again.
    """
    path = _run_path(output)
    try:
        found: Any = json.loads(path.read_bytes())
        run = Run(found["id"], found["digest"])
    except FileNotFoundError:
        run = Run(f"run_{secrets.token_hex(12)}", digest)
        _write(path, orjson.dumps({"id": run.id, "digest": run.digest}))
        return run, False
    except (ValueError, KeyError, TypeError):
        raise SettingsError(f"{path} is damaged: remove it, and what {output} holds is kept") from None
    if run.digest != digest:
        raise SettingsError(
            f"{output} belongs to a run of another input that is not complete ({path}): "
            "name another output, or remove both"
        )
    return run, True


def complete(output: Path) -> None:
    """Every line has its outcome: the next run of the same name is a new one."""
    _run_path(output).unlink(missing_ok=True)


def _run_path(output: Path) -> Path:
    return output.with_name(output.name + RUN_SUFFIX)


def _write(path: Path, data: bytes) -> None:
    """Whole or not at all."""
    new = path.with_name(path.name + ".new")
    with new.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def _is_ours(file: IO[bytes]) -> bool:
    """Until the process ends, however it ends. False if another one has it."""
    if sys.platform == "win32":
        return True
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
