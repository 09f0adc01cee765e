"""From what a server says to a verdict: every unsafe setting is named, and what cannot be seen is not called safe."""

from __future__ import annotations

from typing import Any

import pytest

from jitney.checks import Finding
from jitney.clock import Sample, check_clock, check_latency
from jitney.server_checks import COMMANDS, SERVER_CHECKS, Seen

INFO: dict[str, Any] = {
    "role": "master",
    "connected_slaves": 0,
    "maxmemory": 0,
    "maxmemory_policy": "noeviction",
    "used_memory": 3 << 20,
    "aof_enabled": 1,
    "aof_last_write_status": "ok",
    "aof_last_bgrewrite_status": "ok",
    "cluster_enabled": 0,
}
SETTINGS = {
    "appendfsync": "always",
    "no-appendfsync-on-rewrite": "no",
    "min-replicas-to-write": "0",
    "client-output-buffer-limit": "normal 0 0 0 slave 268435456 67108864 60 pubsub 33554432 8388608 60",
}
KNOWN = dict.fromkeys((*COMMANDS, "waitaof"), True)
GOOD = Seen(INFO, SETTINGS, KNOWN)
SILENT = Seen({}, {}, {})


def findings(seen: Seen) -> dict[str, Finding]:
    return {finding.name: finding for finding in (check(seen) for check in SERVER_CHECKS)}


def test_a_safe_server_passes_every_check_without_advice() -> None:
    assert [(one.verdict, one.advice) for one in findings(GOOD).values()] == [("ok", "")] * len(SERVER_CHECKS)


def test_of_a_server_that_says_nothing_nothing_is_known() -> None:
    assert [one.verdict for one in findings(SILENT).values()] == ["unknown"] * len(SERVER_CHECKS)
    assert all(one.advice for one in findings(SILENT).values())


@pytest.mark.parametrize(
    ("check", "info", "settings", "verdict", "found"),
    [
        ("eviction", {"maxmemory_policy": "allkeys-lru", "maxmemory": 9}, {}, "fail", "throws accepted jobs away"),
        ("eviction", {"maxmemory_policy": "volatile-ttl", "maxmemory": 9}, {}, "fail", "throws leases, results"),
        ("eviction", {"maxmemory_policy": "allkeys-lru"}, {}, "warn", "does nothing until maxmemory is set"),
        ("memory", {"used_memory": 81 << 20, "maxmemory": 100 << 20}, {}, "warn", "81 MiB of 100 MiB"),
        ("memory", {"used_memory": 79 << 20, "maxmemory": 100 << 20}, {}, "ok", "79 MiB of 100 MiB"),
        ("persistence", {"aof_enabled": 0}, {}, "fail", "a restart loses every job"),
        ("persistence", {"aof_enabled": 0, "connected_slaves": 1}, {}, "warn", "one of the replicas"),
        ("persistence", {"aof_last_write_status": "err"}, {}, "fail", "cannot be written"),
        ("persistence", {"aof_last_bgrewrite_status": "err"}, {}, "warn", "could not be rewritten"),
        ("fsync", {}, {"appendfsync": "everysec"}, "ok", "loses up to a second or two"),
        ("fsync", {}, {"appendfsync": "everysec", "no-appendfsync-on-rewrite": "yes"}, "warn", "while the file is"),
        ("fsync", {}, {"appendfsync": "no"}, "warn", "half a minute"),
        ("fsync", {"aof_enabled": 0}, {"appendfsync": "everysec"}, "ok", "nothing to flush"),
        ("role", {"role": "slave", "master_host": "db", "master_port": 6379}, {}, "fail", "a replica of db:6379"),
        ("replicas", {"connected_slaves": 2}, {}, "warn", "2 connected, none of which has to have a write"),
        ("replicas", {"connected_slaves": 2}, {"min-replicas-to-write": "1"}, "ok", "2 connected, 1 needed"),
        ("replicas", {"connected_slaves": 1}, {"min-replicas-to-write": "2"}, "fail", "they are refused"),
        ("pubsub", {}, {"client-output-buffer-limit": "pubsub 0 0 0"}, "warn", "no limit"),
        ("pubsub", {}, {"client-output-buffer-limit": "pubsub 65536 0 0 normal 1 1 1"}, "warn", "at 65536 bytes"),
        ("pubsub", {}, {"client-output-buffer-limit": "pubsub"}, "unknown", "does not say"),
        ("cluster", {"cluster_enabled": 1, "cluster_state": "fail"}, {}, "fail", "its state is fail"),
        ("cluster", {"cluster_enabled": 1, "cluster_state": "ok", "cluster_size": "3"}, {}, "fail", "3 nodes"),
        ("cluster", {"cluster_enabled": 1, "cluster_state": "ok", "cluster_size": "1"}, {}, "ok", "one node"),
    ],
)
def test_a_setting_is_judged(
    check: str, info: dict[str, Any], settings: dict[str, str], verdict: str, found: str
) -> None:
    finding = findings(Seen(INFO | info, SETTINGS | settings, KNOWN))[check]
    assert finding.verdict == verdict
    assert found in finding.found
    assert (finding.advice != "") == (verdict != "ok"), "whoever is told that something is wrong is told what to do"


