"""Faults at announced points inside a worker: it says on standard error where it stands, and does what it was told.

A point is `place:number:action`. Places: `prefill` (a step that leaves a prompt unfinished), `decode` (a step of
answers alone), `before:SCRIPT` and `after:SCRIPT` (a call to Redis, sent or not). `number`: the how-manieth time.
Actions: `say`, `die` (SIGKILL), `stop` (SIGSTOP), `raise` (MemoryError), `starve` (no memory is left, for good).
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jitney import scripts
from jitney.connection import Redis
from jitney_worker.engine.protocol import SchedulerOutput


def say(line: str) -> None:
    """One write, so that threads do not mix their words, and nothing is lost with the process."""
    os.write(sys.stderr.fileno(), f"{line}\n".encode())


_EATEN: list[bytes] = []


def starve() -> None:
    """Take what the process may have, to the last kilobytes, and keep it: as a machine whose memory is full.

    Raises MemoryError, and so will whatever asks for memory from now on, on any thread.
    """
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (16 << 20), resource.RLIM_INFINITY))
    size = 1 << 20
    while True:
        try:
            _EATEN.append(bytes(size))
        except MemoryError:
            if size <= 1 << 10:
                raise
            size >>= 1


@dataclass(frozen=True, slots=True)
class Point:
    """Where, at which time, and what then."""

    place: str
    number: int
    action: str

    @classmethod
    def parse(cls, text: str) -> Point:
        place, number, action = text.rsplit(":", 2)
        assert action in ("say", "die", "stop", "raise", "starve"), text
        return cls(place, int(number), action)


@dataclass(slots=True)
class Points:
    """All points of one worker. `reach` is called on two threads, but each place belongs to one of them."""

    points: list[Point]
    _reached: Counter[str] = field(default_factory=Counter)

    def reach(self, place: str) -> None:
        self._reached[place] += 1
        for point in self.points:
            if point.place == place and point.number == self._reached[place]:
                self._act(point)

    def _act(self, point: Point) -> None:
        say(f"at {point.place}:{point.number} {point.action}")
        if point.action == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif point.action == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif point.action == "raise":
            raise MemoryError(f"the test asked for it at {point.place}:{point.number}")
        elif point.action == "starve":
            starve()

    def of_step(self, scheduled: SchedulerOutput) -> None:
        prefills = any(not item.samples for item in scheduled.scheduled)
        self.reach("prefill" if prefills else "decode")

    def around_scripts(self) -> None:
        """From now on every script call of this process passes its two points. Refused appends are announced."""
        run = scripts.run

        async def watched(redis: Redis, script: scripts.Script, call: scripts.Call) -> Any:
            self.reach(f"before:{script.name}")
            reply = await run(redis, script, call)
            self.reach(f"after:{script.name}")
            if script.name == "append" and reply:
                say(f"refused {len(reply)} {reply[0][1].decode()}")
            if script.name == "finish" and reply[0] != b"ok":
                say(f"refused 1 {reply[0].decode()}")
            return reply

        scripts.run = watched
