"""One child program: started, waited for until it says `ready`, ended. Its other words are passed on."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections import deque
from collections.abc import Mapping, Sequence

from jitney.errors import ServerError
from jitney.tasks import end_tasks
from jitney.tether import tether

NUM_LAST_LINES = 12
LAST_WORDS_S = 1.0


class Child:
    """A command of ours in a process of its own. Ends with this process, however this one ends.

    module: what Python runs with these arguments.
    """

    def __init__(
        self, name: str, arguments: Sequence[str], environment: Mapping[str, str], *, module: str = "jitney"
    ) -> None:
        self.name = name
        self._module, self._arguments = module, tuple(arguments)
        self._environment = dict(environment)
        self._ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        self._program: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None

    def anew(self) -> Child:
        """Another one like this, not started yet."""
        return Child(self.name, self._arguments, self._environment, module=self._module)

    async def start(self) -> None:
        self._program = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", self._module, *self._arguments),
            env=self._environment,
            stdin=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the parent, which then ends its children in order
            preexec_fn=tether(signal.SIGKILL),
        )
        self._reader = asyncio.create_task(self._read(), name=f"stderr of {self.name}")

    @property
    def pid(self) -> int:
        assert self._program is not None, "start() first"
        return self._program.pid

    async def until_ready(self, timeout_s: float) -> str:
        """The child's ready line. Raises ServerError with its last words when it ends or stays silent."""
        try:
            return await asyncio.wait_for(asyncio.shield(self._ready), timeout_s)
        except TimeoutError:
            raise ServerError(f"{self.name} was not ready within {timeout_s:.0f} s: {self._words()}") from None

    async def wait(self) -> str:
        """Until it ends: how it did, in words."""
        assert self._program is not None, "start() first"
        return _ending(await self._program.wait())

    def ask_to_stop(self) -> None:
        """SIGTERM: drain, then end."""
        if self._program is not None and self._program.returncode is None:
            self._program.send_signal(signal.SIGTERM)

    async def stop(self, timeout_s: float) -> None:
        """Wait for the end that was asked for; SIGKILL when it does not come in time."""
        if self._program is None:
            return
        try:
            await asyncio.wait_for(self._program.wait(), timeout_s)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._program.kill()
            await self._program.wait()
        if self._reader is not None:
            await asyncio.wait([self._reader], timeout=LAST_WORDS_S)
            await end_tasks([self._reader])  # a grandchild may keep the pipe open

    async def _read(self) -> None:
        assert self._program is not None
        assert self._program.stderr is not None
        while raw := await _next_line(self._program.stderr):
            line = raw.decode(errors="replace").rstrip()
            if line.startswith("ready ") and not self._ready.done():
                self._ready.set_result(line)
                continue
            self._last_lines.append(line)
            with contextlib.suppress(OSError):  # nobody reads ours: the child's must be read all the same
                print(line, file=sys.stderr, flush=True)
        if not self._ready.done():
            ending = await self.wait()
            self._ready.set_exception(ServerError(f"{self.name} {ending}: {self._words()}"))
            self._ready.exception()  # whoever waited may have left by now: it is no forgotten error

    def _words(self) -> str:
        return " / ".join(self._last_lines)[-600:] or "it said nothing"


async def _next_line(stream: asyncio.StreamReader) -> bytes:
    """The next line, b"" at the end. One too long to be read is left out: unread, it would block the child for ever."""
    while True:
        try:
            return await stream.readline()
        except ValueError:
            continue


def _ending(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
