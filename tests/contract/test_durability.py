"""`strict`: an accepted job is on disk, or the client hears that it may not be."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from contract_driver import Driver
from contract_servers import SERVERS, running

from jitney import durability, scripts
from jitney.connection import connect
from jitney.durability import find_proof
from jitney.embedded import EmbeddedServer
from jitney.errors import IdempotencyConflict, NotDurable, Overloaded, QueueUnavailable, SettingsError
from jitney.queue import Enqueued, Limits, Queue

DEFAULT_LIMITS = Limits()

with_waitaof = pytest.mark.parametrize("own_server", ["valkey"], indirect=True)
"""Redis 7.0 does not know the command."""


@pytest.fixture(params=SERVERS)
def own_server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EmbeddedServer]:
    """A server whose settings the test may change."""
    with running(request.param, tmp_path) as server:
        yield server


@pytest.fixture
async def own_driver(own_server: EmbeddedServer, queue_name: str) -> AsyncIterator[Driver]:
    client = connect(own_server.url)
    yield Driver(Queue(client, queue_name))
    await client.aclose()


async def forbid_settings(driver: Driver, server: EmbeddedServer) -> Driver:
    """The same queue as somebody who may not see the server's settings, as with most managed servers."""
    await driver.redis.execute_command("ACL", "SETUSER", "jit", "on", ">pw", "~*", "&*", "+@all", "-config")
    return Driver(Queue(connect(f"redis://jit:pw@127.0.0.1:{server.port}/0"), driver.queue.name))


async def test_a_server_that_flushes_before_it_answers_is_proof_enough(own_driver: Driver) -> None:
    """Also where WAITAOF is unknown."""
    driver = own_driver
    await driver.redis.config_set("appendfsync", "always")
    assert await find_proof(driver.redis, driver.keys) == "always"
    entry = driver.entry()
    assert not (await driver.queue.enqueue_synced(entry, DEFAULT_LIMITS, "always")).duplicate
    assert (await driver.queue.enqueue_synced(entry, DEFAULT_LIMITS, "always")).duplicate
    assert (await driver.claim_one()).id == entry.id


async def test_that_it_still_does_is_checked_with_every_job(own_driver: Driver) -> None:
    driver = own_driver
    entry = driver.entry()
    with pytest.raises(NotDurable, match=r"now has appendonly yes and appendfsync everysec") as caught:
        await driver.queue.enqueue_synced(entry, DEFAULT_LIMITS, "always")
    assert caught.value.job_id == entry.id
    assert (await driver.claim_one()).id == entry.id, "it was written all the same"


async def test_a_server_without_a_file_is_refused_before_anything_is_written(own_driver: Driver) -> None:
    driver = own_driver
    await driver.redis.config_set("appendonly", "no")
    with pytest.raises(SettingsError, match="keeps no append-only file"):
        await find_proof(driver.redis, driver.keys)
    assert await driver.key_names() == set()


async def test_a_server_that_never_flushes_is_refused(own_driver: Driver) -> None:
    await own_driver.redis.config_set("appendfsync", "no")
    with pytest.raises(SettingsError, match="appendfsync no"):
        await find_proof(own_driver.redis, own_driver.keys)


@pytest.mark.parametrize("own_server", ["redis"], indirect=True)
async def test_a_server_that_knows_no_waitaof_is_refused_with_what_to_change(own_driver: Driver) -> None:
    with pytest.raises(SettingsError, match=r"WAITAOF: .*unknown command.*appendfsync always.*durability=default"):
        await find_proof(own_driver.redis, own_driver.keys)


@with_waitaof
async def test_a_waitaof_that_does_not_wait_is_found_out(own_driver: Driver) -> None:
    """Judged by another measure: a disk that is flushed once a second cannot confirm five times in half of one."""
    driver = own_driver
    began = time.monotonic()
    for number in range(5):
        await driver.redis.set(driver.keys.sync, number, px=1_000)
        assert (await driver.redis.execute_command("WAITAOF", 1, 0, 3_000))[0] == 1
    if time.monotonic() - began > 0.5:
        assert await find_proof(driver.redis, driver.keys) == "waitaof"
        return
    with pytest.raises(SettingsError, match=r"answers before the data is on disk.*set appendonly yes and appendfsync"):
        await find_proof(driver.redis, driver.keys)


