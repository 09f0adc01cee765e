"""Real processes: started, listened to on their standard error, signalled by pid, and gone at the end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.faults.ledger import Ledger

from jitney.tether import tether

PATIENCE_S = 240.0
"""What takes so long hangs: this is no measure of speed, on any machine."""

ROOT = Path(__file__).parent.parent.parent


class Child:
    """One process. Its lines go to the ledger as well."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, ledger: Ledger) -> None:
        self.name = name
        self.lines: list[str] = []
        self._process = process
        self._ledger = ledger
        self._news = asyncio.Condition()
        self._is_over = False
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(
        cls, name: str, *arguments: str, ledger: Ledger, environment: Mapping[str, str] | None = None
    ) -> Child:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            *arguments,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            preexec_fn=tether(signal.SIGKILL),
            limit=1 << 20,
        )
        return cls(name, process, ledger)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    async def until(self, start: str, *, count: int = 1) -> str:
        """The `count`-th line that starts so."""
        return await self.until_any(lambda line: line.startswith(start), count=count, what=start)

    async def until_any(
        self,
        wanted: Callable[[str], bool],
        *,
        count: int = 1,
        what: str = "a line",
    ) -> str:
        async with asyncio.timeout(PATIENCE_S), self._news:
            while len(found := [line for line in self.lines if wanted(line)]) < count:
                assert not self._is_over, f"{self.name} ended before it said {what!r}: {self.lines[-10:]}"
                await self._news.wait()
        return found[count - 1] if count else ""

    async def ended_or_says(self, part: str) -> None:
        """Until it has ended, or a line of it holds `part`."""
        async with self._news:
            await self._news.wait_for(lambda: self._is_over or any(part in line for line in self.lines))

    def said(self, start: str) -> list[str]:
        return [line for line in self.lines if line.startswith(start)]

    def send(self, number: signal.Signals) -> None:
        self._ledger.fault(f"{number.name} {self.name}")
        self._process.send_signal(number)

    async def ended(self) -> int:
        """The exit code; minus the signal's number for one that was killed."""
        async with asyncio.timeout(PATIENCE_S):
            code = await self._process.wait()
            await asyncio.wait([self._reading])
        return code

    async def finish_off(self) -> None:
        """Gone, however it stands; a stopped one too."""
        if self._process.returncode is None:
            self._process.kill()
        await self.ended()

    async def _read(self) -> None:
        assert self._process.stderr is not None
        async for raw in self._process.stderr:
            line = raw.decode(errors="replace").rstrip()
            if line.startswith("at ") and not line.endswith(" say"):
                self._ledger.fault(f"{self.name} {line}")
            else:
                self._ledger.add("worker", text=f"{self.name}: {line}")
            async with self._news:
                self.lines.append(line)
                self._news.notify_all()
        async with self._news:
            self._is_over = True
            self._news.notify_all()
