"""`jitney dead` against a real server."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest
from click.testing import Result
from tests.client.scripted_worker import ScriptedWorker
from tests.conftest import WriteCard
from typer.testing import CliRunner

from jitney import AsyncClient, JobSpec
from jitney.cli import app
from jitney.connection import Redis
from jitney.dead_view import escaped, printable
from jitney.keys import JobId, new_job_id

ERROR = {"type": "server_error", "code": "nan_logits", "message": "layer 3 said NaN", "param": None}


async def buried(client: AsyncClient, worker: ScriptedWorker, *texts: str, prompt: str = "Once") -> JobId:
    job = await client.enqueue(prompt, seed=7, tenant="ann", band="bulk", metadata={"from": "test"})
    turn = await worker.take()
    await turn.say(*texts)
    assert await worker.queue.retry(job.id, turn.delivery.fence, max_tries=1, error=ERROR) == "dead"
    return job.id


async def jitney_dead(*arguments: str, redis_url: str) -> Result:
    """In a thread: the command runs an event loop of its own."""
    environment = {"JITNEY_REDIS_URL": redis_url, "TERM": "dumb"}
    ended = await asyncio.to_thread(CliRunner().invoke, app, ["dead", *arguments], env=environment)
    assert ended.exception is None or isinstance(ended.exception, SystemExit), ended.exception
    return ended


def objects(ended: Result) -> list[dict[str, Any]]:
    assert ended.exit_code == 0, ended.output
    return [orjson.loads(line) for line in ended.stdout.splitlines()]


async def test_the_list_is_a_table_with_the_youngest_first(
    redis_url: str, client: AsyncClient, worker: ScriptedWorker
) -> None:
    first, second = await buried(client, worker, "a", "b"), await buried(client, worker)
    ended = await jitney_dead("list", "--queue", worker.queue.name, redis_url=redis_url)
    heading, *lines = ended.stdout.splitlines()
    assert heading.split() == ["ID", "BURIED", "BAND", "TENANT", "REASON", "TOKENS", "LAST", "ERROR"]
    assert [line.split()[0] for line in lines] == [second, first]
    for line, num_tokens in zip(lines, "02", strict=True):
        assert line.split()[3:7] == ["bulk", "ann", "max_attempts", num_tokens]
        assert line[heading.index("LAST ERROR") :] == "nan_logits: layer 3 said NaN"
    assert (ended.exit_code, ended.stderr) == (0, "")


async def test_the_list_as_json_is_one_object_a_line(
    redis_url: str, client: AsyncClient, worker: ScriptedWorker
) -> None:
    id = await buried(client, worker, "a")
    (entry,) = await worker.queue.dead()
    listed = objects(await jitney_dead("list", "--json", "--queue", worker.queue.name, redis_url=redis_url))
    assert listed == [
        {
            "id": id,
            "entry_id": entry.entry_id,
            "queue": worker.queue.name,
            "buried_at": entry.buried_at,
            "band": "bulk",
            "tenant": "ann",
            "reason": "max_attempts",
            "error": ERROR,
            "num_tokens": 1,
        }
    ]


async def test_the_list_is_of_all_queues_unless_one_is_named(
    redis_url: str, client: AsyncClient, worker: ScriptedWorker, write_queue_card: WriteCard
) -> None:
    other = f"{worker.queue.name}-other"
    await write_queue_card(other)
    here = await buried(client, worker)
    async with AsyncClient(redis_url, queue=other) as other_client:
        there = await buried(other_client, ScriptedWorker(client.redis, other))
    everything = objects(await jitney_dead("list", "--json", redis_url=redis_url))
    assert [one["id"] for one in everything if one["id"] in (here, there)] == [there, here]
    alone = objects(await jitney_dead("list", "--json", "--queue", other, redis_url=redis_url))
    assert [one["id"] for one in alone] == [there]


async def test_a_long_list_says_what_it_does_not_show(
    redis_url: str, client: AsyncClient, worker: ScriptedWorker
) -> None:
    for _ in range(3):
        await buried(client, worker)
    ended = await jitney_dead("list", "--limit", "1", "--queue", worker.queue.name, redis_url=redis_url)
    assert len(ended.stdout.splitlines()) == 2
    assert ended.stderr == "2 older ones are not shown: --limit 3\n"


async def test_an_empty_list_is_no_output(redis_url: str, client: AsyncClient, worker: ScriptedWorker) -> None:
    for flags in ((), ("--json",)):
        ended = await jitney_dead("list", *flags, "--queue", worker.queue.name, redis_url=redis_url)
        assert (ended.exit_code, ended.stdout, ended.stderr) == (0, "", "no dead letters\n")


async def test_show_gives_the_job_and_the_text_it_had_said(
    redis_url: str, client: AsyncClient, worker: ScriptedWorker
) -> None:
    id = await buried(client, worker, "It ", "was\n", "\x1b[31mred")
    page = (await jitney_dead("show", id, redis_url=redis_url)).stdout
    assert f"id           {id}\n" in page
    assert "reason       max_attempts\n" in page
    assert "last error   nan_logits: layer 3 said NaN\n" in page
    assert "tokens       3\n" in page
    assert "tries        1\n" in page
    assert '  "prompt": "Once",\n' in page
    assert page.endswith("text so far (choice 0):\nIt was\n\\x1b[31mred\n")
    (shown,) = objects(await jitney_dead("show", id, "--json", redis_url=redis_url))
    assert shown["texts"] == ["It was\n\x1b[31mred"]
    assert (shown["job"]["prompt"], shown["job"]["sampling"]["seed"]) == ("Once", 7)
    assert (shown["job_bytes"], shown["kept"]["tries"]) == (None, "1")


async def test_show_reads_long_logs_of_several_choices_also_when_they_are_folded(
    redis_url: str, client: AsyncClient, worker: ScriptedWorker
) -> None:
    job = await client.enqueue("Once")
    turn = await worker.take()
    await turn.say(*"abc" * 100)
    await turn.say(*"xyz" * 100, choice=1)
    await worker.queue.retry(job.id, turn.delivery.fence, max_tries=1, error=ERROR)
    for _ in range(2):
        (shown,) = objects(await jitney_dead("show", job.id, "--json", redis_url=redis_url))
        assert shown["texts"] == ["abc" * 100, "xyz" * 100]
        assert await worker.queue.fold(job.id) in ("ok", "changed")
    assert not await client.redis.exists(worker.queue.keys.tokens(job.id))


async def test_what_cannot_be_read_is_shown_escaped_and_can_be_dropped(
    redis_url: str, client: AsyncClient, worker: ScriptedWorker, redis: Redis
) -> None:
    """A terminal would obey what a stranger wrote."""
    keys, evil = worker.queue.keys, b"\x1b]0;owned\x07\xff\xe2\x80\xae"
    bodiless = (await redis.xadd(keys.dead, {"b": "bulk", "t": evil, "r": "undecodable", "raw": evil})).decode()
    id = new_job_id(worker.queue.name)
    await redis.set(keys.body(id), evil)
    await redis.xadd(keys.dead, {"j": id, "b": "bulk", "t": "-", "r": "undecodable", "e": evil, "n": "x"})
    flags = ("--queue", worker.queue.name)
    for command in (("list",), ("list", "--json"), ("show", bodiless), ("show", id), ("show", id, "--json")):
        ended = await jitney_dead(*command, *flags, redis_url=redis_url)
        assert ended.exit_code == 0
        obeyed = "\x1b\x07" if "--json" in command else "\x1b\x07\u202e"
        assert not set(ended.stdout) & set(obeyed), command
    page = (await jitney_dead("show", bodiless, *flags, redis_url=redis_url)).stdout
    assert r"raw          \x1b]0;owned\x07\xff\u202e" in page
    assert r"\x1b]0;owned\x07\xff\u202e" in (await jitney_dead("show", id, redis_url=redis_url)).stdout
    (shown,) = objects(await jitney_dead("show", id, "--json", redis_url=redis_url))
    assert (shown["job"], shown["job_bytes"]) == (None, r"\x1b]0;owned\x07\xff\u202e")
    for name in (bodiless, id):
        ended = await jitney_dead("requeue", name, *flags, redis_url=redis_url)
        assert (ended.exit_code, ended.stdout, ended.stderr.count("\n")) == (1, "", 1)
        assert "cannot be queued anew" in ended.stderr
        assert (await jitney_dead("drop", name, *flags, redis_url=redis_url)).stdout == f"{name}\n"
    assert await worker.queue.dead() == []


async def test_requeue_prints_the_old_id_and_the_new_one(
    redis_url: str, client: AsyncClient, worker: ScriptedWorker
) -> None:
    old = await buried(client, worker, "a")
    ended = await jitney_dead("requeue", old, redis_url=redis_url)
    turn = await worker.take()
    assert ended.stdout == f"{old} {turn.id}\n"
    assert turn.spec.model_extra == {"of": old}
    assert turn.spec.sampling.seed == 7
    await turn.finish("done")
    assert (await client.job(turn.id).result(20.0)).text == "done"


async def test_all_are_requeued_but_for_those_that_cannot_be(
    redis_url: str, client: AsyncClient, worker: ScriptedWorker, redis: Redis
) -> None:
    ids = [await buried(client, worker) for _ in range(3)]
    await redis.delete(worker.queue.keys.body(ids[1]))
    ended = await jitney_dead("requeue", "--all", "--queue", worker.queue.name, redis_url=redis_url)
    assert ended.exit_code == 1
    assert [line.split()[0] for line in ended.stdout.splitlines()] == [ids[0], ids[2]]
    assert ended.stderr == f"error: the body of {ids[1]} is gone: it cannot be queued anew, drop it\n"
    assert [dead.id for dead in await worker.queue.dead()] == [ids[1]]
    assert await worker.queue.counts() == (2, 2)


async def test_all_are_dropped(redis_url: str, client: AsyncClient, worker: ScriptedWorker) -> None:
    ids = [await buried(client, worker) for _ in range(3)]
    ended = await jitney_dead("drop", "--all", "--queue", worker.queue.name, redis_url=redis_url)
    assert (ended.exit_code, ended.stdout.split()) == (0, ids)
    assert await worker.queue.dead() == []


@pytest.mark.parametrize("command", ["requeue", "drop"])
async def test_neither_ids_nor_all_is_a_slip_and_so_are_both(redis_url: str, command: str) -> None:
    for arguments in ((), ("--all", "x.0123456789012345678901")):
        ended = await jitney_dead(command, *arguments, redis_url=redis_url)
        assert ended.exit_code == 2
        assert "give ids, or --all" in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("show", "q.0123456789012345678901"), "error: nothing is buried under 'q.0123456789012345678901' in queue q"),
        (("drop", "a." + "0" * 22, "b." + "0" * 22), "error: the ids are of several queues (a, b): one at a time"),
        (("list", "--queue", "nowhere"), "error: unknown model or queue 'nowhere'"),
        (("list", "--redis-url", "redis://127.0.0.1:1/0"), "error: Redis does not answer"),
    ],
)
async def test_what_goes_wrong_is_one_line_and_exit_code_1(
    redis_url: str, arguments: tuple[str, ...], said: str
) -> None:
    ended = await jitney_dead(*arguments, redis_url=redis_url)
    assert (ended.exit_code, ended.stdout, ended.stderr.count("\n")) == (1, "", 1)
    assert ended.stderr.startswith(said)


def test_what_a_terminal_would_obey_or_hide_is_written_out() -> None:
    assert printable("a\x1b[2J\r\n\u202eb\u200b🙂é") == r"a\x1b[2J\r\n\u202eb\u200b🙂é"
    assert escaped(b"\xff\x00ok") == r"\xff\x00ok"
    assert printable("\ud800") == r"\ud800"


def test_a_new_job_keeps_what_it_came_from_when_it_is_passed_on() -> None:
    spec = JobSpec.decode(b'{"v":1,"prompt":"x","of":"q.1"}')
    assert JobSpec.decode(spec.encode()).model_extra == {"of": "q.1"}
