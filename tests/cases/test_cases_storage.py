"""B37, B38, B39, B54: what lies in Redis is missing, strange, gone altogether, or would stay for ever."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import Any

import pytest
from tests.conftest import WriteCard
from tests.engine.scripted_model import HashModel
from tests.runtime.harness import LIVENESS_S, MAX_MODEL_LEN, Ears, StartWorker, expected

from jitney import AsyncClient, InvalidJob, JobCancelled, JobExpired, JobFailed
from jitney.connection import Redis
from jitney.keys import JobId, Keys, new_job_id
from jitney.messages import MAX_BODY_BYTES, Event
from jitney.queue import Append, Delivery, Entry, Queue, pack_ids
from jitney_worker.engine.protocol import ModelOutput, Sampled, SchedulerOutput


async def is_answered(client: AsyncClient, number: int) -> bool:
    job = await client.enqueue([number], max_tokens=5, ignore_eos=True)
    return (await job.result(LIVENESS_S)).token_ids == expected([number], 5)


async def ending_of(client: AsyncClient, job_id: str) -> Event:
    """The job's last event, once it is there."""
    async with asyncio.timeout(LIVENESS_S):
        return [event async for event in client.job(job_id).stream()][-1]


# --- B54: what strangers wrote ---------------------------------------------------------------------------------

STRANGE_BODIES = {
    "bytes": b"\x82\xa2",
    "nothing": b"",
    "a list": b'[{"v":1}]',
    "a number": b"7",
    "no version": b'{"prompt":[1]}',
    "a later version": b'{"v":2,"prompt":[1]}',
    "a version that is text": b'{"v":"1","prompt":[1]}',
    "brackets without end": b"[" * 100_000,
    "twenty megabytes": b'{"v":1,"prompt":"' + b"x" * 20_000_000 + b'"}',
    "half a surrogate pair": b'{"v":1,"prompt":"\\ud800"}',
}


@pytest.mark.parametrize("body", STRANGE_BODIES.values(), ids=STRANGE_BODIES)
async def test_a_body_that_nobody_can_read_is_buried_and_three_good_jobs_run(
    start_worker: StartWorker, client: AsyncClient, redis: Redis, queue_name: str, body: bytes
) -> None:
    """B54: with its reason, and its reader is told."""
    queue, strange = Queue(redis, queue_name), new_job_id(queue_name)
    await queue.enqueue(Entry(strange, body, "digest"))
    async with start_worker():
        assert [await is_answered(client, n) for n in (1, 2, 3)] == [True] * 3
        ending = await ending_of(client, strange)
    assert (ending.type, (ending.error or {})["code"]) == ("failed", "undecodable")
    (dead,) = await queue.dead()
    assert (dead.id, dead.reason, Event.decode(dead.event)) == (strange, "undecodable", ending)


async def test_a_job_too_large_is_refused_before_it_is_written(
    client: AsyncClient, redis: Redis, queue_name: str, write_queue_card: WriteCard
) -> None:
    """B54: the limit holds at the sending end too."""
    await write_queue_card()
    with pytest.raises(InvalidJob, match=str(MAX_BODY_BYTES)):
        await client.enqueue("x" * (MAX_BODY_BYTES + 1))
    assert [key async for key in redis.scan_iter(f"{Keys(queue_name).prefix}:*")] == []


STRANGE_LOGS: dict[str, list[bytes]] = {
    "bytes": [b"\x82\xa2"],
    "a list": [b"[]"],
    "no type": [b'{"v":1,"seq":1}'],
    "a seq that stands still": [b'{"v":1,"type":"tokens","seq":0,"token_ids":[5],"text":""}'],
    "a seq that is text": [b'{"v":1,"type":"tokens","seq":"1","token_ids":[5],"text":""}'],
    "ids that are text": [b'{"v":1,"type":"tokens","seq":1,"token_ids":["a"],"text":""}'],
    "ids that no model has": [b'{"v":1,"type":"tokens","seq":1,"token_ids":[4000000],"text":""}'],
    "ids below zero": [b'{"v":1,"type":"tokens","seq":1,"token_ids":[-1],"text":""}'],
}


async def begun_elsewhere(redis: Redis, client: AsyncClient, events: list[bytes], prompt_ids: bytes) -> Delivery:
    """A job whose first owner has written this, and died."""
    job = await client.enqueue([9], max_tokens=20, ignore_eos=True)
    queue = Queue(redis, job.id.rpartition(".")[0])
    claimed = await queue.claim("dead", "d1", credit=1, fingerprint="hash.1", lease_s=60)
    (delivery,) = claimed.deliveries
    append = Append(job.id, delivery.fence, 1, len(events), events, prompt_ids=prompt_ids, num_prompt_tokens=1)
    assert await queue.append([append]) == []
    await redis.zadd(queue.keys.leases("interactive"), {job.id: 1})
    return delivery