@pytest.mark.parametrize(("name", "setting"), [("fsync", "appendfsync"), ("replicas", "min-replicas-to-write")])
def test_a_hidden_setting_is_unknown_though_all_else_is_seen(name: str, setting: str) -> None:
    shown = {key: value for key, value in SETTINGS.items() if key != setting}
    assert findings(Seen(INFO, shown, KNOWN))[name].verdict == "unknown"


def test_missing_commands_are_named() -> None:
    finding = findings(Seen(INFO, SETTINGS, KNOWN | {"xadd": False, "zadd": False}))["commands"]
    assert (finding.verdict, finding.found) == ("fail", "it does not know xadd, zadd")
    assert findings(Seen(INFO, SETTINGS, KNOWN | {"waitaof": False}))["commands"].found == "all there, without WAITAOF"


def test_a_finding_is_one_line() -> None:
    assert Finding("role", "ok", "primary").line() == "ok       role         primary"
    assert Finding("role", "fail", "a replica", "ask the primary").line() == (
        "fail     role         a replica: ask the primary"
    )


# --- clocks ----------------------------------------------------------------------------------------------


def samples(*, offset_s: float = 0.0, round_trip_s: float = 0.001) -> list[Sample]:
    return [Sample(1e9 + at + offset_s, 1e9 + at, 50.0 + at, round_trip_s) for at in (0.0, 0.2, 0.4, 0.6)]


def test_two_clocks_that_agree_are_fine() -> None:
    finding = check_clock(samples(offset_s=0.012))
    assert (finding.verdict, finding.found) == ("ok", "+12 ms against this machine's, even for 0.6 s")


@pytest.mark.parametrize("offset_s", [2.0, -3_600.0])
def test_a_clock_that_is_wrong_is_told_with_its_error(offset_s: float) -> None:
    finding = check_clock(samples(offset_s=offset_s))
    assert finding.verdict == "warn"
    assert f"{offset_s:+.1f} s against this machine's" in finding.found


def test_a_jump_of_the_servers_clock_is_seen() -> None:
    one, two, three, four = samples()
    jumped = [one, two, Sample(three.server - 5.0, three.local, three.steady, 0.001), four]
    finding = check_clock(jumped)
    assert finding.verdict == "warn"
    assert finding.found.startswith("the server's clock jumped by -5.0 s")


def test_a_jump_of_our_own_clock_is_not_blamed_on_the_server() -> None:
    one, two, three, four = samples()
    jumped = [one, two, Sample(three.server, three.local + 7.0, three.steady, 0.001), four]
    assert check_clock(jumped).found.startswith("this machine's clock jumped by +7.0 s")


def test_a_slow_answer_is_no_jump() -> None:
    one, two, three, four = samples()
    late = Sample(three.server + 0.5, three.local, three.steady, 1.0)
    assert check_clock([one, two, late, four]).verdict == "ok"


def test_a_server_that_is_far_away_is_told() -> None:
    assert check_latency(samples(round_trip_s=0.0004)) == Finding("latency", "ok", "0.4 ms for a round trip")
    far = check_latency(samples(round_trip_s=0.08))
    assert (far.verdict, far.found) == ("warn", "80.0 ms for a round trip")
