"""The doctor on real servers, healthy and not; and its canary, which leaves nothing behind."""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from contract_driver import Driver
from contract_servers import SERVERS, running

from jitney import clock, scripts
from jitney.canary import check_rights
from jitney.cards import QueueCard, write_card
from jitney.checks import Finding
from jitney.connection import Redis, connect
from jitney.doctor import examine, see
from jitney.embedded import EmbeddedServer
from jitney.errors import InvalidJob
from jitney.keys import QUEUES
from jitney.queue import Queue
from jitney.server_checks import COMMANDS


@pytest.fixture(autouse=True)
def _watch_the_clock_for_a_moment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "PAUSE_S", 0.0)


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


async def findings(url: str, queue: str | None = None, **options: str) -> dict[str, Finding]:
    return {finding.name: finding for finding in await examine(url, queue, **options)}  # type: ignore[arg-type]


async def user(redis: Redis, server: EmbeddedServer, *rights: str) -> str:
    """The address of somebody with these rights alone."""
    password = secrets.token_hex(8)
    await redis.execute_command("ACL", "SETUSER", "jit", "reset", "on", f">{password}", *rights)
    return f"redis://jit:{password}@127.0.0.1:{server.port}/0"


async def all_keys(redis: Redis) -> set[bytes]:
    return {key async for key in redis.scan_iter(count=1_000)}


async def test_our_own_server_is_healthy_and_nothing_is_left_on_it(
    own_server: EmbeddedServer, own_redis: Redis
) -> None:
    found = await findings(own_server.url)
    assert {name: one.verdict for name, one in found.items()} == dict.fromkeys(found, "ok")
    assert next(iter(found)) == "reachable"
    assert {"commands", "role", "cluster", "eviction", "memory", "persistence", "fsync", "replicas"} <= set(found)
    assert {"pubsub", "clock", "latency", "rights"} <= set(found)
    assert await all_keys(own_redis) == set()
    assert own_server.password not in "".join(one.line() for one in found.values())


async def test_settings_that_lose_jobs_are_named(own_server: EmbeddedServer, own_redis: Redis) -> None:
    await own_redis.config_set("appendfsync", "no")
    assert (await findings(own_server.url))["fsync"].verdict == "warn"
    await own_redis.config_set("appendonly", "no")
    await own_redis.config_set("maxmemory", "1gb")
    await own_redis.config_set("maxmemory-policy", "allkeys-lru")
    await own_redis.config_set("client-output-buffer-limit", "pubsub 0 0 0")
    found = await findings(own_server.url)
    bad = {name: one.verdict for name, one in found.items() if one.verdict != "ok"}
    assert bad == {"persistence": "fail", "eviction": "fail", "pubsub": "warn"}


async def test_writes_that_wait_for_replicas_that_are_not_there_fail(
    own_server: EmbeddedServer, own_redis: Redis
) -> None:
    await own_redis.config_set("min-replicas-to-write", "1")
    found = await findings(own_server.url)
    assert found["replicas"].verdict == "fail"
    assert found["rights"].verdict == "fail"
    assert "NOREPLICAS" in found["rights"].found or "not enough good replicas" in found["rights"].found.lower()


async def test_a_replica_is_told_from_a_primary(own_server: EmbeddedServer, own_redis: Redis) -> None:
    await own_redis.replicaof("127.0.0.1", "1")
    found = await findings(own_server.url)
    assert found["role"].found == "a replica of 127.0.0.1:1, which refuses writes"
    assert (found["role"].verdict, found["rights"].verdict) == ("fail", "fail")


async def test_what_a_managed_server_hides_is_unknown_and_fails_nothing(
    own_server: EmbeddedServer, own_redis: Redis
) -> None:
    url = await user(own_redis, own_server, "~*", "&*", "+@all", "-@dangerous", "-@admin", "-command")
    found = await findings(url)
    assert found["reachable"].found == f"a server at 127.0.0.1:{own_server.port}"
    unknown = {name for name, one in found.items() if one.verdict == "unknown"}
    hidden = {"commands", "role", "cluster", "eviction", "memory", "persistence", "fsync", "replicas", "pubsub"}
    assert unknown == hidden
    assert found["rights"].verdict == "ok", "the canary needs none of it"


