"""A cluster of one node is served like any server; one of several nodes is refused in plain words."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import cast

import pytest
from contract_driver import Driver
from contract_servers import CLUSTERS, NUM_SLOTS, ClusterNode, binary_of
from redis.crc import key_slot
from redis.exceptions import ResponseError
from test_servers import bury_requeue_and_drop

from jitney import AsyncClient, scripts
from jitney.canary import check_rights
from jitney.connection import Redis, connect
from jitney.doctor import examine, see
from jitney.embedded import EmbeddedServer
from jitney.errors import QueueUnavailable, SettingsError
from jitney.keys import ALIASES, BANDS, QUEUES, Keys, new_job_id
from jitney.queue import Entry, Queue
from jitney.server_checks import check_cluster
from jitney.topology import refuse_several_nodes
from jitney.webhooks.announcements import Announcements
from jitney_worker.build import register
from jitney_worker.runtime.worker import Crew

NOT_KEYED = {"TIME", "PUBLISH"}
MANY_KEYED = {"DEL", "EXISTS"}


def test_all_keys_of_a_queue_share_one_slot(queue_name: str) -> None:
    keys, id = Keys(queue_name), new_job_id(queue_name)
    names = [value for name, value in vars(keys).items() if name not in ("queue", "prefix")]
    names += [keys.job(id), keys.body(id), keys.ids(id), keys.tokens(id), keys.result(id), keys.hook(id)]
    names += [keys.bell_for("fp"), keys.last("w"), keys.ctl("w"), keys.worker("w"), keys.idempotency("t", "{x}")]
    for band in BANDS:
        names += [keys.jobs(band, "t"), keys.fair(band), keys.idle(band), keys.leases(band), keys.held(band, "fp")]
    assert {key_slot(name.encode()) for name in names} == {key_slot(keys.prefix.encode())}


class Watched:
    """What a server is told, while the block lasts: the keys of every script's call, and those it touches inside."""

    def __init__(self, server: EmbeddedServer) -> None:
        self._client = connect(server.url)
        self.keys: dict[str, set[str]] = defaultdict(set)

    async def __aenter__(self) -> Watched:
        self._monitor = self._client.monitor()
        await self._monitor.__aenter__()
        self._mark = secrets.token_hex(8)
        return self

    async def __aexit__(self, *error: object) -> None:
        names, now = {scripts.load(name).sha: name for name in scripts.NAMES}, ""
        await self._client.echo(self._mark)
        async with asyncio.timeout(10.0):
            while True:
                said = await self._monitor.next_command()
                words = re.findall(r"\S+", said["command"])
                if self._mark in words:
                    break
                if words[0].upper() == "EVALSHA":
                    now = names[words[1]]
                    self.keys[now] |= set(words[3 : 3 + int(words[2])])
                elif said["client_type"] == "lua" and words[0].upper() not in NOT_KEYED:
                    self.keys[now] |= set(words[1:] if words[0].upper() in MANY_KEYED else words[1:2])
        await self._monitor.__aexit__(None, None, None)
        await self._client.aclose()


async def test_every_key_that_a_script_is_given_or_touches_lies_in_its_queues_slot(
    driver: Driver, server: EmbeddedServer
) -> None:
    async with Watched(server) as watched:
        await call_every_script(driver)
    assert set(watched.keys) == set(scripts.NAMES)
    slot = key_slot(driver.keys.prefix.encode())
    strays = {name: {key for key in keys if key_slot(key.encode()) != slot} for name, keys in watched.keys.items()}
    assert strays == {name: set() for name in scripts.NAMES}


async def call_every_script(driver: Driver) -> None:
    queue = driver.queue
    await bury_requeue_and_drop(driver)
    for _ in range(3):
        hook = "finished,cancelled job https://hooks.example.com/"
        await driver.enqueue(idempotency_key=secrets.token_hex(4), timeout_s=60.0, hook=hook)
    first, second, third = (await driver.claim()).deliveries
    assert len(await queue.adopt("w", first.fence.partition(".")[0])) == 3
    await driver.say(first, "a")
    assert await queue.renew(30.0, [driver.held(first)]) == set()
    assert await driver.finish(first, seq=2, num_tokens=1) == "ok"
    assert await queue.release(second.id, second.fence) == "ok"
    assert await queue.retry(third.id, third.fence, delay_s=100.0) == "ok"
    await queue.janitor(fingerprint="fp")
    assert await queue.repair(second.id) == "ok"
    for id in (second.id, third.id):
        assert (await queue.cancel(id)).outcome == "cancelled"
    assert await queue.fold(first.id) == "ok"
    await tell_everybody(Announcements(driver.redis, driver.keys.prefix))


