"""Cancel ends a job in whatever state it is, at once and once."""

from __future__ import annotations

import orjson
import pytest
from contract_driver import LEASE_S, Driver

from jitney.keys import JobId, new_job_id


async def waiting(driver: Driver) -> JobId:
    return await driver.enqueue()


async def later(driver: Driver) -> JobId:
    return await driver.enqueue(not_before=4_000_000_000.0)


async def running(driver: Driver) -> JobId:
    id = await driver.enqueue()
    await driver.say(await driver.claim_one(), "a", "b")
    return id


async def returned(driver: Driver) -> JobId:
    id = await driver.enqueue()
    await driver.queue.release(id, (await driver.claim_one()).fence)
    return id


async def held(driver: Driver) -> JobId:
    """Returned, and bound to a build."""
    id = await driver.enqueue()
    job = await driver.claim_one()
    await driver.say(job, "a")
    await driver.queue.release(id, job.fence)
    return id


STATES = {
    "waiting": (waiting, "waiting", 0),
    "later": (later, "later", 0),
    "running": (running, "running", 2),
    "returned": (returned, "returned", 0),
    "held": (held, "returned", 1),
}


@pytest.mark.parametrize("name", STATES)
async def test_a_job_is_cancelled_in_every_state(driver: Driver, name: str) -> None:
    bring, was, num_tokens = STATES[name]
    id = await bring(driver)
    cancelled = await driver.queue.cancel(id)
    assert (cancelled.outcome, cancelled.was) == ("cancelled", was)
    payload = (await driver.queue.read_log(id) or [])[-1]
    assert orjson.loads(payload) == {
        "v": 1,
        "type": "cancelled",
        "seq": num_tokens + 1,
        "usage": {"prompt_tokens": 1, "completion_tokens": num_tokens, "cached_tokens": 0},
    }
    status = await driver.queue.status(id)
    assert status is not None
    assert (status.state, status.reason, status.num_tokens) == ("done", "cancelled", num_tokens)
    assert status.ended_at is not None
    again = await driver.queue.cancel(id)
    assert (again.outcome, again.was) == ("done", "cancelled")
    assert (await driver.claim()).deliveries == ()
    assert await driver.queue.counts() == (0, 0)
    await driver.queue.janitor()
    left = {key.split(":")[0] for key in await driver.key_names()}
    assert left <= {"job", "tokens", "usage", "ended", "vt", "idle", "last", "counts"}, left


async def test_cancelling_nothing_says_so(driver: Driver) -> None:
    cancelled = await driver.queue.cancel(new_job_id(driver.queue.name))
    assert (cancelled.outcome, cancelled.was) == ("notfound", "")
    assert await driver.key_names() == set()


async def test_a_finished_job_is_not_cancelled(driver: Driver) -> None:
    id = await driver.enqueue()
    await driver.finish(await driver.claim_one())
    cancelled = await driver.queue.cancel(id)
    assert (cancelled.outcome, cancelled.was) == ("done", "finished")
    assert [event.type for event in await driver.events(id)] == ["finished"]


async def test_the_owner_is_told_and_may_not_write_any_more(driver: Driver) -> None:
    id = await driver.enqueue()
    async with driver.redis.pubsub() as reader:
        await reader.subscribe(driver.keys.ctl("w"))
        job = await driver.claim_one("w")
        await driver.queue.cancel(id)
        async for message in reader.listen():
            if message["type"] == "message":
                assert orjson.loads(message["data"]) == {"type": "cancel", "id": id, "fence": job.fence}
                break
    (refusal,) = await driver.say(job, "late", seq=2)
    assert refusal.reason == "fence"
    assert await driver.queue.renew(LEASE_S, [driver.held(job)]) == {id}
    assert [event.type for event in await driver.events(id)] == ["cancelled"]


async def test_cancelling_one_of_a_tenants_jobs_keeps_the_others_in_order(driver: Driver) -> None:
    ids = [await driver.enqueue(num_prompt_tokens=2) for _ in range(4)]
    await driver.queue.cancel(ids[1])
    assert await driver.queue.counts() == (3, 6)
    assert [job.id for job in (await driver.claim()).deliveries] == [ids[0], ids[2], ids[3]]


async def test_the_caller_may_name_the_life_of_what_is_left(driver: Driver) -> None:
    id = await driver.enqueue(result_ttl_s=500)
    await driver.queue.cancel(id, keep_s=30)
    assert 20 < await driver.redis.ttl(driver.keys.job(id)) <= 30
