"""What durability costs: that each way does what it says, and that the figures are what was counted."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from ops.bench import append_cost, path_cost
from ops.bench.append_cost import Batch, Cost, Listener, Spent
from ops.bench.bare import BARE
from ops.bench.path_cost import Job, Rates
from ops.bench.path_worker import IDLE

from jitney.connection import Redis, connect
from jitney.embedded import EmbeddedServer
from jitney.queue import Queue
from jitney_worker.model.tiny import make_tiny


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    """A server whose settings and data the measuring may change."""
    with EmbeddedServer(tmp_path / "data", tethered=True) as server:
        yield server


@pytest.fixture
async def own_redis(own_server: EmbeddedServer) -> AsyncIterator[Redis]:
    client = connect(own_server.url)
    yield client
    await client.aclose()


async def log_of(batch: Batch) -> list[bytes]:
    """Ids of the first job's log."""
    entries = await batch.queue.redis.xrange(batch.logs[0])
    return [entry_id for entry_id, _ in entries]


@pytest.mark.parametrize(
    ("way", "command", "ids"),
    [
        ("append", "evalsha", [b"1-0", b"2-0", b"3-0", b"4-0"]),
        ("xadd", "xadd", [b"1-0", b"2-0", b"3-0", b"4-0"]),
        ("publish", "publish", [b"1-0"]),
    ],
)
async def test_every_way_says_what_it_should_and_is_counted_by_its_command(
    own_server: EmbeddedServer, own_redis: Redis, way: str, command: str, ids: list[bytes]
) -> None:
    """Three steps of 70 jobs: more than one call of `append` has."""
    batch, cost = await append_cost.running_batch(own_redis, 70), Cost()
    before = await Spent.of(own_redis)
    with Listener(own_server, batch.logs) as listener:
        await append_cost.one_round(batch, way, 3, cost)
    in_command, in_all = (await Spent.of(own_redis)).since(before, command)
    assert await log_of(batch) == ids
    assert (len(cost.wall_ms), len(cost.command_us), len(cost.process_us)) == (3, 1, 1)
    assert cost.command_us[0] * 3 * 70 == pytest.approx(in_command)
    assert 0 < cost.process_us[0] * 3 * 70 <= in_all
    assert (listener.num_bytes > 3 * 70 * 80) == (way != "xadd")


async def test_a_step_without_the_right_to_write_is_not_measured(own_redis: Redis) -> None:
    batch = await append_cost.running_batch(own_redis, 2)
    batch.seq += 1
    with pytest.raises(AssertionError, match="reason='seq'"):
        await append_cost.one_round(batch, "append", 1, Cost())


async def test_all_ways_are_measured_in_all_settings(own_server: EmbeddedServer) -> None:
    costs = await append_cost.measure(own_server, (2, 3), num_rounds=2, num_steps=4)
    assert list(costs) == [(fsync, size) for fsync in ("no", "everysec", "always") for size in (2, 3)]
    assert {len(cost.wall_ms) for ways in costs.values() for cost in ways.values()} == {8}
    assert {len(cost.command_us) for ways in costs.values() for cost in ways.values()} == {2}
    assert len(append_cost.table(costs).splitlines()) == 2 + 6


def test_no_way_is_always_the_first() -> None:
    firsts = [append_cost.in_turn(number)[0] for number in range(3)]
    assert firsts == ["append", "xadd", "publish"]
    assert all(sorted(append_cost.in_turn(number)) == sorted(append_cost.WAYS) for number in range(3))


def test_a_row_compares_append_with_the_plain_log() -> None:
    ways = {
        "append": Cost([1.0, 2.0, 3.0], [6.0, 8.0, 7.0], [10.0, 9.0, 11.0]),
        "xadd": Cost([1.0, 1.0, 1.0], [0.5], [4.0]),
        "publish": Cost([0.5], [0.25], [1.0]),
    }
    assert append_cost.cells("always", 64, ways) == [
        *("always", "64", "7.0 / 0.5 / 0.2", "10.0 / 4.0 / 1.0", "×2.5"),
        *("2.00 (2.98)", "1.00 (1.00)", "0.50 (0.50)", "×2.00"),
    ]


def test_what_a_server_spent_is_a_difference() -> None:
    before, after = Spent({"xadd": 5}, 100.0), Spent({"xadd": 25, "evalsha": 9}, 400.0)
    assert after.since(before, "xadd") == (20, 300.0)
    assert after.since(before, "evalsha") == (9, 300.0)


async def test_all_three_ways_give_every_token_and_the_bare_one_keeps_nothing(
    own_server: EmbeddedServer, own_redis: Redis, tmp_path: Path
) -> None:
    jobs = path_cost.workload(6, 10)
    rates = await path_cost.measure(own_server, IDLE, make_tiny(tmp_path / "tiny"), jobs, seats=2, num_rounds=2)
    assert {way: len(found) for way, found in rates.by_way.items()} == {"alone": 2, "bare": 2, "path": 2}
    assert min(rate for found in rates.by_way.values() for rate in found) > 0
    keys = [key.decode() async for key in own_redis.scan_iter()]
    owners = {key.split("}")[0] for key in keys if ":job:" in key}
    assert len(owners) == 1, "only the path itself writes jobs down"
    assert [key for key in keys if ":job:" in key or ":tokens:" in key] != []
    assert {key.split("}")[0] for key in keys if ":tokens:" in key} == owners
    assert [key for key in keys if key.endswith(":bare")] == []


def test_the_bare_queue_replaces_what_the_queue_has() -> None:
    assert [name for name in BARE if not callable(getattr(Queue, name, None))] == []


def test_a_run_that_lost_a_token_is_no_rate() -> None:
    jobs = [Job((1, 2), 4), Job((3,), 6)]
    assert path_cost._rate(10, jobs, 2.0) == 5.0
    with pytest.raises(AssertionError, match="9 tokens came, 10 were asked for"):
        path_cost._rate(9, jobs, 2.0)


def test_the_path_is_compared_with_the_bare_one_and_with_the_engine() -> None:
    rates = Rates(
        "tiny", {"alone": [8_000.0, 9_000.0, 10_000.0], "bare": [4_000.0], "path": [2_000.0, 3_600.0, 3_000.0]}
    )
    assert path_cost.cells(rates) == ["tiny", "9,000", "4,000", "3,000", "×0.75", "×0.33"]


def test_the_workload_is_the_same_each_time_and_its_prompts_differ() -> None:
    jobs = path_cost.workload(40, 20)
    assert jobs == path_cost.workload(40, 20)
    assert len({job.prompt for job in jobs}) == 40
    assert all(10 <= job.max_tokens <= 30 for job in jobs)
