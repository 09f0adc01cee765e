"""`jitney webhooks`: see what endpoints have not been told, have it told anew, forget it; and make a secret."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Annotated

import orjson
import typer

from jitney.ask_redis import ask_redis
from jitney.cards import list_cards
from jitney.connection import Redis
from jitney.dead_view import printable, when
from jitney.keys import Keys
from jitney.plugins import outcomes
from jitney.webhooks.announcements import BATCHES, Announcements, Kept
from jitney.webhooks.events import event_type
from jitney.webhooks.settings import SECRET_PREFIX

webhooks = typer.Typer(name="webhooks", no_args_is_help=True, help="Webhooks: list, retry, drop; make a secret.")

Ids = Annotated[list[str] | None, typer.Argument(metavar="ID", help="Ids of jobs or batches.")]
All = Annotated[bool, typer.Option("--all", help="Every one that was given up.")]
RedisUrl = Annotated[str | None, typer.Option(help="Redis to talk to (default: as for the other commands).")]
HEADINGS = ("id", "event", "state", "when", "attempts", "endpoint", "trouble")
NUM_ALL = 1_000_000


@webhooks.command("list")
def list_kept(
    limit: Annotated[int, typer.Option(min=1, help="At most so many of each state and queue.")] = 100,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")] = False,
    redis_url: RedisUrl = None,
) -> None:
    """List announcements: those that were given up (dead), and those that wait for their next attempt."""
    with outcomes():
        found = ask_redis(redis_url, lambda redis: _kept(redis, limit))
    if as_json:
        for one in found:
            typer.echo(orjson.dumps({**asdict(one), "event": event_type(one.object, one.ending)}).decode())
        return
    if not found:
        typer.echo("no announcements", err=True)
        return
    rows = [HEADINGS, *map(_row, found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    for row in rows:
        typer.echo("  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip())


@webhooks.command()
def retry(ids: Ids = None, every: All = False, redis_url: RedisUrl = None) -> None:
    """Tell endpoints anew what was given up; prints the ids."""
    _each(ids or [], every, redis_url, lambda outbox, id: outbox.retry(id), "was not given up")


@webhooks.command()
def drop(ids: Ids = None, every: All = False, redis_url: RedisUrl = None) -> None:
    """Forget announcements; prints the ids."""
    _each(ids or [], every, redis_url, lambda outbox, id: outbox.drop(id), "is not there")


@webhooks.command()
def secret() -> None:
    """Make a secret for JITNEY_WEBHOOKS__SECRET and for those who verify; nothing is written anywhere."""
    typer.echo(SECRET_PREFIX + base64.b64encode(secrets.token_bytes(32)).decode())


def _row(one: Kept) -> tuple[str, ...]:
    event = event_type(one.object, one.ending)
    shown = (one.id, event, one.state, when(one.when), str(one.num_attempts), one.url, one.trouble)
    return tuple(map(printable, shown))


async def _kept(redis: Redis, limit: int) -> list[Kept]:
    prefixes = [BATCHES, *(Keys(queue).prefix for queue in await list_cards(redis))]
    return [one for prefix in prefixes for one in await Announcements(redis, prefix).kept(limit)]


def _each(
    ids: list[str],
    every: bool,
    redis_url: str | None,
    one: Callable[[Announcements, str], Awaitable[bool]],
    otherwise: str,
) -> None:
    if bool(ids) == every:
        raise typer.BadParameter("give ids, or --all")

    async def do(redis: Redis) -> int:
        dead = [] if ids else [kept.id for kept in await _kept(redis, NUM_ALL) if kept.state == "dead"]
        num_failed = 0
        for id in ids or dead:
            if await one(Announcements.of(redis, id), id):
                typer.echo(id)
            else:
                typer.echo(f"error: {id[:96]} {otherwise}", err=True)
                num_failed += 1
        return num_failed

    with outcomes():
        if ask_redis(redis_url, do):
            raise typer.Exit(1)
