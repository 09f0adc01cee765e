"""`jitney top`: in a pseudo-terminal as somebody sees it, and as plain text."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import signal
import sys
import time

import pytest
from tests.conftest import WriteCard
from typer.testing import CliRunner

from jitney import AsyncClient
from jitney.cli import app
from jitney.connection import Redis
from jitney.overview import Lookout
from jitney.workers import Move, SeatView, WorkerView, write_worker

LIVENESS_S = 60.0
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]|\r")


def view(queue: str, job: str, *, num_output_tokens: int = 3, **changes: object) -> WorkerView:
    """A worker with one of two seats taken."""
    seat = SeatView(
        job=job,
        choice=0,
        joined_step=5,
        num_prompt_tokens=8,
        num_computed_tokens=7 + num_output_tokens,
        num_output_tokens=num_output_tokens,
        number=2,
        max_output_tokens=40,
    )
    fields = {
        "id": "w-one",
        "queue": queue,
        "model": "m",
        "fingerprint": "f",
        "host": "h",
        "pid": 1,
        "state": "ready",
        "started_at": 1.0,
        "written_at": 2.0,
        "step": 77,
        "max_num_seqs": 2,
        "num_blocks": 10,
        "num_free_blocks": 7,
        "num_cached_blocks": 3,
        "num_decode_tokens": 1,
        "num_generated_tokens": num_output_tokens,
        "features": {"max_num_batched_tokens": 64},
        "seats": (seat,),
        "moves": (Move(kind="joined", step=5, job=job, choice=0, seat=2, at=1.0),),
    }
    return WorkerView.model_validate(fields | changes)


@pytest.fixture
async def busy(redis: Redis, queue_name: str, client: AsyncClient, write_queue_card: WriteCard) -> str:
    """A queue in which one job runs and two wait; the id of the one."""
    jobs = [await client.enqueue("x", band=band) for band in ("interactive", "bulk", "bulk")]
    await write_worker(redis, view(queue_name, jobs[0].id), 600)
    return jobs[0].id


async def test_top_once_prints_it_all_as_plain_text(busy: str, redis_url: str, queue_name: str) -> None:
    ended = await asyncio.to_thread(CliRunner().invoke, app, ["top", "--once"], env={"JITNEY_REDIS_URL": redis_url})
    assert ended.exit_code == 0, ended.output
    assert "\x1b" not in ended.stdout
    lines = ended.stdout.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"queue {queue_name} "))
    mine = [line.strip() for line in lines[start : start + 6]]
    assert mine[1].startswith("waiting  interactive 1  standard 0  bulk 2")
    assert mine[2] == "preempted 0  taken over 0  dead 0"
    assert mine[3] == "worker w-one  ready  step 77  1 of 2 seats  0.0 tokens/s"
    assert mine[4] == "last step 0 prefill + 1 decode of 64 tokens   blocks 3 used (0 shared), 3 cached, 4 free"
    assert mine[5] == f"seat 2  {busy}  decode  3/40 tokens  0.0/s"


async def test_top_without_a_terminal_says_what_to_do(redis_url: str) -> None:
    ended = await asyncio.to_thread(CliRunner().invoke, app, ["top"], env={"JITNEY_REDIS_URL": redis_url})
    assert ended.exit_code == 2
    assert "--once" in ended.output


async def test_top_where_no_redis_is_says_so_in_one_line() -> None:
    ended = await asyncio.to_thread(CliRunner().invoke, app, ["top", "--once", "--redis-url", "redis://127.0.0.1:1"])
    assert ended.exit_code == 1
    assert ended.output.startswith("error: Redis does not answer")


class Terminal:
    """`jitney top` on a terminal of 110 by 200: what it has drawn."""

    def __init__(self, redis_url: str, queue: str) -> None:
        self.pid, self._master = pty.fork()
        if self.pid == 0:
            os.environ |= {"JITNEY_REDIS_URL": redis_url, "TERM": "xterm", "COLUMNS": "110", "LINES": "200"}
            os.execv(sys.executable, [sys.executable, "-m", "jitney", "top", "--interval", "0.2", "--queue", queue])
        self.drawn = ""

    def until(self, *words: str) -> None:
        """Until all of them have been drawn since the last call."""
        deadline = time.monotonic() + LIVENESS_S
        self.drawn = ""
        while not all(word in self.drawn for word in words):
            assert time.monotonic() < deadline, self.drawn[-4_000:]
            self.drawn += ESCAPES.sub("", os.read(self._master, 65_536).decode("utf-8", "replace"))

    def end(self, number: int) -> int:
        """The exit code after that signal."""
        os.kill(self.pid, number)
        with_rest = b"x"
        while with_rest:
            try:
                with_rest = os.read(self._master, 65_536)
            except OSError:  # nobody holds the other side any more
                break
        os.close(self._master)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


async def test_top_on_a_terminal_follows_the_batch(busy: str, redis: Redis, redis_url: str, queue_name: str) -> None:
    """One queue of many: the others would fill the screen."""
    terminal = Terminal(redis_url, queue_name)
    await asyncio.to_thread(terminal.until, busy, "decode", "3/40", f"…{busy[-8:]} took seat 2")
    await write_worker(redis, view(queue_name, busy, num_output_tokens=19, step=93), 600)
    await asyncio.to_thread(terminal.until, "19/40", "step 93", "1 of 2 seats")
    assert await asyncio.to_thread(terminal.end, signal.SIGINT) == 0


async def test_top_and_the_page_count_tokens_per_second_between_two_looks(
    busy: str, redis: Redis, queue_name: str
) -> None:
    lookout = Lookout(redis)
    await lookout.look()
    await asyncio.sleep(0.2)
    await write_worker(redis, view(queue_name, busy, num_output_tokens=23), 600)
    overview = await lookout.look()
    (queue,) = [one for one in overview.queues if one.name == queue_name]
    (first, *_), *_, (last, *_) = lookout.points[queue_name]
    assert first is not None
    assert last is not None
    rate = queue.tokens_per_s
    assert 20 / (last - first + 0.2) <= rate <= 20 / 0.2, "by the time between the looks, and no other queue's w-one"
    assert queue.workers[0].seats[0].tokens_per_s == pytest.approx(rate, rel=0.01)