async def tell_everybody(outbox: Announcements) -> None:
    assert await outbox.add("batch_1", "batch", "failed", "https://hooks.example.com/")
    told, given_up, *others = await outbox.claim(10, 30.0)
    assert len(others) == 2
    assert await outbox.settle(told, "told")
    assert await outbox.settle(given_up, "dead")
    assert await outbox.retry(given_up.id)
    assert await outbox.drop(given_up.id)


@pytest.mark.parametrize("server", CLUSTERS, indirect=True)
async def test_a_cluster_of_one_node_refuses_a_script_that_leaves_its_slot(redis: Redis, queue_name: str) -> None:
    """So that the tests on a cluster prove something: our scripts are refused there if they do."""
    keys = Keys(queue_name)
    stray = scripts.as_script("stray", f"#!lua\nreturn redis.call('HLEN', '{QUEUES}')")
    assert key_slot(QUEUES.encode()) != key_slot(keys.prefix.encode())
    with pytest.raises(ResponseError, match="slot"):
        await scripts.run(redis, stray, scripts.Call([keys.counts], []))


@pytest.mark.parametrize("server", CLUSTERS, indirect=True)
async def test_the_doctor_finds_a_cluster_of_one_node_fit(redis: Redis, server: EmbeddedServer) -> None:
    assert check_cluster(await see(redis)).found == "one node with every slot"
    assert (await check_rights(server.url, None)).verdict == "ok"
    await refuse_several_nodes(redis)


# --- several nodes ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["valkey", "redis"])
def nodes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ClusterNode]]:
    """Two nodes, half of the slots each."""
    binary, folder = binary_of(request.param), tmp_path_factory.mktemp("cluster")
    with ClusterNode(folder / "a", binary=binary, tethered=True) as a, _other(folder / "b", binary, a) as b:
        a.meet(b)
        a.take_slots(0, NUM_SLOTS // 2 - 1)
        b.take_slots(NUM_SLOTS // 2)
        for node in (a, b):
            node.wait_until_whole()
        yield [a, b]


def _other(folder: Path, binary: Path, one: ClusterNode) -> ClusterNode:
    return ClusterNode(folder, binary=binary, password=one.password, tethered=True)


@pytest.fixture
async def each_node(nodes: list[ClusterNode]) -> AsyncIterator[list[Redis]]:
    clients = [connect(node.url) for node in nodes]
    yield clients
    for client in clients:
        await client.aclose()


async def test_a_cluster_of_several_nodes_is_refused_at_every_door(
    nodes: list[ClusterNode], each_node: list[Redis], queue_name: str
) -> None:
    refusal = "a cluster of 2 nodes, and jitney speaks to one alone"
    for node, client in zip(nodes, each_node, strict=True):
        with pytest.raises(SettingsError, match=refusal):
            await refuse_several_nodes(client)
        with pytest.raises(SettingsError, match=refusal):
            await register(client, cast(Crew, None))  # before it looks at what it is to register
        found = {finding.name: finding for finding in await examine(node.url)}
        assert found["cluster"].verdict == "fail"
        assert found["cluster"].found.startswith("2 nodes share the slots")


async def test_a_client_that_is_sent_to_another_node_says_why_it_cannot_go_there(
    nodes: list[ClusterNode], queue_name: str
) -> None:
    keys = Keys(queue_name)
    wrong = nodes[key_slot(keys.prefix.encode()) < NUM_SLOTS // 2]
    client = connect(wrong.url)
    entry = Entry(new_job_id(queue_name), b"{}", "digest")
    with pytest.raises(QueueUnavailable, match=r"another node of its cluster \(\d+ 127.0.0.1:\d+\).*a cluster of one"):
        await Queue(client, queue_name).enqueue(entry)
    with pytest.raises(QueueUnavailable, match="another node"):
        await Queue(client, queue_name).cancel(entry.id)
    await client.aclose()
    halves = {key_slot(name.encode()) < NUM_SLOTS // 2 for name in (QUEUES, ALIASES)}
    assert halves == {True, False}, "no node holds both lists, so no client finds a queue on either"
    for node in nodes:
        async with AsyncClient(node.url, queue=queue_name) as asking:
            with pytest.raises(QueueUnavailable, match="another node"):
                await asking.enqueue("hi")
