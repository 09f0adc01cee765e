"""Running `jitney` commands as a user does: as programs, with bounded waits."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from jitney.tether import tether

LIVENESS_S = 90.0


class Program:
    """A command in a process of its own; its standard error is read line by line."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self.lines: list[str] = []
        self._fresh: queue.Queue[str | None] = queue.Queue()
        self._program = subprocess.Popen(
            [sys.executable, "-m", "jitney", *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120", **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=tether(signal.SIGKILL),
        )
        self.stdout: list[str] = []
        self._readers = [
            threading.Thread(target=self._read_errors, daemon=True),
            threading.Thread(target=self._read_output, daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        return self._program.pid

    def until_line(self, start: str) -> str:
        """The first line of standard error that starts so."""
        while True:
            line = self._fresh.get(timeout=LIVENESS_S)
            assert line is not None, f"ended before saying {start!r}: {self.lines[-20:]}"
            if line.startswith(start):
                return line

    def terminate(self) -> None:
        self._program.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self._program.kill()

    def wait(self) -> int:
        """The exit code."""
        code = self._program.wait(LIVENESS_S)
        for reader in self._readers:
            reader.join(LIVENESS_S)
        return code

    def _read_errors(self) -> None:
        assert self._program.stderr is not None
        with self._program.stderr as stream:
            for line in stream:
                self.lines.append(line.rstrip())
                self._fresh.put(line.rstrip())
        self._fresh.put(None)

    def _read_output(self) -> None:
        assert self._program.stdout is not None
        with self._program.stdout as stream:
            self.stdout += [line.rstrip("\n") for line in stream]


@contextlib.contextmanager
def program(*arguments: str, environment: Mapping[str, str] | None = None) -> Iterator[Program]:
    """Run it, and see that it is gone afterwards."""
    running = Program(arguments, environment)
    try:
        yield running
    finally:
        running.kill()
        running.wait()


def words(line: str) -> dict[str, str]:
    """`ready a=1 b=2` as {"a": "1", "b": "2"}."""
    return dict(word.split("=", 1) for word in line.split()[1:])


def children_of(pid: int) -> set[int]:
    """Process ids of the living descendants of `pid`. Linux."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found |= {int(child)} | children_of(int(child))
    return found


def is_alive(pid: int) -> bool:
    """True if the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