@with_waitaof
async def test_an_early_waitaof_is_taken_for_what_it_is(own_driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the server does: where a second confirmation may come at once the proof is good, otherwise not."""
    driver = own_driver
    monkeypatch.setattr(durability, "HONEST_S", 0.0)
    assert await find_proof(driver.redis, driver.keys) == "waitaof"
    monkeypatch.setattr(durability, "HONEST_S", 60.0)
    with pytest.raises(SettingsError, match="answers before the data is on disk"):
        await find_proof(driver.redis, driver.keys)


@with_waitaof
async def test_where_settings_are_hidden_a_quick_answer_proves_nothing(
    own_driver: Driver, own_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durability, "HONEST_S", 60.0)
    narrow = await forbid_settings(own_driver, own_server)
    with pytest.raises(SettingsError, match="cannot be told, because CONFIG GET is not allowed"):
        await find_proof(narrow.redis, narrow.keys)
    await narrow.redis.aclose()


@with_waitaof
async def test_a_job_that_waitaof_confirms_is_accepted_once(own_driver: Driver) -> None:
    driver = own_driver
    await driver.redis.script_flush()
    entry = driver.entry(idempotency_key="k")
    assert await driver.queue.enqueue_synced(entry, DEFAULT_LIMITS, "waitaof") == Enqueued(entry.id, duplicate=False)
    assert await driver.queue.enqueue_synced(entry, DEFAULT_LIMITS, "waitaof") == Enqueued(entry.id, duplicate=True)
    assert (await driver.claim_one()).id == entry.id


@with_waitaof
async def test_what_is_not_on_disk_in_time_is_told_with_the_jobs_id(
    own_driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With appendfsync no, nothing is ever flushed; not even for a job that was written before."""
    driver = own_driver
    await driver.redis.config_set("appendfsync", "no")
    monkeypatch.setattr(durability, "WAIT_MS", 50)
    entry = driver.entry(idempotency_key="k")
    for _ in range(2):
        with pytest.raises(NotDurable, match=r"was not on disk within 0\.05 s") as caught:
            await driver.queue.enqueue_synced(entry, DEFAULT_LIMITS, "waitaof")
        assert caught.value.job_id == entry.id
    assert isinstance(caught.value, QueueUnavailable)
    assert await driver.queue.counts() == (1, 1)


@with_waitaof
async def test_a_repeated_submission_on_a_fresh_connection_waits_for_the_disk_too(
    own_driver: Driver, own_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes nothing, and WAITAOF after no write of its own connection confirms everything."""
    await own_driver.redis.config_set("appendfsync", "no")
    monkeypatch.setattr(durability, "WAIT_MS", 50)
    entry = own_driver.entry()
    await own_driver.submit(entry)
    fresh = connect(own_server.url)
    with pytest.raises(NotDurable):
        await Queue(fresh, own_driver.queue.name).enqueue_synced(entry, DEFAULT_LIMITS, "waitaof")
    await fresh.aclose()


async def test_a_server_that_lost_the_command_says_so_with_the_jobs_id(own_driver: Driver) -> None:
    """After a failover to an older one."""
    driver = own_driver
    await driver.redis.config_set("appendonly", "no")
    entry = driver.entry()
    with pytest.raises(NotDurable, match="WAITAOF") as caught:
        await driver.queue.enqueue_synced(entry, DEFAULT_LIMITS, "waitaof")
    assert caught.value.job_id == entry.id


async def test_refusals_are_those_of_every_enqueue(own_driver: Driver) -> None:
    driver = own_driver
    await driver.redis.config_set("appendfsync", "always")
    await driver.enqueue(idempotency_key="k")
    with pytest.raises(Overloaded):
        await driver.queue.enqueue_synced(driver.entry(), Limits(max_waiting_jobs=1), "always")
    other = driver.entry(b'{"v":1,"prompt":"ho"}', idempotency_key="k")
    with pytest.raises(IdempotencyConflict):
        await driver.queue.enqueue_synced(other, DEFAULT_LIMITS, "always")
    await driver.redis.config_set("maxmemory", "1")
    with pytest.raises(QueueUnavailable, match=r"OOM|memory"):
        await driver.queue.enqueue_synced(driver.entry(), DEFAULT_LIMITS, "always")
    await driver.redis.config_set("maxmemory", "0")


async def test_a_server_that_forgot_its_scripts_learns_them_again(own_driver: Driver) -> None:
    driver = own_driver
    await driver.redis.config_set("appendfsync", "always")
    await driver.redis.script_flush()
    entry = driver.entry()
    assert (await driver.queue.enqueue_synced(entry, DEFAULT_LIMITS, "always")).id == entry.id
    assert await driver.redis.script_exists(scripts.load("enqueue").sha) == [True]
