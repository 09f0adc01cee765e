"""Writes a run down, line by line, while it happens."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from jitney.errors import SettingsError
from jitney.logs import logger
from jitney_worker.engine.sequence import SequenceId
from jitney_worker.engine.witness import Came, Dropped, Step
from jitney_worker.record.lines import LINE, Began, Entry, Full, Line


class Recorder:
    """Appends to a file: one write of one whole line for each entry, so a killed worker leaves a readable file.

    max_bytes: what a run may write at most; then its record ends with `full`. A disk that fails ends the record, and
    never the run. label: an id of the engine as people know it. Called on the engine's thread alone.
    """

    def __init__(self, path: Path, began: Began, label: Callable[[SequenceId], str], *, max_bytes: int) -> None:
        self._log = logger(part="record", file=str(path))
        self._label = label
        self._began_at = time.monotonic()
        self._num_bytes_left = max_bytes
        try:
            self._file: BinaryIO | None = path.open("ab", buffering=0)
            _claim(self._file, path)
            if path.stat().st_size and not _ends_a_line(path):
                self._file.write(b"\n")  # its last writer was killed in the middle of one
        except OSError as error:
            raise SettingsError(f"worker.record={str(path)!r} cannot be written: {error.strerror}") from None
        self._write(began)

    def keep(self, entry: Came | Dropped | Step) -> None:
        """Write it down, unless the record is over."""
        if isinstance(entry, Came):
            entry = replace(entry, id=self._label(SequenceId(entry.id)))
        self._write(entry)

    def _write(self, entry: Entry) -> None:
        if self._file is None:
            return
        line = LINE.dump_json(Line(round(time.monotonic() - self._began_at, 6), entry)) + b"\n"
        self._num_bytes_left -= len(line)
        if self._num_bytes_left < 0:
            line = LINE.dump_json(Line(round(time.monotonic() - self._began_at, 6), Full())) + b"\n"
            self._log.warning("record_full", hint="raise worker.record_max_bytes to keep more")
        try:
            self._file.write(line)
        except (OSError, ValueError) as error:  # of a file that was closed over a thread that hung
            self._log.error("record_broke", error=repr(error))
            self.close()
        if self._num_bytes_left < 0:
            self.close()

    def close(self) -> None:
        """No more: the engine's thread has ended, or hangs for good."""
        if self._file is not None:
            self._file.close()
        self._file = None


def _claim(file: BinaryIO, path: Path) -> None:
    """Two workers of `jitney up` may be told the same file, and what both wrote would be read as one run."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise SettingsError(
            f"worker.record={str(path)!r} is being written by another worker: give each a file of its own"
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP):  # a file system without locks
            raise


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"