@pytest.mark.parametrize("events", STRANGE_LOGS.values(), ids=STRANGE_LOGS)
async def test_a_log_that_nobody_can_have_written_ends_its_own_job_alone(
    start_worker: StartWorker, client: AsyncClient, redis: Redis, queue_name: str, events: list[bytes]
) -> None:
    """B54: the next owner resumes from the log, so it is no safer than the job itself."""
    broken = await begun_elsewhere(redis, client, events, pack_ids([9]))
    async with start_worker():
        assert [await is_answered(client, n) for n in (1, 2, 3)] == [True] * 3
        status = await until_done(redis, queue_name, broken.id)
    assert status == "failed"


@pytest.mark.parametrize(
    "prompt_ids", [b"\xff", pack_ids([4_000_000]), pack_ids([1] * (MAX_MODEL_LEN + 1))], ids=["a byte", "no id", "long"]
)
async def test_prompt_ids_that_no_tokenizer_gave_end_their_own_job_alone(
    start_worker: StartWorker, client: AsyncClient, redis: Redis, queue_name: str, prompt_ids: bytes
) -> None:
    """B54: a token id beyond the vocabulary would be a fault of the whole batch."""
    good = Event("tokens", 1, token_ids=(5,)).encode()
    broken = await begun_elsewhere(redis, client, [good], prompt_ids)
    async with start_worker():
        assert [await is_answered(client, n) for n in (1, 2, 3)] == [True] * 3
        status = await until_done(redis, queue_name, broken.id)
    assert status == "failed"


async def until_done(redis: Redis, queue_name: str, job_id: JobId) -> str:
    """How a job ended, by its record."""
    async with asyncio.timeout(LIVENESS_S):
        while True:
            status = await Queue(redis, queue_name).status(job_id)
            assert status is not None
            if status.state == "done":
                return status.reason


# --- B37: what is left of a job is not all of it ---------------------------------------------------------------


@pytest.mark.parametrize("part", ["body", "job", "ids", "tokens"])
async def test_two_of_four_jobs_of_a_dead_worker_have_lost_a_part(
    start_worker: StartWorker, client: AsyncClient, redis: Redis, queue_name: str, part: str
) -> None:
    """B37: the two whole ones go on, and the readers of the others are told. Without the ids, from the text again."""
    queue = Queue(redis, queue_name)
    jobs = [await client.enqueue([n], max_tokens=20, ignore_eos=True) for n in range(1, 5)]
    claimed = await queue.claim("dead", "d1", credit=4, fingerprint="hash.1", lease_s=60)
    for n, one in enumerate(claimed.deliveries, 1):
        said = Event("tokens", 1, token_ids=expected([n], 20)[:1]).encode()
        append = Append(one.id, one.fence, 1, 1, [said], prompt_ids=pack_ids([n]), num_prompt_tokens=1)
        assert await queue.append([append]) == []
    key = getattr(queue.keys, part)
    assert await redis.delete(key(jobs[0].id), key(jobs[2].id)) == 2
    readings = [asyncio.create_task(outcome(client, job.id)) for job in jobs]
    await redis.zadd(queue.keys.leases("interactive"), {job.id: 1 for job in jobs})
    async with start_worker():
        outcomes = await asyncio.wait_for(asyncio.gather(*readings), LIVENESS_S)
    whole = [expected([n], 20) for n in range(1, 5)]
    assert [outcomes[1], outcomes[3]] == [whole[1], whole[3]]
    if part == "ids":
        assert [outcomes[0], outcomes[2]] == [whole[0], whole[2]]
    else:
        assert {outcomes[0], outcomes[2]} <= {"JobFailed", "StreamLost", "JobNotFound"}
    left = {band: await redis.zcard(queue.keys.leases(band)) for band in ("interactive", "standard", "bulk")}
    assert set(left.values()) == {0}


async def outcome(client: AsyncClient, job_id: str) -> Any:
    """The answer's ids, or the name of the error."""
    try:
        return (await client.job(job_id).result()).token_ids
    except Exception as error:
        return type(error).__name__


# --- B38: nothing grows ----------------------------------------------------------------------------------------


class Quick(HashModel):
    """Says the same token for ever: what is measured is Redis."""

    def execute(self, scheduled: SchedulerOutput) -> ModelOutput:
        return ModelOutput([Sampled(7) for one in scheduled.scheduled if one.samples])


