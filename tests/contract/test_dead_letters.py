"""Buried jobs: looked at, queued anew as another job, dropped; never lost on the way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson
import pytest
from contract_driver import Driver

from jitney.errors import InvalidJob, JobNotFound, Overloaded, QueueUnavailable
from jitney.keys import JobId, new_job_id
from jitney.messages import MAX_BODY_BYTES, Event, JobSpec
from jitney.queue import DeadJob, Ending, Limits, Queue

FAR_FUTURE = 4_000_000_000.0


async def buried(driver: Driver, *texts: str, fields: dict[str, Any] | None = None, **entry: Any) -> JobId:
    """A job that said `texts`, could not go on, and had no attempt left."""
    body = orjson.dumps({"v": 1, "prompt": "hi", "sampling": {"seed": 7}} | (fields or {}))
    id = await driver.enqueue(body=body, **entry)
    job = await driver.claim_one()
    assert job.id == id
    await driver.say(job, *texts)
    assert await driver.queue.retry(id, job.fence, max_tries=1, error={"code": "boom", "message": "it broke"}) == "dead"
    return id


async def buried_bytes(driver: Driver, body: bytes) -> JobId:
    """What a worker buries because it cannot read it."""
    id = await driver.enqueue(body=body)
    job = await driver.claim_one()
    event = Event("failed", 1, error={"code": "undecodable"}).encode()
    await driver.queue.finish(Ending(id, job.fence, 1, 0, "failed", [event], dead_reason="undecodable"))
    return id


async def the_only_one(queue: Queue) -> DeadJob:
    (dead,) = await queue.dead()
    return dead


async def test_a_buried_job_is_found_by_its_id_and_by_its_entrys(driver: Driver) -> None:
    first, second = await buried(driver, "a", "b"), await buried(driver, tenant="ann", band="bulk")
    dead = await driver.queue.find_dead(second)
    assert (dead.id, dead.band, dead.tenant, dead.reason) == (second, "bulk", "ann", "max_attempts")
    assert await driver.queue.find_dead(dead.entry_id) == dead
    older = await driver.queue.find_dead(first)
    assert older.num_tokens == 2
    assert [dead.id async for dead in driver.queue.each_dead()] == [first, second]
    assert [dead.id for dead in await driver.queue.dead(count=1)] == [second]
    assert await driver.queue.count_dead() == 2


@pytest.mark.parametrize("id", ["1-1", "q.0123456789012345678901", "*", "", "-", "+", "$", "1-1 2-2"])
async def test_what_is_not_buried_is_not_found(driver: Driver, id: str) -> None:
    await buried(driver)
    for call in (driver.queue.find_dead, driver.queue.requeue_dead, driver.queue.drop_dead):
        with pytest.raises(JobNotFound):
            await call(id)
    assert await driver.queue.count_dead() == 1


async def test_the_time_of_a_burial_is_the_servers(driver: Driver) -> None:
    before, _ = await driver.redis.time()
    await buried(driver)
    after, _ = await driver.redis.time()
    assert before <= (await the_only_one(driver.queue)).buried_at < after + 1


async def test_all_pages_of_the_dead_are_read(driver: Driver) -> None:
    pipe = driver.redis.pipeline(transaction=False)
    for number in range(450):
        pipe.xadd(driver.keys.dead, {"j": f"x{number}", "r": "test"})
    await pipe.execute()
    assert [dead.id async for dead in driver.queue.each_dead()] == [f"x{number}" for number in range(450)]
    assert (await driver.queue.find_dead("x449")).reason == "test"


# --- queued anew -----------------------------------------------------------------------------------------


async def test_a_requeued_job_is_another_one_with_the_same_seed_that_names_the_old(driver: Driver) -> None:
    old = await buried(driver, "a", tenant="ann", band="bulk", num_prompt_tokens=9, fields={"from_later": [1]})
    log = await driver.queue.read_log(old)
    new = await driver.queue.requeue_dead(old)
    assert new != old
    assert await driver.queue.dead() == []
    job = await driver.claim_one()
    assert (job.id, job.seq, job.tries, job.strikes) == (new, 0, 1, 0)
    assert (job.band, job.tenant) == ("interactive", "-"), "as the body says, like at the first time"
    spec = JobSpec.decode(job.body)
    assert (spec.prompt, spec.sampling.seed, spec.model_extra) == ("hi", 7, {"of": old, "from_later": [1]})
    status = await driver.queue.status(new)
    assert status is not None
    assert status.num_prompt_tokens == 9
    assert await driver.queue.read_log(old) == log, "a log that has ended is never reopened"


async def test_band_tenant_and_limits_of_the_new_job_are_those_of_the_body(driver: Driver) -> None:
    fields = {"band": "bulk", "tenant": "ann", "result_ttl_s": 77, "timeout_s": 50.0, "retry": {"max": 2}}
    old = await buried(driver, fields=fields, band="bulk", tenant="ann")
    new = await driver.queue.requeue_dead(old)
    status = await driver.queue.status(new)
    assert status is not None
    assert (status.band, status.tenant) == ("bulk", "ann")
    assert status.deadline is not None
    assert abs(status.deadline - status.created_at - 50.0) < 0.01, "a duration begins anew"
    record = await driver.redis.hmget(driver.keys.job(new), "ttl", "rmax")
    assert record == [b"77000", b"2"]


async def test_a_deadline_that_has_passed_is_left_out_and_one_to_come_is_kept(driver: Driver) -> None:
    passed = await buried(driver, fields={"deadline": 1_000.0})
    to_come = await buried(driver, fields={"deadline": FAR_FUTURE})
    for old, expected in ((passed, None), (to_come, FAR_FUTURE)):
        await driver.queue.requeue_dead(old)
        job = await driver.claim_one()
        assert JobSpec.decode(job.body).deadline == expected
        assert (job.time_left_ms is None) == (expected is None)


async def test_a_job_without_a_record_is_requeued_with_an_estimate(driver: Driver) -> None:
    old = await buried(driver, fields={"prompt": "x" * 40})
    await driver.redis.delete(driver.keys.job(old))
    new = await driver.queue.requeue_dead(old)
    assert await driver.queue.counts() == (1, 10)
    assert (await driver.claim_one()).id == new


async def test_an_idempotency_key_answers_for_the_requeued_job(driver: Driver) -> None:
    old = await buried(driver, idempotency_key="k")
    submitted = driver.entry(await _body_of(driver, old), idempotency_key="k")
    assert (await driver.submit(submitted)).id == old
    new = await driver.queue.requeue_dead(old)
    again = await driver.submit(replace(submitted, id=new_job_id(driver.queue.name)))
    assert (again.id, again.duplicate) == (new, True)
    await driver.finish(await driver.claim_one())
    assert await driver.redis.ttl(driver.keys.idempotency("-", "k")) <= 3_600, "as long as the new result"


async def test_an_idempotency_key_that_others_use_by_now_is_left_alone(driver: Driver) -> None:
    old = await buried(driver, idempotency_key="k")
    key = driver.keys.idempotency("-", "k")
    await driver.redis.set(key, f"{driver.queue.name}.another digest")
    new = await driver.queue.requeue_dead(old)
    assert await driver.redis.get(key) == f"{driver.queue.name}.another digest".encode()
    assert await driver.redis.hget(driver.keys.job(new), "idem") is None


async def test_a_requeue_whose_reply_was_lost_is_one_job(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection sends the same call again; the entry is gone by then, the job is there."""
    old = await buried(driver)
    once = driver.queue._run

    async def twice(*call: Any) -> Any:
        first = await once(*call)
        second = await once(*call)
        assert [first[0], second[0]] == [b"ok", b"dup"]
        return second

    with monkeypatch.context() as patch:
        patch.setattr(driver.queue, "_run", twice)
        new = await driver.queue.requeue_dead(old)
    assert [job.id for job in (await driver.claim()).deliveries] == [new]


