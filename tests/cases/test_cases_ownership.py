"""B27, B41, B50, B51: one job, one owner, one answer; what cannot be owned in peace is given up with a reason."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import pytest
import redis as blocking_redis
from tests.api.api_wire import ask
from tests.cases.paces import Paced
from tests.faults.arena import Arena
from tests.runtime.harness import LIVENESS_S, LONGER_THAN_A_PAUSE_S, StartWorker, expected

from jitney import AsyncClient, IdempotencyConflict, JobCancelled, JobFailed
from jitney.connection import Redis
from jitney.embedded import EmbeddedServer
from jitney.keys import Keys
from jitney.messages import Event
from jitney.queue import Queue

LONG = 120

# --- B27: the same request again -------------------------------------------------------------------------------


async def stream_of(api: Any, queue_name: str, key: str, max_tokens: int) -> tuple[str, bytes]:
    """The job's id, and everything that a client of the completions hears."""
    body = {"model": queue_name, "prompt": [1], "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    answer = await ask(api.port, "POST", "/v1/completions", body, Idempotency_Key=key)
    try:
        assert answer.status == 200
        return answer.headers["x-jitney-job-id"], await answer.body()
    finally:
        await answer.close()


async def test_a_request_sent_at_once_again_while_it_runs_and_after_its_end_is_one_generation(
    start_worker: StartWorker, start_api: Any, client: AsyncClient, queue_name: str
) -> None:
    """B27: over two APIs, eight times at once; everybody hears the same bytes, and the model says them once."""
    paced = Paced(0.005)
    first, second = await start_api(), await start_api()
    async with start_worker(paced):
        asking = [
            asyncio.create_task(stream_of(api, queue_name, "k", LONG)) for api in (first, second) for _ in range(4)
        ]
        await paced.until_step(LONG // 4)
        asking += [asyncio.create_task(stream_of(api, queue_name, "k", LONG)) for api in (first, second)]
        heard = list(await asyncio.wait_for(asyncio.gather(*asking), LIVENESS_S))
        heard.append(await stream_of(first, queue_name, "k", LONG))
        job_id = heard[0][0]
        assert {one for one, _ in heard} == {job_id}
        texts = {b"".join(line for line in said.split(b"\n") if line.startswith(b"data")) for _, said in heard}
        assert len(texts) == 1, "two of them heard different things"
        result = await client.job(job_id).result(LIVENESS_S)
    assert result.token_ids == expected([1], LONG)
    assert paced.num_steps_of(job_id) == LONG
    assert {one for step in paced.steps for one in step} == {job_id}


@pytest.mark.parametrize("how", ["cancelled", "failed"])
async def test_a_request_that_ended_badly_is_not_generated_again_under_the_same_key(
    start_worker: StartWorker, client: AsyncClient, how: str
) -> None:
    """B27: its answer is its ending; another body under the key is a conflict, and runs under none."""
    prompt = [1] if how == "cancelled" else [1] * 600
    again: dict[str, Any] = {"max_tokens": 9, "idempotency_key": "k", "ignore_eos": True}
    paced = Paced()
    async with start_worker(paced):
        job = await client.enqueue("word " * 600 if how == "failed" else prompt, **again)
        if how == "cancelled":
            await job.cancel()
        with pytest.raises((JobCancelled, JobFailed)):
            await job.result(LIVENESS_S)
        num_steps = len(paced.steps)
        same = await client.enqueue("word " * 600 if how == "failed" else prompt, **again)
        assert same.id == job.id
        with pytest.raises((JobCancelled, JobFailed)):
            await same.result(LIVENESS_S)
        with pytest.raises(IdempotencyConflict):
            await client.enqueue([2], **again)
    assert len(paced.steps) == num_steps


async def test_a_reader_that_leaves_takes_the_shared_answer_from_nobody(
    start_worker: StartWorker, start_api: Any, client: AsyncClient, queue_name: str
) -> None:
    """B27: two requests of one key are two readers of one job; the first one's end is not the second one's."""
    api = await start_api()
    body = {"model": queue_name, "prompt": [1], "max_tokens": LONG, "ignore_eos": True, "stream": True}
    async with start_worker(Paced(0.005)):
        leaving = await ask(api.port, "POST", "/v1/completions", body, Idempotency_Key="k")
        staying = asyncio.create_task(stream_of(api, queue_name, "k", LONG))
        async for _ in leaving.frames():
            break
        await leaving.close()
        job_id, said = await asyncio.wait_for(staying, LIVENESS_S)
        assert b"[DONE]" in said
        assert (await client.job(job_id).result(LIVENESS_S)).token_ids == expected([1], LONG)


# --- B41: the lease is shorter than the job --------------------------------------------------------------------


async def test_a_job_of_many_leases_is_never_handed_out_again(
    start_worker: StartWorker, client: AsyncClient, redis: Redis, queue_name: str
) -> None:
    """B41 a: a second worker stands by all the time, and gets nothing."""
    async with (
        start_worker(Paced(0.02), lease={"duration_s": LONGER_THAN_A_PAUSE_S}, worker={"id": "owner"}),
    ):
        job = await client.enqueue([1], max_tokens=350, ignore_eos=True)
        async with asyncio.timeout(LIVENESS_S):
            while (await job.status()).owner != "owner":
                pass
        async with start_worker(lease={"duration_s": LONGER_THAN_A_PAUSE_S}, worker={"id": "peer"}):
            began = await redis.time()
            assert (await job.result(LIVENESS_S)).token_ids == expected([1], 350)
            ended = await redis.time()
        status = await job.status()
    assert (status.tries, status.strikes) == (1, 0)
    assert (ended[0] - began[0]) + (ended[1] - began[1]) / 1e6 > 2 * LONGER_THAN_A_PAUSE_S, (
        "the job was too short to prove anything"
    )


async def test_an_event_loop_that_stands_still_for_leases_loses_no_job(
    start_worker: StartWorker, client: AsyncClient, server: EmbeddedServer, queue_name: str
) -> None:
    """B41 c: by a long tokenisation, a collection of garbage, a neighbour's plugin: leases are renewed all the same."""
    leases = Keys(queue_name).leases("interactive")
    async with start_worker(Paced(0.01), lease={"duration_s": LONGER_THAN_A_PAUSE_S}):
        job = await client.enqueue([1], max_tokens=100, ignore_eos=True)
        async with asyncio.timeout(LIVENESS_S):
            while (await job.status()).num_tokens == 0:
                pass
        with blocking_redis.Redis.from_url(server.url) as blocking:
            first = expiry = blocking.zscore(leases, job.id)
            for _ in range(200_000):  # nothing else runs on this loop, and nobody is awaited
                if expiry is None or expiry > first + 1_500 * LONGER_THAN_A_PAUSE_S:
                    break
                expiry = blocking.zscore(leases, job.id)
        assert expiry is not None
        assert expiry > first + 1_500 * LONGER_THAN_A_PAUSE_S
        assert (await job.result(LIVENESS_S)).token_ids == expected([1], 100)
        assert (await job.status()).tries == 1


# --- B50, B51: workers that never answer again, and workers that are asked to go -------------------------------


async def test_a_job_whose_every_worker_is_stopped_is_given_up_and_its_neighbours_are_not_blamed(
    redis: Redis, client: AsyncClient, queue_name: str, start_worker: StartWorker
) -> None:
    """B50: three deliveries without a word; then an end, an entry with its reason, and nobody else's attempts."""
    queue = Queue(redis, queue_name)
    leases = queue.keys.leases("interactive")
    culprit = await client.enqueue([9], max_tokens=5, ignore_eos=True)
    neighbours = [await client.enqueue([n], max_tokens=5, ignore_eos=True) for n in (1, 2, 3)]
    together = await queue.claim("stopped-0", "n0", credit=8, fingerprint="hash.1", lease_s=600)
    assert [one.id for one in together.deliveries] == [culprit.id, *(job.id for job in neighbours)]
    await redis.zadd(leases, {one.id: 1 for one in together.deliveries}, xx=True)
    strikes, spared, gone = [0], [], []
    for number in range(1, 7):
        alone = await queue.claim(f"stopped-{number}", f"n{number}", credit=8, fingerprint="hash.1", lease_s=600)
        gone += alone.gone
        assert len(alone.deliveries) <= 1, "whoever died with it is alone the next time"
        for one in alone.deliveries:
            if one.id == culprit.id:
                strikes.append(one.strikes)
                await redis.zadd(leases, {one.id: 1}, xx=True)
            else:
                spared.append(one)
    assert (gone, strikes, len(spared)) == ([culprit.id], [0, 1, 2], 3)
    for one in spared:
        assert await queue.release(one.id, one.fence) == "ok"
    async with start_worker():
        for n, job in enumerate(neighbours, 1):
            assert (await job.result(LIVENESS_S)).token_ids == expected([n], 5)
        with pytest.raises(JobFailed) as caught:
            await culprit.result(LIVENESS_S)
    assert caught.value.code == "max_attempts"
    (dead,) = await queue.dead()
    assert (dead.id, dead.reason, Event.decode(dead.event).type) == (culprit.id, "max_attempts", "failed")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
async def test_a_worker_with_eight_jobs_that_is_asked_to_go_hands_them_over_now(
    field: Arena, number: signal.Signals
) -> None:
    """B51: not after a lease, which is an hour here; by either signal; with 0; and nothing stays as if it ran."""
    first = await field.start_worker("first", lease_s=3_600, drain_timeout_s=0.5, step_s=0.05)
    client = field.client()
    jobs = [await client.enqueue([n], max_tokens=100, ignore_eos=True, temperature=0.0) for n in range(1, 9)]
    field.jobs |= {job.id: job.id for job in jobs}

    async def all_speak() -> bool:
        return all([(await job.status()).num_tokens > 2 for job in jobs])

    await field.until(all_speak, "eight jobs that speak")
    first.send(number)
    await first.until_any(lambda line: "draining" in line)
    late = await client.enqueue([9], max_tokens=3, ignore_eos=True, temperature=0.0)
    assert await first.ended() == 0
    assert [(await job.status()).state for job in jobs] == ["returned"] * 8
    assert (await late.status()).state == "waiting", "it took a job after it was asked to go"
    await field.start_worker("second", lease_s=3_600, step_s=0.001)
    results = await asyncio.wait_for(asyncio.gather(*(job.result() for job in (*jobs, late))), LIVENESS_S)
    assert [len(result.token_ids) for result in results] == [100] * 8 + [3]
    assert [(await job.status()).tries for job in jobs] == [1] * 8
    assert {view.id for view in await field.views()} == {"second"}


async def test_a_worker_that_is_asked_to_go_before_it_is_ready_goes(field: Arena) -> None:
    """B51: a rollout that is undone at once. No traceback of ours, nothing claimed, no view left."""
    child = await field.launch_worker("early")
    child.send(signal.SIGTERM)
    code = await child.ended()
    assert code in (0, -signal.SIGTERM)
    assert await field.views() == []
    assert not any("Traceback" in line for line in child.lines)
