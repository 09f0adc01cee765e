"""A thousand streams through one API process, and the time to a stream's first byte.

    python -m ops.bench.streams [--readers 1000] [--slow 10] [--requests 60] [--write FILE] [--json FILE]

About two minutes. A scripted worker (streams_worker.py) says a text of its own to each reader, at a set pace, through
the queue like any other. Ends with an error if a reader misses anything, hears it twice, or hears another one's.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ops.bench import flags, page
from ops.bench.streams_reader import first_byte
from ops.bench.streams_stage import Stage, bare_server, stage
from ops.bench.streams_wave import Wave, wave
from ops.bench.streams_worker import Script

from jitney.errors import ServerError

PLACE = "streams"
WAVES = ("first wave", "second, some take nothing", "third wave")
NOT_COUNTED = 5
"""First requests of the latency, which find code and connections cold."""


@dataclass
class Latency:
    """Milliseconds of each request: asked → claimed by the worker; its first text handed over → first byte."""

    to_worker: list[float]
    to_reader: list[float]

    @property
    def overhead(self) -> list[float]:
        return [there + back for there, back in zip(self.to_worker, self.to_reader, strict=True)]


async def latency(place: Stage, num_requests: int) -> Latency:
    """One request after the other, while nothing else happens."""
    found = Latency([], [])
    for number in range(num_requests + NOT_COUNTED):
        script = Script(f"first-{number}", num_events=1, is_stamped=True)
        asked, claimed, said, heard = await first_byte(place.port, script, place.queue)
        if number >= NOT_COUNTED:
            found.to_worker.append((claimed - asked) / 1e6)
            found.to_reader.append((heard - said) / 1e6)
    return found


async def measure(asked: argparse.Namespace) -> tuple[Latency, list[Wave], Wave]:
    """Latency at idle; three waves through the API, slow readers in the second; one from the bare web server."""
    with tempfile.TemporaryDirectory() as folder:
        async with stage(Path(folder)) as place:
            flags.say("first bytes, at idle ...")
            quick = await latency(place, asked.requests)
            waves = []
            for number, num_slow in enumerate((0, asked.slow, 0), 1):
                flags.say(f"wave {number}: {asked.readers} readers, {num_slow} of which take nothing ...")
                waves.append(await wave(place, asked, num_slow=num_slow))
        async with bare_server() as place:
            flags.say("the same from the web server alone ...")
            bare = await wave(place, asked)
    return quick, waves, bare


def text(quick: Latency, waves: Sequence[Wave], bare: Wave, asked: argparse.Namespace, machine: str) -> str:
    rows = []
    for name, one in zip((*WAVES, "web server alone"), (*waves, bare), strict=True):
        memory = [f"{value:.0f}" for value in one.memory_mb]
        rows.append([name, f"{one.num_open_at_once:,}", f"{one.num_events:,}", *memory, f"{one.cpu_us:.0f}"])
    spans = [
        ("until the worker has the job", quick.to_worker),
        ("from its first text to the first byte", quick.to_reader),
        ("both: above the worker's own first token", quick.overhead),
    ]
    paced = f"{asked.events} events to each, one every {asked.every_s:g} s, through the queue"
    ratio = page.times(waves[0].cpu_us, bare.cpu_us, digits=1)
    return "\n\n".join(
        (
            page.paragraph(
                f"`python -m ops.bench.streams`: {asked.readers:,} readers of one API process, {paced};",
                f"readers, worker, Redis and API on the same cores. {machine}.",
                "No reader missed anything, or heard another one's answer. In the second wave",
                f"{waves[1].num_slow} of them took nothing after their first event: {waves[1].num_cut} were cut off,",
                "came back with `Last-Event-ID`, and had missed nothing.",
            ),
            page.table(
                ["", "open at once", "events", "MB before", "all open", "at the end", "after", "µs CPU an event"], rows
            ),
            page.paragraph(
                "*MB* and *µs* are of the server's process alone: resident memory, and CPU time of an event between",
                "the moment when all were open and the end. The last row is what the web server takes for the same",
                f"bytes out of memory, with nothing behind it: the API takes {ratio} of that. First byte of a stream,",
                f"at idle, {len(quick.to_worker)} requests one after the other, ms:",
            ),
            page.table(
                ["from the request on", "median", "p90", "most"],
                [[name, *_spread(values)] for name, values in spans],
            ),
        )
    )


def _spread(values: Sequence[float]) -> list[str]:
    ranked = sorted(values)
    return [f"{value:.1f}" for value in (statistics.median(ranked), ranked[int(len(ranked) * 0.9)], ranked[-1])]


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = flags.parser(__doc__)
    parser.add_argument("--readers", type=flags.positive, default=1_000)
    parser.add_argument("--slow", type=flags.at_least(0), default=10, help="of them take nothing; %(default)s")
    parser.add_argument("--events", type=flags.positive, default=100, help="of each answer; %(default)s")
    parser.add_argument("--every-s", type=flags.above_zero, default=0.2, help="from one to the next; %(default)g")
    parser.add_argument("--padding", type=flags.positive, default=131_072, help="of slow ones' texts; %(default)s")
    parser.add_argument("--requests", type=flags.positive, default=60, help="for the first byte; %(default)s")
    asked = parser.parse_args(words)
    if asked.slow >= asked.readers:
        parser.error(f"--slow {asked.slow} must be less than --readers {asked.readers}")
    return asked


def allow_connections(number: int) -> None:
    """Each is an open file, of this process and of the server that it starts. Raises ServerError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = number + 256
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise ServerError(
            f"{number} readers need {wanted} open files, but at most {hard} are allowed here (ulimit -Hn)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


@flags.told()
def main(words: Sequence[str] | None = None) -> None:
    asked = arguments(words)
    page.check_place(asked.write, PLACE)
    allow_connections(asked.readers)
    machine = page.machine()
    quick, waves, bare = asyncio.run(measure(asked))
    report: dict[str, Any] = {"machine": machine, "waves": [asdict(one) for one in waves], "bare": asdict(bare)}
    report |= {"first_byte_ms": {**asdict(quick), "overhead": quick.overhead}}
    flags.leave_behind(asked, PLACE, text(quick, waves, bare, asked, machine), report)


if __name__ == "__main__":
    main()