async def test_two_who_requeue_the_same_job_make_one(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    old = await buried(driver)
    rival = Queue(driver.redis, driver.queue.name)
    look = driver.queue._record

    async def look_and_be_overtaken(dead: DeadJob) -> Any:
        record = await look(dead)
        await rival.requeue_dead(old)
        return record

    monkeypatch.setattr(driver.queue, "_record", look_and_be_overtaken)
    with pytest.raises(JobNotFound, match="somebody else"):
        await driver.queue.requeue_dead(old)
    assert await driver.queue.counts() == (1, 1)


async def test_a_full_queue_takes_no_requeued_job_and_the_entry_stays(driver: Driver) -> None:
    old = await buried(driver)
    await driver.enqueue()
    before = await driver.key_names()
    with pytest.raises(Overloaded):
        await driver.queue.requeue_dead(old, Limits(max_waiting_jobs=1))
    assert await driver.key_names() == before
    assert (await the_only_one(driver.queue)).id == old


@pytest.mark.parametrize("body", [b"\x82\xa2", b"[]", b'{"v":9}', b'{"v":1,"prompt":""}'])
async def test_what_no_worker_could_read_is_not_requeued(driver: Driver, body: bytes) -> None:
    id = await buried_bytes(driver, body)
    with pytest.raises(InvalidJob, match="cannot be queued anew"):
        await driver.queue.requeue_dead(id)
    dead = await the_only_one(driver.queue)
    assert await driver.queue.dead_body(dead) == body
    assert await driver.queue.counts() == (0, 0)


async def test_a_body_that_would_grow_too_long_is_not_requeued(driver: Driver) -> None:
    """The worker would bury it again."""
    head = b'{"v":1,"prompt":"'
    body = head + b"x" * (MAX_BODY_BYTES - len(head) - 2) + b'"}'
    id = await buried_bytes(driver, body)
    with pytest.raises(InvalidJob, match=r"with the old id it has \d+ bytes"):
        await driver.queue.requeue_dead(id)
    assert await driver.queue.count_dead() == 1


async def test_a_job_whose_body_is_gone_is_not_requeued(driver: Driver) -> None:
    id = await buried(driver)
    await driver.redis.delete(driver.keys.body(id))
    with pytest.raises(InvalidJob, match=r"the body of .* is gone"):
        await driver.queue.requeue_dead(id)
    assert await driver.queue.count_dead() == 1


@pytest.mark.parametrize("fields", [{"raw": b"\xff\x1b[2J"}, {"j": "other." + "0" * 22}, {"j": b"\xff*"}, {"n": "1e9"}])
async def test_an_entry_that_names_no_job_of_ours_can_only_be_dropped(driver: Driver, fields: dict[str, Any]) -> None:
    entry_id = (await driver.redis.xadd(driver.keys.dead, fields)).decode()
    dead = await the_only_one(driver.queue)
    assert (dead.entry_id, dead.num_tokens) == (entry_id, 0)
    with pytest.raises(InvalidJob, match="names no job"):
        await driver.queue.requeue_dead(entry_id)
    assert await driver.queue.drop_dead(entry_id)
    assert await driver.key_names() == set()


# --- dropped ---------------------------------------------------------------------------------------------


async def test_a_dropped_job_leaves_its_result_for_no_longer_than_any_other(driver: Driver) -> None:
    id = await buried(driver, "a", result_ttl_s=50, idempotency_key="k")
    kept = [driver.keys.job(id), driver.keys.tokens(id), driver.keys.idempotency("-", "k")]
    for key in kept:
        assert await driver.redis.ttl(key) > 6 * 86_400
    assert await driver.queue.drop_dead(id)
    for key in kept:
        assert 40 < await driver.redis.ttl(key) <= 50
    assert not await driver.redis.exists(driver.keys.body(id), driver.keys.dead)
    events = await driver.events(id)
    assert [event.type for event in events] == ["tokens", "failed"], "its client may still read how it ended"


async def test_a_folded_log_of_a_dropped_job_goes_as_soon(driver: Driver) -> None:
    id = await buried(driver, "a", result_ttl_s=50)
    assert await driver.queue.fold(id) == "ok"
    await driver.queue.drop_dead(id)
    assert 40 < await driver.redis.ttl(driver.keys.result(id)) <= 50


async def test_a_result_that_ends_sooner_is_not_prolonged(driver: Driver) -> None:
    id = await buried(driver, result_ttl_s=50)
    await driver.redis.expire(driver.keys.job(id), 5)
    await driver.queue.drop_dead(id)
    assert await driver.redis.ttl(driver.keys.job(id)) <= 5


async def test_dropping_twice_is_dropping_once(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    id = await buried(driver)
    dead = await driver.queue.find_dead(id)
    assert await driver.queue.drop_dead(id)

    async def found_before(_: str) -> DeadJob:
        return dead

    monkeypatch.setattr(driver.queue, "find_dead", found_before)
    assert not await driver.queue.drop_dead(id)


async def test_a_server_that_does_not_answer_loses_nothing(driver: Driver) -> None:
    id = await buried(driver)
    await driver.redis.config_set("maxmemory", "1")
    try:
        with pytest.raises(QueueUnavailable):
            await driver.queue.requeue_dead(id)
        assert (await the_only_one(driver.queue)).id == id
    finally:
        await driver.redis.config_set("maxmemory", "0")
    await driver.queue.requeue_dead(id)


# --- what is kept ----------------------------------------------------------------------------------------


async def test_the_last_error_is_kept_when_the_next_owner_just_vanished(driver: Driver) -> None:
    id = await driver.enqueue()
    error = {"code": "nan_logits", "message": "layer 3"}
    await driver.queue.retry(id, (await driver.claim_one()).fence, error=error)
    await driver.claim_one()
    await driver.end_lease(id)
    assert (await driver.claim(max_strikes=2)).gone == (id,)
    dead = await the_only_one(driver.queue)
    assert orjson.loads(dead.last_error) == error
    (event,) = await driver.events(id)
    assert event.error is not None
    assert event.error["code"] == "max_attempts"


async def test_an_error_without_end_is_cut(driver: Driver) -> None:
    id = await driver.enqueue()
    await driver.queue.retry(id, (await driver.claim_one()).fence, error={"message": "x" * 100_000})
    assert len(await driver.redis.hget(driver.keys.job(id), "err")) == 4_096


async def test_a_job_may_ask_for_fewer_attempts_than_the_workers_allow(driver: Driver) -> None:
    id = await driver.enqueue(max_attempts=1)
    await driver.claim_one()
    await driver.end_lease(id)
    assert (await driver.claim()).gone == (id,)
    other = await driver.enqueue(max_attempts=1)
    assert await driver.queue.retry(other, (await driver.claim_one()).fence) == "dead"


async def test_a_job_may_not_ask_for_more(driver: Driver) -> None:
    id = await driver.enqueue(max_attempts=100)
    assert await driver.queue.retry(id, (await driver.claim_one()).fence, max_strikes=2) == "ok"
    assert await driver.queue.retry(id, (await driver.claim_one()).fence, max_strikes=2) == "dead"


async def _body_of(driver: Driver, id: JobId) -> bytes:
    body = await driver.redis.get(driver.keys.body(id))
    assert body is not None
    return bytes(body)
