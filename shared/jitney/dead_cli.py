"""`jitney dead`: look at dead letters, queue them anew, drop them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Annotated, Any

import typer

from jitney.async_client import AsyncClient
from jitney.cards import list_cards
from jitney.dead_view import Letter, as_json, as_page, as_table, name_of, read_letter
from jitney.errors import InvalidJob, JobNotFound
from jitney.keys import queue_of
from jitney.plugins import outcomes
from jitney.queue import Queue
from jitney.redis_link import answering
from jitney.settings import client_settings

dead = typer.Typer(name="dead", no_args_is_help=True, help="Dead letters: list, show, requeue, drop.")

Ids = Annotated[list[str] | None, typer.Argument(metavar="ID", help="Ids of jobs, or of entries without one.")]
All = Annotated[bool, typer.Option("--all", help="Every dead letter of the queue.")]
QueueOption = Annotated[str | None, typer.Option("--queue", help="A queue, alias or model.")]
RedisUrl = Annotated[str | None, typer.Option(help="Redis to talk to (default: as for the other commands).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")]


@dead.command("list")
def list_dead(
    queue: QueueOption = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many of a queue, the youngest.")] = 100,
    as_json_lines: AsJson = False,
    redis_url: RedisUrl = None,
) -> None:
    """List dead letters, the youngest first: of one queue, or of all."""
    letters, num_hidden = _run(_list(redis_url, queue, limit))
    if as_json_lines:
        for letter in letters:
            typer.echo(as_json(letter, whole=False).decode())
    elif letters:
        typer.echo("\n".join(as_table(letters)))
    if not letters:
        typer.echo("no dead letters", err=True)
    if num_hidden:
        typer.echo(f"{num_hidden} older ones are not shown: --limit {limit + num_hidden}", err=True)


@dead.command()
def show(
    id: Annotated[str, typer.Argument(metavar="ID", help="The id of a job, or of an entry without one.")],
    queue: QueueOption = None,
    as_json_line: AsJson = False,
    redis_url: RedisUrl = None,
) -> None:
    """Show everything that is known of one dead letter, the text it had said included."""

    async def read() -> Letter:
        async with _queue_for(redis_url, queue, [id]) as found:
            return await read_letter(found, await found.find_dead(id))

    letter = _run(read())
    typer.echo(as_json(letter, whole=True).decode() if as_json_line else "\n".join(as_page(letter)))


@dead.command()
def requeue(ids: Ids = None, every: All = False, queue: QueueOption = None, redis_url: RedisUrl = None) -> None:
    """Queue dead letters anew, each as another job; prints the old id and the new one."""

    async def one(found: Queue, id: str) -> str:
        return await found.requeue_dead(id)

    _each(ids or [], every, queue, redis_url, one)


@dead.command()
def drop(ids: Ids = None, every: All = False, queue: QueueOption = None, redis_url: RedisUrl = None) -> None:
    """Forget dead letters; prints the ids."""

    async def one(found: Queue, id: str) -> str:
        await found.drop_dead(id)
        return ""

    _each(ids or [], every, queue, redis_url, one)


async def _list(redis_url: str | None, name: str | None, limit: int) -> tuple[list[Letter], int]:
    letters, num_hidden = list[Letter](), 0
    async with _client(redis_url) as client:
        names = [(await client.card(name))[0]] if name else list(await list_cards(client.redis))
        for queue in map(client.queue, names):
            found = await queue.dead(count=limit)
            letters += [Letter(queue.name, entry) for entry in found]
            num_hidden += max(0, await queue.count_dead() - limit)
    return sorted(letters, key=lambda letter: letter.dead.buried_at, reverse=True), num_hidden


def _each(
    ids: list[str], every: bool, name: str | None, redis_url: str | None, one: Callable[[Queue, str], Awaitable[str]]
) -> None:
    if bool(ids) == every:
        raise typer.BadParameter("give ids, or --all")
    if _run(_do_each(ids, name, redis_url, one)):
        raise typer.Exit(1)


async def _do_each(
    ids: list[str], name: str | None, redis_url: str | None, one: Callable[[Queue, str], Awaitable[str]]
) -> int:
    """Do it to each, one after the other; returns how many could not be done. A full queue ends it."""
    num_failed = 0
    async with _queue_for(redis_url, name, ids) as queue:
        # Known beforehand: a job that is requeued and fails at once would come round for ever.
        buried = [] if ids else [entry async for entry in queue.each_dead()]
        for id, shown in [*zip(ids, ids, strict=True), *((entry.entry_id, name_of(entry)) for entry in buried)]:
            try:
                typer.echo(f"{shown} {await one(queue, id)}".rstrip())
            except (InvalidJob, JobNotFound) as error:
                typer.echo(f"error: {error}", err=True)
                num_failed += 1
    return num_failed


@contextlib.asynccontextmanager
async def _queue_for(redis_url: str | None, name: str | None, ids: list[str]) -> AsyncIterator[Queue]:
    """The queue that is named, else the one that the ids are of, else the only one there is."""
    async with _client(redis_url) as client:
        if name is None:
            name = _queue_of_all(ids)
            yield client.queue(name if name is not None else (await client.card())[0])
        else:
            yield client.queue((await client.card(name))[0])


def _queue_of_all(ids: list[str]) -> str | None:
    """None for ids that name no queue. Raises InvalidJob for ids of several."""
    names = set[str]()
    for id in ids:
        with contextlib.suppress(InvalidJob):
            names.add(queue_of(id))
    if len(names) > 1:
        raise InvalidJob(f"the ids are of several queues ({', '.join(sorted(names))}): one at a time", param="id")
    return names.pop() if names else None


@contextlib.asynccontextmanager
async def _client(redis_url: str | None) -> AsyncIterator[AsyncClient]:
    async with answering(), AsyncClient(redis_url or client_settings().url, name="jitney-cli") as client:
        yield client


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    with outcomes():
        return asyncio.run(work)
