"""The client for threads: the same promises without await, by Redis and over HTTP alike."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.client.scripted_worker import PATIENCE_S, ScriptedWorker, Turn, eventually
from tests.conftest import WriteCard

from jitney import Client, JobFailed, JobSpec, PromptTooLong, Result
from jitney.connection import Redis
from jitney.keys import new_job_id
from jitney.messages import Event


@pytest.fixture
async def sync_client(either_url: str, queue_name: str, write_queue_card: WriteCard) -> Iterator[Client]:
    await write_queue_card()
    with Client(either_url, queue=queue_name) as client:
        yield client


async def test_several_threads_share_one_client(sync_client: Client, worker: ScriptedWorker) -> None:
    async def echo(turn: Turn) -> None:
        await turn.say(*f"{turn.spec.prompt}")
        await turn.finish()

    def ask(name: str) -> list[str]:
        return [sync_client.generate(f"{name}-{n}").text for n in range(10)]

    names = [f"thread{n}" for n in range(8)]
    with ThreadPoolExecutor(len(names)) as pool:
        loop = asyncio.get_running_loop()
        answers = asyncio.gather(*(loop.run_in_executor(pool, ask, name) for name in names))
        await worker.serve(len(names) * 10, echo)
        assert await answers == [[f"{name}-{n}" for n in range(10)] for name in names]


async def test_a_stream_yields_events_as_they_come(sync_client: Client, worker: ScriptedWorker) -> None:
    job = await asyncio.to_thread(sync_client.enqueue, "x")
    turn = await worker.take()
    stream = job.stream()

    async def next_event() -> Event:
        return await asyncio.wait_for(asyncio.to_thread(next, stream), PATIENCE_S)

    for text in "abc":
        await turn.say(text)
        assert (await next_event()).text == text
    await turn.finish()
    assert [event.type for event in await asyncio.to_thread(list, stream)] == ["tokens", "finished"]
    assert [event.seq for event in await asyncio.to_thread(list, job.stream(cursor=3))] == [4, 5]


async def test_a_stream_left_early_unsubscribes(sync_client: Client, worker: ScriptedWorker, redis: Redis) -> None:
    job = await asyncio.to_thread(sync_client.enqueue, "x")
    await (await worker.take()).say("a", "b")

    def first() -> str:
        for event in job.stream():
            return event.text
        return ""

    async def nobody() -> bool:
        return await redis.pubsub_channels(f"{worker.queue.keys.prefix}*") == []

    for _ in range(20):
        assert await asyncio.to_thread(first) == "a"
    await eventually(nobody)


async def test_errors_reach_the_calling_thread(sync_client: Client, worker: ScriptedWorker) -> None:
    with pytest.raises(PromptTooLong):
        sync_client.enqueue([1] * 3_000)
    job = sync_client.enqueue("x")
    assert job.status().state == "waiting"
    with pytest.raises(TimeoutError):
        job.result(timeout_s=0.01)
    await (await worker.take()).fail({"message": "no luck", "code": "unlucky"})
    with pytest.raises(JobFailed, match="no luck"):
        sync_client.job(job.id).result(PATIENCE_S)
    assert job.cancel() is False


async def test_a_closed_client_says_so_and_leaves_no_thread(redis_url: str) -> None:
    before = set(threading.enumerate())
    client = Client(redis_url, queue="q")
    assert len(set(threading.enumerate()) - before) == 1
    client.close()
    client.close()
    assert set(threading.enumerate()) == before
    with pytest.raises(RuntimeError, match="closed"):
        client.enqueue("x")


async def test_closing_wakes_those_who_wait(redis_url: str, queue_name: str, write_queue_card: WriteCard) -> None:
    await write_queue_card()
    client = Client(redis_url, queue=queue_name)
    job = await asyncio.to_thread(client.enqueue, "x")

    def wait() -> Result | BaseException:
        try:
            return job.result()
        except BaseException as error:
            return error

    with ThreadPoolExecutor(1) as pool:
        waiting = asyncio.get_running_loop().run_in_executor(pool, wait)
        await asyncio.to_thread(job.status)  # the waiting call has been handed over before this one
        await asyncio.to_thread(client.close)
        assert isinstance(await asyncio.wait_for(waiting, PATIENCE_S), BaseException)


def run_script(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={name: value for name, value in os.environ.items() if not name.startswith("JITNEY_")},
    )


async def test_a_client_that_nobody_closed_lets_the_program_end_in_silence(
    redis_url: str, queue_name: str, write_queue_card: WriteCard
) -> None:
    await write_queue_card()
    script = """
        import sys
        from jitney import Client
        client = Client(sys.argv[1], queue=sys.argv[2])
        job = client.enqueue("x")
        stream = job.stream()
        print(job.id)
    """
    ended = await asyncio.to_thread(run_script, script, redis_url, queue_name)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith(queue_name)


async def test_a_client_taken_into_a_fork_refuses_instead_of_hanging(redis_url: str) -> None:
    script = """
        import os, sys
        from jitney import Client
        client = Client(sys.argv[1], queue="q")
        if os.fork() == 0:
            try:
                client.enqueue("x")
            except RuntimeError as error:
                print(error, flush=True)
            os._exit(0)
        os.wait()
        client.close()
    """
    ended = await asyncio.to_thread(run_script, script, redis_url)
    assert ended.stdout == "this client was made before the fork: make a new one\n"


@pytest.mark.parametrize("method", ["status", "cancel", "result"])
def test_an_interrupt_on_the_way_to_the_loop_leaves_no_coroutine_that_nobody_awaits(
    redis_url: str, queue_name: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with Client(redis_url, queue=queue_name) as client:
        job = client.job(new_job_id(queue_name))
        with monkeypatch.context() as meanwhile, warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            meanwhile.setattr(client._thread._loop, "call_soon_threadsafe", interrupted)
            with pytest.raises(KeyboardInterrupt):
                getattr(job, method)()
            gc.collect()
    assert [str(one.message) for one in told if "never awaited" in str(one.message)] == []


def test_arguments_that_do_not_fit_are_the_callers_error(redis_url: str, queue_name: str) -> None:
    with Client(redis_url, queue=queue_name) as client, pytest.raises(TypeError, match="queue_nmae"):
        client._thread.run(lambda: client._client.enqueue_spec(JobSpec(prompt="x"), queue_nmae="y"))  # type: ignore[call-arg]
