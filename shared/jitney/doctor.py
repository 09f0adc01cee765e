"""`jitney doctor`: is this server, and this machine, fit for jobs that must not be lost?"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import urlsplit

import redis.exceptions
import typer
from orjson import dumps

from jitney.canary import check_rights
from jitney.cards import list_cards
from jitney.checks import Finding, checks_of_other_rooms
from jitney.clock import check_clock, check_latency, take_samples
from jitney.connection import Redis, connect_once
from jitney.durability import Durability, find_proof
from jitney.errors import QueueUnavailable, SettingsError
from jitney.keys import Keys, check_queue_name
from jitney.plugins import outcomes
from jitney.server_checks import COMMANDS, SERVER_CHECKS, SETTINGS, Seen
from jitney.settings import client_settings, usable_url
from jitney.topology import cluster_facts

SILENT = (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError)


def doctor(
    redis_url: Annotated[
        str | None, typer.Option(help="Redis to examine (default: as for the other commands).")
    ] = None,
    queue: Annotated[str | None, typer.Option(help="Try the rights of this queue's keys.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")] = False,
) -> None:
    """Check Redis, the model's files and the device, and say what to change. Exit code 1 if something fails."""
    with outcomes():
        settings = client_settings()
        url = usable_url(redis_url or settings.url)
        findings = asyncio.run(examine(url, queue or settings.queue, settings.durability))
        findings += checks_of_other_rooms()
    for finding in findings:
        line = {name: getattr(finding, name) for name in ("name", "verdict", "found", "advice")}
        typer.echo(dumps(line).decode() if as_json else finding.line())
    if any(finding.verdict == "fail" for finding in findings):
        raise typer.Exit(1)


async def examine(url: str, queue: str | None = None, durability: Durability = "default") -> list[Finding]:
    """Everything about the server. queue: whose rights to try; None = the only one there is, or none of them.

    durability: what clients ask for. Raises InvalidJob for what is no name of a queue.
    """
    if queue is not None:
        check_queue_name(queue)
    client = connect_once(url, name="jitney-doctor")
    try:
        return await _examine(client, url, queue, durability)
    finally:
        await client.aclose()


async def _examine(client: Redis, url: str, queue: str | None, durability: Durability) -> list[Finding]:
    try:
        await client.ping()
    except (redis.exceptions.RedisError, OSError) as error:
        return [_unreachable(url, error)]
    try:
        seen = await see(client)
        findings = [_reachable(url, seen.info), *(check(seen) for check in SERVER_CHECKS)]
        if durability == "strict":
            findings.append(await _strict(client))
        findings += await _clock(client)
        return [*findings, await check_rights(url, queue or await _only_queue(client))]
    except SILENT as error:
        return [Finding("reachable", "fail", f"the connection broke while it was examined: {error}")]


async def see(client: Redis) -> Seen:
    """What the server says, as far as it says it."""
    info = await _allowed(client, "INFO")
    cluster = await cluster_facts(client) if isinstance(info, dict) and info.get("cluster_enabled") else {}
    try:
        settings: Mapping[Any, Any] = await client.config_get(*SETTINGS)
    except redis.exceptions.ResponseError:
        settings = {}
    asked = (*COMMANDS, "waitaof")
    known = await _allowed(client, "COMMAND INFO", *asked)
    return Seen(
        info=(info if isinstance(info, dict) else {}) | cluster,
        settings=dict(settings),
        commands={} if known is None else {name: one is not None for name, one in zip(asked, known, strict=True)},
    )


async def _allowed(client: Redis, *command: str) -> Any:
    """The answer; None where this user may not ask, or the server does not know the question."""
    try:
        return await client.execute_command(*command)  # type: ignore[no-untyped-call]
    except redis.exceptions.ResponseError:
        return None


async def _strict(client: Redis) -> Finding:
    try:
        proof = await find_proof(client, Keys(f"doctor-{secrets.token_hex(6)}"))
    except SettingsError as error:
        return Finding("strict", "fail", str(error))
    except (redis.exceptions.ResponseError, QueueUnavailable) as error:
        return Finding("strict", "unknown", str(error))
    how = "every answer comes after the disk" if proof == "always" else "WAITAOF waits for the disk"
    return Finding("strict", "ok", f"durability=strict holds: {how}")


async def _clock(client: Redis) -> list[Finding]:
    try:
        samples = await take_samples(client)
    except redis.exceptions.ResponseError as error:
        return [Finding("clock", "unknown", str(error), "allow the command TIME")]
    return [check_clock(samples), check_latency(samples)]


async def _only_queue(client: Redis) -> str | None:
    try:
        names = list(await list_cards(client))
    except redis.exceptions.ResponseError:
        return None
    return names[0] if len(names) == 1 else None


def _reachable(url: str, info: Mapping[str, Any]) -> Finding:
    version = info.get("valkey_version") or info.get("redis_version")
    name = f"{str(info.get('server_name') or 'redis').capitalize()} {version}" if version else "a server"
    return Finding("reachable", "ok", f"{name} at {_place(url)}")


def _unreachable(url: str, error: Exception) -> Finding:
    if isinstance(error, redis.exceptions.AuthenticationError) or "NOAUTH" in str(error):
        advice = "give user and password in the address: redis://user:password@host:port/0"
    elif isinstance(error, redis.exceptions.BusyLoadingError):
        advice = "wait until it has loaded its file"
    else:
        advice = "start it (`jitney up` brings its own), or give --redis-url or JITNEY_REDIS_URL"
    return Finding("reachable", "fail", f"{_place(url)} does not answer: {error}", advice)


def _place(url: str) -> str:
    """The address without what is secret in it."""
    parts = urlsplit(url)
    return parts.path if parts.scheme == "unix" else f"{parts.hostname}:{parts.port or 6379}"
