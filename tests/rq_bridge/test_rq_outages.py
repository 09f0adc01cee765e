"""RQ jobs while the server of both queues is killed and comes back."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from redis import Redis as SyncRedis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry as ConnectionRetry
from rq import Callback, Queue
from rq.command import send_stop_job_command
from tests.client.scripted_worker import ScriptedWorker
from tests.e2e.programs import program
from tests.rq_bridge.conftest import Jitney, eventually, has_status

from jitney.cards import QueueCard, write_card
from jitney.connection import connect
from jitney.embedded import EmbeddedServer

GENERATE = "jitney.rq.generate"
NUM_JOBS = 20


async def test_held_rq_jobs_outlive_a_killed_redis(tmp_path: Path) -> None:
    """One ended while it was away, the others afterwards; none is generated twice, and commands still arrive."""
    name = f"q{secrets.token_hex(6)}"
    with EmbeddedServer(tmp_path, tethered=True) as server:
        redis = connect(server.url, name="jitney-test")
        await write_card(redis, name, QueueCard(model="m", max_model_len=2_048, vocab_size=1_000))
        jitney = Jitney(ScriptedWorker(redis, name), name)
        connection = SyncRedis.from_url(server.url, retry=ConnectionRetry(NoBackoff(), 0))
        queue = Queue("jitney", connection=connection, serializer="json")
        jobs = [queue.enqueue(GENERATE, f"p{n}", queue=name) for n in range(NUM_JOBS)]
        with program("rq-worker", "--redis-url", server.url) as process:
            turns = {turn.spec.prompt: turn for turn in await jitney.take(NUM_JOBS)}
            server.kill()
            process.until_line('{"part": "rq"')  # it has noticed
            server.launch()
            await eventually(lambda: answers(connection), True)
            for turn in turns.values():
                await turn.finish("after all")
            for job in jobs:
                await has_status(job, "finished")
                assert job.return_value()["id"] == turns[f"p{jobs.index(job)}"].id
            one_more = queue.enqueue(GENERATE, "one more", queue=name)
            turn = await jitney.take_one()

            def stop() -> str:  # again and again: RQ's commands are not kept for who is not listening yet
                send_stop_job_command(connection, one_more.id, serializer=queue.serializer)
                return one_more.get_status().value

            await eventually(stop, "stopped")
            await jitney.ends(turn.id, "cancelled")
            assert await jitney.num_waiting() == 0
        await redis.aclose()


async def test_held_rq_jobs_outlive_a_full_redis_and_their_callbacks_are_called_once(tmp_path: Path) -> None:
    name = f"q{secrets.token_hex(6)}"
    with EmbeddedServer(tmp_path, tethered=True) as server:
        redis = connect(server.url, name="jitney-test")
        await write_card(redis, name, QueueCard(model="m", max_model_len=2_048, vocab_size=1_000))
        jitney = Jitney(ScriptedWorker(redis, name), name)
        connection = SyncRedis.from_url(server.url)
        queue = Queue("jitney", connection=connection, serializer="json")
        own: dict[str, Any] = {
            "on_success": Callback("tests.rq_bridge.rq_functions.note_in_file"),
            "meta": {"path": str(tmp_path / "called")},
        }
        jobs = [queue.enqueue(GENERATE, f"p{n}", queue=name, **own) for n in range(NUM_JOBS)]
        with program("rq-worker", "--redis-url", server.url) as process:
            turns = await jitney.take(NUM_JOBS)
            connection.config_set("maxmemory", 1)
            for turn in turns:
                await turn.finish("all the same")
            for _ in range(3):
                process.until_line('{"part": "rq", "error": "Command')
            connection.config_set("maxmemory", 0)
            for job in jobs:
                await has_status(job, "finished")
        called = (tmp_path / "called").read_text().split()
        assert sorted(called) == sorted(job.id for job in jobs)
        await redis.aclose()


def answers(connection: SyncRedis) -> bool:
    try:
        return bool(connection.ping())
    except (RedisError, OSError):
        return False
