"""`jitney top`: the batch on a terminal, straight from Redis: workers, seats, what waits, how fast, what died."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import Annotated, Final

import typer
from redis.exceptions import RedisError
from rich.console import Console
from rich.live import Live

from jitney.async_client import AsyncClient
from jitney.errors import QueueUnavailable
from jitney.overview import Lookout, Overview
from jitney.plugins import outcomes
from jitney.settings import client_settings
from jitney.top_view import draw, plain

BETWEEN_TWO_LOOKS_S: Final = 1.0
"""Of `--once`: a rate is a difference."""


def top(
    once: Annotated[bool, typer.Option("--once", help="Print it as plain text, and leave.")] = False,
    queue: Annotated[str | None, typer.Option(help="A queue, alias or model (default: all).")] = None,
    interval: Annotated[float, typer.Option(min=0.2, max=60.0, help="Seconds between two looks.")] = 0.5,
    redis_url: Annotated[
        str | None, typer.Option(help="Redis to talk to (default: as for the other commands).")
    ] = None,
) -> None:
    """Watch the batch: who sits where, what waits, how fast it goes. Needs Redis alone. Ctrl-C leaves."""
    with outcomes():
        console = Console()
        if once:
            typer.echo("\n".join(plain(asyncio.run(_twice(redis_url, queue)))))
        elif console.is_terminal:
            asyncio.run(_watch(redis_url, queue, console, interval))
        else:
            raise typer.BadParameter("standard output is no terminal: add --once", param_hint="top")


async def _twice(redis_url: str | None, queue: str | None) -> Overview:
    async with _client(redis_url) as client:
        lookout, only = Lookout(client.redis), None if queue is None else (await client.card(queue))[0]
        await _look(lookout, only)
        await asyncio.sleep(BETWEEN_TWO_LOOKS_S)
        return await _look(lookout, only)


async def _watch(redis_url: str | None, queue: str | None, console: Console, interval_s: float) -> None:
    """Until it is asked to stop. A server that is away for a moment is shown as such, and looked at again."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with _client(redis_url) as client:
        lookout, only = Lookout(client.redis), None if queue is None else (await client.card(queue))[0]
        overview, trouble = await _look(lookout, only), ""
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while not stop.is_set():
                live.update(draw(overview, console.size, trouble), refresh=True)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), interval_s)
                try:
                    overview, trouble = await _look(lookout, only), ""
                except QueueUnavailable as error:
                    trouble = str(error)


async def _look(lookout: Lookout, only: str | None) -> Overview:
    try:
        return await lookout.look(only)
    except (RedisError, OSError) as error:
        raise QueueUnavailable(f"Redis does not answer: {type(error).__name__}") from error


def _client(redis_url: str | None) -> AsyncClient:
    return AsyncClient(client_settings().url if redis_url is None else redis_url, name="jitney-top")
