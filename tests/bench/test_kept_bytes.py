"""What is kept of an answer: the arithmetic on known figures, and a short run on a server of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from ops.bench import kept_bytes, kept_figures
from ops.bench.kept_figures import Kept, Leftovers, Machine, Round
from ops.bench.path_worker import IDLE

from jitney.connection import Redis
from jitney.embedded import EmbeddedServer
from jitney.keys import Keys
from jitney_worker.model.tiny import make_tiny

MACHINES = (Machine(100.0, 5, 0), Machine(150.0, 9, 0), Machine(151.0, 9, 0))


def a_round(idle: int, expired: int, *, ended: int, folded: int) -> Round:
    """Of ten jobs, each with 7 bytes in the ledger. idle, expired: of the server. ended, folded: of the jobs' keys."""
    server = (Kept(idle, 4, 0), Kept(0, 25, ended), Kept(0, 24, folded), Kept(expired, 4, 0))
    return Round(*server, ledger_bytes=70, num_events=1_000)


def test_an_answers_bytes_are_those_of_its_keys_and_what_stays_is_the_servers() -> None:
    rounds = [
        a_round(1_000, 1_090, ended=2_000, folded=500),
        a_round(1_090, 1_160, ended=1_000, folded=100),
        a_round(1_160, 1_230, ended=1_500, folded=200),
    ]
    found = Leftovers("Valkey", 10, rounds, MACHINES)
    assert (found.ended_bytes, found.folded_bytes, found.ledger_bytes, found.num_events) == (150.0, 20.0, 7.0, 100.0)
    assert found.expired_bytes == 1_230 - 1_000 - 3 * 70
    assert kept_figures.bytes_cells(found) == ["Valkey", "100", "150 B", "20 B", "+20 B in all", "7 B", "4", "4"]


def test_the_worker_is_compared_with_itself_before_its_first_job() -> None:
    found = Leftovers("Valkey", 10, [a_round(0, 0, ended=0, folded=0)], MACHINES)
    assert kept_figures.worker_cells(found, 1) == ["Valkey", "after the first round", "150.0 MB", "×1.50", "9", "0"]
    assert kept_figures.worker_cells(found, 2)[3:] == ["×1.51", "9", "0"]


async def test_a_key_of_an_ended_job_that_would_stay_for_ever_is_an_error(redis: Redis, queue_name: str) -> None:
    keys = Keys(queue_name)
    await redis.set(keys.result("a"), "1", px=60_000)
    await kept_bytes.let_expire(redis, keys)
    assert await redis.exists(keys.result("a")) == 0
    await redis.set(keys.result("b"), "1")
    await redis.set(keys.epoch, "of the queue, not of a job")
    with pytest.raises(RuntimeError, match=r"without a life time: .*:result:b"):
        await kept_bytes.let_expire(redis, keys)


async def test_of_every_answer_less_and_less_is_kept_and_at_last_nothing(tmp_path: Path) -> None:
    directory = make_tiny(tmp_path / "tiny")
    with EmbeddedServer(tmp_path / "data", tethered=True) as server:
        found = await kept_bytes.measure(server, "Valkey", IDLE, directory, num_jobs=12, num_rounds=2)
    for one in found.rounds:
        idle = one.idle.num_keys
        # A record each, and a log or a string; `:ended` is there until all are folded.
        assert [kept.num_keys - idle for kept in (one.ended, one.folded, one.expired)] == [25, 24, 0]
        assert one.ended.answers_bytes > one.folded.answers_bytes > 12 * 200
        assert (one.idle.answers_bytes, one.expired.answers_bytes) == (0, 0)
        assert 12 * 2 <= one.num_events <= 12 * (kept_figures.NUM_TOKENS + 2)
    assert [machine.num_held_blocks for machine in found.machines] == [0, 0, 0]
    assert all(machine.rss_mb > 20 and machine.num_connections > 2 for machine in found.machines)
