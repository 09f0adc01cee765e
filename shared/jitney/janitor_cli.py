"""`jitney janitor`: upkeep for those who have no Celery beat."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import Annotated

import orjson
import typer

from jitney.async_client import AsyncClient
from jitney.logs import configure
from jitney.plugins import outcomes
from jitney.settings import client_settings
from jitney.upkeeping import keep_up


def janitor(
    once: Annotated[
        bool, typer.Option("--once", help="One round, printed as JSON, and leave; exit code 1 if a duty failed.")
    ] = False,
    interval: Annotated[float, typer.Option(min=1.0, max=60.0, help="Seconds between two rounds.")] = 15.0,
    redis_url: Annotated[
        str | None, typer.Option(help="Redis to talk to (default: as for the other commands).")
    ] = None,
) -> None:
    """Keep queues in order, retry webhooks, expire files, sample what waits. Any number of these may run at once."""
    with outcomes():
        configure()
        have_all_done = asyncio.run(_rounds(redis_url, None if once else interval))
    if not have_all_done:
        raise typer.Exit(1)


async def _rounds(redis_url: str | None, interval_s: float | None) -> bool:
    """interval_s: None for a single round, whose success is returned."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with AsyncClient(client_settings().url if redis_url is None else redis_url, name="jitney-janitor") as client:
        while not stop.is_set():
            done = await keep_up(client)
            if interval_s is None:
                typer.echo(orjson.dumps(done).decode())
                return None not in done.values()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), interval_s)
    return True
