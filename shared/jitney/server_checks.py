"""What is safe and what is not in a server's settings. Pure: from what the server says to a verdict.

Never by version number: a server is asked what it can and how it is set up. Where it does not say, as managed
servers often do not, the verdict is `unknown`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from jitney.checks import Finding
from jitney.topology import SERVED, num_nodes

MIB: Final = 1 << 20
FULL_SHARE: Final = 0.8
LEAST_PUBSUB_BYTES: Final = 1 * MIB
HIDDEN: Final = "the server does not say"
LOOK: Final = "look it up in its configuration or console"

SETTINGS: Final = (
    "appendonly",
    "appendfsync",
    "no-appendfsync-on-rewrite",
    "min-replicas-to-write",
    "client-output-buffer-limit",
)

COMMANDS: Final = (
    *("evalsha", "script", "subscribe", "publish", "time", "del", "exists", "set", "get", "pexpire", "pttl"),
    *("scan", "type", "hset", "hsetnx", "hget", "hmget", "hgetall", "hincrby", "hdel", "llen", "rpush", "blpop"),
    *("xadd", "xrange", "xrevrange", "xdel", "xlen"),
    *("zadd", "zrem", "zcard", "zcount", "zscore", "zincrby", "zrange", "zrangebyscore", "zremrangebyscore"),
)
"""Those of the scripts, and what clients and workers call besides."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a server says of itself; empty where it does not.

    info: its INFO. settings: of SETTINGS, those it shows. commands: those of COMMANDS and WAITAOF, and whether it
    knows them.
    """

    info: Mapping[str, Any]
    settings: Mapping[str, str]
    commands: Mapping[str, bool]


def check_commands(seen: Seen) -> Finding:
    if not seen.commands:
        return Finding("commands", "unknown", f"{HIDDEN} which commands it knows", "the rights below try them")
    missing = [name for name in COMMANDS if not seen.commands.get(name)]
    if missing:
        return Finding(
            "commands", "fail", f"it does not know {', '.join(missing)}", "use Redis 7 or Valkey 8, or later"
        )
    strict = "with" if seen.commands.get("waitaof") else "without"
    return Finding("commands", "ok", f"all there, {strict} WAITAOF")


def check_role(seen: Seen) -> Finding:
    role = seen.info.get("role")
    if role is None:
        return Finding("role", "unknown", HIDDEN, LOOK)
    if role in ("slave", "replica"):
        primary = f"{seen.info.get('master_host')}:{seen.info.get('master_port')}"
        return Finding("role", "fail", f"a replica of {primary}, which refuses writes", "give the primary's address")
    return Finding("role", "ok", "primary")


def check_eviction(seen: Seen) -> Finding:
    policy, limit = seen.info.get("maxmemory_policy"), seen.info.get("maxmemory")
    if policy is None:
        return Finding("eviction", "unknown", HIDDEN, f"{LOOK}: maxmemory-policy must be noeviction")
    if policy == "noeviction":
        return Finding("eviction", "ok", "noeviction")
    if limit == 0:
        found = f"{policy}, which does nothing until maxmemory is set"
        return Finding("eviction", "warn", found, "set maxmemory-policy noeviction")
    what = "leases, results and idempotency keys" if str(policy).startswith("volatile") else "accepted jobs"
    return Finding("eviction", "fail", f"{policy} throws {what} away", "set maxmemory-policy noeviction")


def check_memory(seen: Seen) -> Finding:
    used, limit = seen.info.get("used_memory"), seen.info.get("maxmemory")
    if used is None or limit is None:
        return Finding("memory", "unknown", HIDDEN, LOOK)
    if limit == 0:
        return Finding("memory", "ok", f"{_mib(used)} used, no limit but the machine's")
    found = f"{_mib(used)} of {_mib(limit)} used"
    if used > FULL_SHARE * limit:
        return Finding("memory", "warn", found, "raise maxmemory, or new jobs will be refused soon")
    return Finding("memory", "ok", found)


def check_persistence(seen: Seen) -> Finding:
    is_on = seen.info.get("aof_enabled")
    if is_on is None:
        return Finding("persistence", "unknown", HIDDEN, f"{LOOK}: without appendonly yes a restart loses jobs")
    if not is_on:
        if _num_replicas(seen) > 0:
            found = "no append-only file: jobs live as long as one of the replicas can take over"
            return Finding("persistence", "warn", found, "set appendonly yes")
        return Finding("persistence", "fail", "no append-only file: a restart loses every job", "set appendonly yes")
    if seen.info.get("aof_last_write_status", "ok") != "ok":
        return Finding("persistence", "fail", "the append-only file cannot be written", "look at its disk: is it full?")
    if seen.info.get("aof_last_bgrewrite_status", "ok") != "ok":
        found = "the append-only file could not be rewritten and only grows"
        return Finding("persistence", "warn", found, "look at the server's log, its disk and its memory")
    return Finding("persistence", "ok", "append-only file")


def check_fsync(seen: Seen) -> Finding:
    if seen.info.get("aof_enabled") == 0:
        return Finding("fsync", "ok", "nothing to flush, see persistence")
    fsync = seen.settings.get("appendfsync")
    if fsync is None:
        return Finding(
            "fsync", "unknown", HIDDEN, f"{LOOK}: with appendfsync everysec a power cut loses a second of jobs"
        )
    if fsync == "always":
        return Finding("fsync", "ok", "always: an accepted job is on disk")
    if fsync != "everysec":
        found = f"{fsync}: a power cut loses what the system had not written yet, half a minute or so"
        return Finding("fsync", "warn", found, "set appendfsync everysec or always")
    if seen.settings.get("no-appendfsync-on-rewrite") == "yes":
        found = "everysec, but not while the file is rewritten"
        return Finding("fsync", "warn", found, "set no-appendfsync-on-rewrite no")
    return Finding("fsync", "ok", "everysec: a power cut loses up to a second or two of accepted jobs")


def check_replicas(seen: Seen) -> Finding:
    if "connected_slaves" not in seen.info:
        return Finding("replicas", "unknown", HIDDEN, LOOK)
    num, asked = _num_replicas(seen), seen.settings.get("min-replicas-to-write")
    if asked is None:
        found = f"{num} connected; {HIDDEN} how many must have a write"
        return Finding("replicas", "unknown", found, f"{LOOK}: min-replicas-to-write")
    if int(asked) > num:
        found = f"{num} connected, but writes need {asked}: they are refused"
        return Finding("replicas", "fail", found, "bring the replicas back, or lower min-replicas-to-write")
    if num > 0 and int(asked) == 0:
        found = f"{num} connected, none of which has to have a write: a failover may lose accepted jobs"
        return Finding("replicas", "warn", found, "set min-replicas-to-write 1 and min-replicas-max-lag 10")
    return Finding("replicas", "ok", f"{num} connected, {asked} needed" if num else "none")


def check_pubsub(seen: Seen) -> Finding:
    limit = _pubsub_limit(seen.settings.get("client-output-buffer-limit"))
    if limit is None:
        return Finding("pubsub", "unknown", f"{HIDDEN} how far a slow reader may fall behind", LOOK)
    advice = "set client-output-buffer-limit pubsub 32mb 8mb 60"
    hard, soft, seconds = limit
    if hard == 0:
        return Finding("pubsub", "warn", "no limit: one stuck reader can fill the server's memory", advice)
    if hard < LEAST_PUBSUB_BYTES:
        found = f"readers are cut off at {hard} bytes and have to read their logs again"
        return Finding("pubsub", "warn", found, advice)
    return Finding("pubsub", "ok", f"slow readers are cut off at {_mib(hard)}, or {_mib(soft)} for {seconds} s")


def check_cluster(seen: Seen) -> Finding:
    is_on = seen.info.get("cluster_enabled")
    if is_on is None:
        return Finding("cluster", "unknown", HIDDEN, LOOK)
    if not is_on:
        return Finding("cluster", "ok", "off")
    if seen.info.get("cluster_state") != "ok":
        found = f"its state is {seen.info.get('cluster_state', 'unknown')}"
        return Finding("cluster", "fail", found, "give every slot a node")
    size = num_nodes(seen.info)
    if size > 1:
        found = f"{size} nodes share the slots, and a client here speaks to one alone"
        return Finding("cluster", "fail", found, SERVED)
    return Finding("cluster", "ok", "one node with every slot")


SERVER_CHECKS: Final[tuple[Callable[[Seen], Finding], ...]] = (
    check_commands,
    check_role,
    check_cluster,
    check_eviction,
    check_memory,
    check_persistence,
    check_fsync,
    check_replicas,
    check_pubsub,
)


def _num_replicas(seen: Seen) -> int:
    return int(seen.info.get("connected_slaves", 0))


def _pubsub_limit(text: str | None) -> tuple[int, int, int] | None:
    """Bytes at which a subscriber is cut, bytes at which after a while, and that while in seconds."""
    words = (text or "").split()
    for start, word in enumerate(words):
        if word == "pubsub" and len(words) >= start + 4:
            hard, soft, seconds = (int(number) for number in words[start + 1 : start + 4])
            return hard, soft, seconds
    return None


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.0f} MiB" if num_bytes >= 10 * MIB else f"{num_bytes / MIB:.1f} MiB"
