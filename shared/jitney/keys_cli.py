"""`jitney keys`: let somebody in over HTTP, see who may come in, put somebody out."""

from __future__ import annotations

from typing import Annotated

import orjson
import typer

from jitney.apikeys import SCOPES, ApiKey, add_key, list_keys, make_key, revoke_key
from jitney.ask_redis import ask_redis
from jitney.dead_view import when
from jitney.plugins import outcomes

keys = typer.Typer(name="keys", no_args_is_help=True, help="API keys: add, list, revoke.")

RedisUrl = Annotated[str | None, typer.Option(help="Redis to talk to (default: as for the other commands).")]
HEADINGS = ("name", "tenant", "scopes", "created")


@keys.command()
def add(
    name: Annotated[str, typer.Option(help="What the key is called in lists and logs.")],
    tenant: Annotated[str, typer.Option(help="Whose jobs its holder starts and sees.")] = "-",
    scope: Annotated[list[str] | None, typer.Option(help=f"{', '.join(SCOPES)}; may be repeated.")] = None,
    for_settings: Annotated[
        bool, typer.Option("--for-settings", help="Write nothing to Redis; print the entry for JITNEY_API__KEYS.")
    ] = False,
    redis_url: RedisUrl = None,
) -> None:
    """Make a key and print it, once: only its hash is kept. Without --scope it may generate and read."""
    with outcomes():
        secret, key = make_key(name, tenant=tenant, scopes=scope or ("generate", "read"))
        if not for_settings:
            ask_redis(redis_url, lambda redis: add_key(redis, key))
    typer.echo(secret)
    if for_settings:
        typer.echo(_for_settings(key))
    typer.echo("keep it now, it cannot be shown again; the API asks for keys under JITNEY_API__ACCESS=keys", err=True)


@keys.command("list")
def list_all(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")] = False,
    redis_url: RedisUrl = None,
) -> None:
    """List the keys that Redis knows; those of the API's settings are not among them."""
    with outcomes():
        found = ask_redis(redis_url, list_keys)
    if as_json:
        for key in found:
            typer.echo(orjson.dumps(key.model_dump()).decode())
        return
    if not found:
        typer.echo("no keys", err=True)
        return
    rows = [HEADINGS, *((key.name, key.tenant, ",".join(key.scopes), when(key.created)) for key in found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    for row in rows:
        typer.echo("  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip())


@keys.command()
def revoke(name: Annotated[str, typer.Argument(help="The key's name.")], redis_url: RedisUrl = None) -> None:
    """Put the holder of a key out; every API process notices within its `key_cache_s`."""
    with outcomes():
        was_there = ask_redis(redis_url, lambda redis: revoke_key(redis, name))
    if not was_there:
        typer.echo(f"error: no key is called {name[:64]!r}", err=True)
        raise typer.Exit(1)
    typer.echo(f"{name} revoked")


def _for_settings(key: ApiKey) -> str:
    return orjson.dumps(key.model_dump(exclude={"created"})).decode()