async def test_the_rights_of_one_queue_are_tried_on_that_queues_keys_and_disturb_nobody(
    own_server: EmbeddedServer, own_redis: Redis, queue_name: str
) -> None:
    driver = Driver(Queue(own_redis, queue_name))
    id = await driver.enqueue()
    await write_card(own_redis, queue_name, QueueCard(model="m", max_model_len=9, vocab_size=9))
    before = await all_keys(own_redis)
    tag = f"{{jitney:{queue_name}}}:*"
    url = await user(own_redis, own_server, f"~{tag}", "~jitney:*", f"&{tag}", "+@all", "-@dangerous", "-@admin")
    assert (await findings(url))["rights"].found.startswith(f"a job beside queue {queue_name} went all the way")
    assert (await check_rights(url, queue_name)).verdict == "ok"
    elsewhere = await check_rights(url, None)
    assert elsewhere.verdict == "fail"
    assert "name one with --queue" in elsewhere.advice
    assert await all_keys(own_redis) == before
    assert await own_redis.hkeys(QUEUES) == [queue_name.encode()]
    assert (await driver.claim_one()).id == id


@pytest.mark.parametrize(
    ("lacks", "step"),
    [
        (("&nothing",), "subscribe"),
        (("&*", "-publish"), "publish"),
        (("&*", "-xadd"), "enqueue"),
        (("&*", "-blpop"), "wait for work"),
        (("&*", "-hgetall"), "read and write the list of queues"),
        (("&*", "-evalsha"), "enqueue"),
        (("&*", "-zremrangebyscore"), "keep house"),
    ],
)
async def test_a_missing_right_is_named_with_what_it_breaks(
    own_server: EmbeddedServer, own_redis: Redis, lacks: tuple[str, ...], step: str
) -> None:
    url = await user(own_redis, own_server, "~*", "+@all", "-@dangerous", "-@admin", *lacks)
    finding = await check_rights(url, None)
    assert finding.verdict == "fail"
    assert finding.found.startswith(f"could not {step}: ")
    assert "+@all -@dangerous -@admin" in finding.advice
    assert await all_keys(own_redis) == set(), "what it had made by then is gone"


async def test_a_full_server_is_no_question_of_rights(own_server: EmbeddedServer, own_redis: Redis) -> None:
    await own_redis.config_set("maxmemory", "1")
    found = await findings(own_server.url)
    assert (found["memory"].verdict, found["rights"].verdict) == ("warn", "fail")
    assert found["rights"].found.startswith("could not enqueue: ")
    assert found["rights"].advice == ""


async def test_a_wrong_password_and_a_closed_port_are_told_apart(own_server: EmbeddedServer) -> None:
    for url, advice in (
        (f"redis://:wrong@127.0.0.1:{own_server.port}/0", "give user and password"),
        (f"redis://127.0.0.1:{own_server.port}/0", "give user and password"),
        ("redis://:secret@127.0.0.1:1/0", "start it"),
    ):
        (finding,) = await examine(url)
        assert (finding.name, finding.verdict) == ("reachable", "fail")
        assert finding.advice.startswith(advice)
        assert "wrong" not in finding.line()
        assert "secret" not in finding.line()


async def test_strict_durability_is_checked_for_those_who_ask_for_it(
    own_server: EmbeddedServer, own_redis: Redis
) -> None:
    assert "strict" not in await findings(own_server.url)
    await own_redis.config_set("appendfsync", "always")
    assert (await findings(own_server.url, durability="strict"))["strict"].verdict == "ok"
    await own_redis.config_set("appendonly", "no")
    finding = (await findings(own_server.url, durability="strict"))["strict"]
    assert finding.verdict == "fail"
    assert "keeps no append-only file" in finding.found


async def test_what_is_no_queue_is_refused(own_server: EmbeddedServer) -> None:
    with pytest.raises(InvalidJob, match="queue name"):
        await examine(own_server.url, "*")


async def test_a_server_is_asked_which_commands_it_knows(own_redis: Redis) -> None:
    seen = await see(own_redis)
    assert {name for name, is_known in seen.commands.items() if not is_known} <= {"waitaof"}
    assert seen.commands["waitaof"] == (not seen.info["redis_version"].startswith("7.0."))


def test_every_command_of_the_scripts_is_asked_for() -> None:
    """What a script calls and a server lacks must not come out first in the middle of a job."""
    called = {
        name.lower()
        for script in scripts.NAMES
        for name in re.findall(r"redis\.p?call\('(\w+)'", scripts.load(script).source)
    }
    assert len(called) > 25
    assert called <= set(COMMANDS)
