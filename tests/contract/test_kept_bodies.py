"""`keep_body`: what was asked for is there as long as what was answered, and not a moment longer."""

from __future__ import annotations

import pytest
from contract_driver import Driver

from jitney.keys import JobId
from jitney.messages import JobSpec
from jitney.submission import entry_of

TTL_S = 100


async def ends(driver: Driver, how: str, **fields: object) -> JobId:
    """A job that ended as `how` says."""
    id = await driver.enqueue(result_ttl_s=TTL_S, **fields)
    if how == "cancelled":
        await driver.queue.cancel(id)
        return id
    job = await driver.claim_one()
    if how == "finished":
        assert await driver.finish(job) == "ok"
    else:
        assert await driver.queue.retry(id, job.fence, max_tries=1, error={"code": "boom", "message": "x"}) == "dead"
    return id


async def life_of(driver: Driver, key: str) -> int:
    """Milliseconds left; -1 for ever, -2 no such key."""
    return int(await driver.redis.pttl(key))


@pytest.mark.parametrize("how", ["finished", "cancelled"])
async def test_a_kept_body_lives_as_long_as_the_result_and_others_end_with_their_job(driver: Driver, how: str) -> None:
    id = await ends(driver, how, keep_body=True)
    assert 0 < await life_of(driver, driver.keys.body(id)) <= TTL_S * 1_000
    assert await driver.redis.get(driver.keys.body(id)) == b'{"v":1,"prompt":"hi"}'
    other = await ends(driver, how)
    assert await life_of(driver, driver.keys.body(other)) == -2


async def test_a_buried_job_that_is_dropped_keeps_its_kept_body_for_the_life_of_its_result(driver: Driver) -> None:
    kept, other = await ends(driver, "dead", keep_body=True), await ends(driver, "dead")
    for id in (kept, other):
        assert await life_of(driver, driver.keys.body(id)) > TTL_S * 1_000
        assert await driver.queue.drop_dead(id)
    assert 0 < await life_of(driver, driver.keys.body(kept)) <= TTL_S * 1_000
    assert await life_of(driver, driver.keys.body(other)) == -2


async def test_a_job_that_is_queued_anew_keeps_its_body_too(driver: Driver) -> None:
    spec = JobSpec.build({"prompt": "hi", "keep_body": True})
    entry = entry_of(
        spec, job_id=driver.entry().id, body=spec.encode(), digest="d", num_prompt_tokens=1, idempotency_key="k"
    )
    assert entry.keep_body
    await driver.submit(entry)
    job = await driver.claim_one()
    assert await driver.queue.retry(entry.id, job.fence, max_tries=1, error={"code": "x", "message": "x"}) == "dead"
    new = await driver.queue.requeue_dead(entry.id)
    job = await driver.claim_one()
    assert job.id == new
    assert await driver.finish(job) == "ok"
    assert await life_of(driver, driver.keys.body(new)) > 0


async def test_a_kept_body_that_has_lost_its_end_gets_one(driver: Driver) -> None:
    id = await ends(driver, "finished", keep_body=True)
    assert await driver.redis.persist(driver.keys.body(id))
    assert await driver.queue.repair(id) == "expiring"
    assert 0 < await life_of(driver, driver.keys.body(id)) <= TTL_S * 1_000
