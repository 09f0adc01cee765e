"""Full memory, a replica, a narrow user: what the scripts do where the server says no."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from contract_driver import LEASE_S, Driver
from contract_servers import SERVERS, running
from histories import History
from redis.exceptions import NoPermissionError, ReadOnlyError

from jitney import scripts
from jitney.connection import Redis, connect
from jitney.embedded import EmbeddedServer
from jitney.errors import QueueUnavailable
from jitney.queue import Queue


@pytest.fixture(params=SERVERS)
def own_server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EmbeddedServer]:
    """A server that the test may break."""
    with running(request.param, tmp_path) as server:
        yield server


@pytest.fixture
async def own_redis(own_server: EmbeddedServer) -> AsyncIterator[Redis]:
    client = connect(own_server.url)
    yield client
    await client.aclose()


@pytest.fixture
def own_driver(own_redis: Redis, queue_name: str) -> Driver:
    return Driver(Queue(own_redis, queue_name))


@pytest.mark.parametrize("name", scripts.NAMES)
def test_every_script_begins_with_its_shebang(name: str) -> None:
    """Without it a replica would answer a guard's refusal. Only what brings new jobs in asks for memory."""
    first = scripts.load(name).source.split("\n", 1)[0]
    assert first == ("#!lua" if name in ("enqueue", "requeue") else "#!lua flags=allow-oom")


async def test_a_full_server_refuses_new_jobs_and_ends_those_it_has(own_driver: Driver, own_redis: Redis) -> None:
    driver = own_driver
    for _ in range(4):
        await driver.enqueue()
    jobs = (await driver.claim(credit=3)).deliveries
    await driver.rewind(jobs[1].id, at=1)  # enqueued well before the next one, or their ids decide
    await own_redis.config_set("maxmemory", "1")
    with pytest.raises(QueueUnavailable, match=r"OOM|memory"):
        await driver.enqueue()
    assert await driver.say(jobs[0], "a") == []
    assert await driver.finish(jobs[0], seq=2, num_tokens=1) == "ok"
    assert await driver.queue.renew(LEASE_S, [driver.held(job) for job in jobs[1:]]) == set()
    assert await driver.queue.release(jobs[1].id, jobs[1].fence) == "ok"
    assert await driver.queue.retry(jobs[2].id, jobs[2].fence) == "ok"
    assert len((await driver.claim()).deliveries) == 1
    assert [job.id for job in (await driver.claim()).deliveries] == [jobs[2].id], "a suspect comes alone"
    assert len((await driver.claim()).deliveries) == 1
    assert (await driver.queue.cancel(jobs[1].id)).outcome == "cancelled"
    assert await driver.queue.fold(jobs[0].id) == "ok"
    await own_redis.config_set("maxmemory", "0")
    await driver.enqueue()


async def test_a_replica_says_so_instead_of_refusing_a_fence(own_driver: Driver, own_redis: Redis) -> None:
    """An owner that reaches a stale replica must not think that it has lost its job."""
    driver = own_driver
    await driver.enqueue()
    job = await driver.claim_one()
    stale = job.fence + "-of-a-later-claim"
    await own_redis.replicaof("127.0.0.1", "1")
    with pytest.raises(ReadOnlyError):
        await driver.queue.release(job.id, stale)  # type: ignore[arg-type]
    with pytest.raises(ReadOnlyError):
        await driver.queue.renew(LEASE_S, [driver.held(job)])
    with pytest.raises(ReadOnlyError):
        await driver.queue.adopt("w", "never-sent")
    with pytest.raises(ReadOnlyError):
        await driver.say(job, "a", seq=7)
    with pytest.raises(QueueUnavailable):
        await driver.enqueue()
    with pytest.raises(QueueUnavailable):
        await driver.queue.cancel(job.id)


async def test_a_server_that_was_restarted_learns_the_scripts_again(own_driver: Driver, own_redis: Redis) -> None:
    await own_driver.enqueue()
    jobs = [await own_driver.claim_one()]
    await own_redis.script_flush()
    assert await own_driver.queue.renew(LEASE_S, [own_driver.held(jobs[0])]) == set()
    for _ in range(99):
        await own_driver.enqueue()
    jobs += (await own_driver.claim()).deliveries
    await own_redis.script_flush()
    held = [own_driver.held(job) for job in jobs] * 3
    assert await own_driver.queue.renew(LEASE_S, held) == set(), "several calls in one pipeline"


async def test_whole_histories_run_as_a_user_of_one_queue(own_server: EmbeddedServer, queue_name: str) -> None:
    admin = connect(own_server.url)
    tag, password = f"{{jitney:{queue_name}}}", secrets.token_hex(8)
    rights = [f"~{tag}:*", f"&{tag}:*", "+@all", "-@dangerous", "-@admin"]
    await admin.execute_command("ACL", "SETUSER", "jit", "on", f">{password}", *rights)
    client = connect(f"redis://jit:{password}@127.0.0.1:{own_server.port}/0")
    with pytest.raises(NoPermissionError):
        await client.get(f"{{jitney:{queue_name}-other}}:card")
    await History(Queue(client, queue_name), 1).run()
    await bury_requeue_and_drop(Driver(Queue(client, queue_name)))
    await client.aclose()
    await admin.aclose()


async def bury_requeue_and_drop(driver: Driver) -> None:
    """What no history does: with an idempotency key, so that every key is touched."""
    for _ in range(2):
        id = await driver.enqueue(idempotency_key="k")
        for _ in range(2):
            job = await driver.claim_one()
            assert await driver.queue.retry(job.id, job.fence, max_tries=1) == "dead"
            last = job.id
            if last == id:
                await driver.queue.requeue_dead(id)
        assert await driver.queue.drop_dead(last)
        await driver.redis.delete(driver.keys.idempotency("-", "k"))