async def a_thousand(client: AsyncClient, number: int) -> Counter[str]:
    """Jobs of every kind of ending, at most fifty at once; how they ended."""
    endings: Counter[str] = Counter()
    gate = asyncio.Semaphore(50)

    async def one(index: int) -> None:
        async with gate:
            options: dict[str, Any] = {"max_tokens": 2, "tenant": f"t{index % 7}", "result_ttl_s": 3_600}
            if index % 5 == 1:
                options |= {"idempotency_key": f"k{index}", "band": "bulk"}
            if index % 5 == 2:
                options |= {"timeout_s": 3_000.0}
            if index % 5 == 3:
                options |= {"prompt": [1], "max_tokens": 400, "ignore_eos": True}
            if index % 5 == 4:
                options |= {"timeout_s": 0.001}
            job = await client.enqueue(**{"prompt": [1 + index % 50], **options})
            if index % 5 == 3:
                await job.cancel()
            with contextlib.suppress(JobCancelled, JobExpired, JobFailed):
                await job.result(LIVENESS_S)
            endings[(await job.status()).reason] += 1

    await asyncio.gather(*(one(index) for index in range(number)))
    return endings


async def let_time_pass(redis: Redis, keys: Keys) -> None:
    """Whatever has a time to live is over; the queue's own clocks go on."""
    await Queue(redis, keys.queue).fold_ended(older_than_s=-1.0, limit=10_000)
    async for key in redis.scan_iter(f"{keys.prefix}:*", count=1_000):
        if await redis.pttl(key) > 0 and b":worker:" not in key and b":last:" not in key:
            await redis.pexpire(key, 0)


async def test_after_a_thousand_jobs_of_every_ending_nothing_is_left_of_any(
    start_worker: StartWorker, client: AsyncClient, redis: Redis, queue_name: str
) -> None:
    """B38: the same keys, the same entries and the same memory after each batch, once the results' life is over."""
    keys = Keys(queue_name)
    names: list[set[bytes]] = []
    sizes: list[dict[str, int]] = []
    async with start_worker(Quick(), engine={"max_num_seqs": 32, "check": False}):
        for _ in range(3):
            endings = await a_thousand(client, 350)
            assert endings["finished"] >= 200
            assert endings["cancel"] + endings["cancelled"] >= 50
            assert endings["deadline"] + endings["expired"] >= 50
            await let_time_pass(redis, keys)
            await Queue(redis, queue_name).janitor(fingerprint="hash.1")
            found = [key async for key in redis.scan_iter(f"{keys.prefix}:*", count=1_000)]
            # Where the janitor stands in the key space, which it shares with all other tests' queues.
            found = [key for key in found if key != keys.sweep.encode()]
            names.append({key for key in found if not key.startswith(keys.bell.encode())})
            sizes.append(
                {key.decode(): await redis.memory_usage(key, samples=0) for key in found if b":usage" not in key}
            )
            assert await redis.xlen(keys.usage) <= 3 * 350
    assert names[0] == names[1] == names[2]
    kinds = {name.removeprefix(keys.prefix.encode() + b":").split(b":")[0] for name in names[2]}
    assert kinds <= {b"usage", b"vt", b"worker", b"workers", b"last", b"counts", b"idle", b"epoch", b"fps"}
    assert sum(sizes[2].values()) <= sum(sizes[1].values()) + 512


# --- B39: the ground is pulled away ----------------------------------------------------------------------------


async def delete_streams(redis: Redis, keys: Keys) -> None:
    await redis.delete(*(keys.jobs(band, "-") for band in ("interactive", "standard", "bulk")), keys.bell)


async def delete_all_of_the_queue(redis: Redis, keys: Keys) -> None:
    found = [key async for key in redis.scan_iter(f"{keys.prefix}:*")]
    await redis.delete(*found)


async def forget_scripts(redis: Redis, keys: Keys) -> None:
    await redis.script_flush()


async def break_every_connection(redis: Redis, keys: Keys) -> None:
    for kind in ("normal", "pubsub"):
        await redis.execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")


BLOWS = [delete_streams, delete_all_of_the_queue, forget_scripts, break_every_connection]


@pytest.mark.parametrize("blow", BLOWS, ids=lambda blow: blow.__name__)
async def test_a_worker_that_waits_for_work_serves_on_after(
    start_worker: StartWorker, client: AsyncClient, redis: Redis, queue_name: str, ears: Ears, blow: Any
) -> None:
    """B39: it blocks on keys that vanish under it; the job that is sent next runs, within its own wait."""
    async with start_worker():
        for number in (1, 2, 3):
            assert await is_answered(client, number)
            await blow(redis, Keys(queue_name))
        async with asyncio.timeout(5.0):
            assert await is_answered(client, 4)
