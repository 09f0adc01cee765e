"""What no claim comes across, damage, and the life of what has ended."""

from __future__ import annotations

import pytest
from contract_driver import Driver

from jitney import upkeep
from jitney.keys import JobId, new_job_id

FAR_FUTURE = 4_000_000_000.0


async def ended_job(driver: Driver, *texts: str, **fields: object) -> JobId:
    id = await driver.enqueue(**fields)
    job = await driver.claim_one()
    await driver.say(job, *texts)
    await driver.finish(job, seq=len(texts) + 1, num_tokens=len(texts))
    return id


# --- the log of an ended job ------------------------------------------------------------------------------


async def test_a_folded_log_reads_as_before(driver: Driver) -> None:
    id = await ended_job(driver, "a\n", "b", "c")
    before = await driver.queue.read_log(id)
    assert await driver.queue.fold_ended(older_than_s=600.0) == 0, "it ended just now"
    assert await driver.queue.fold_ended(older_than_s=-1.0) == 1
    assert not await driver.redis.exists(driver.keys.tokens(id), driver.keys.ended)
    assert await driver.queue.read_log(id) == before
    assert await driver.queue.read_log(id, 2) == before[2:] if before else None
    assert await driver.queue.read_log(id, 1, count=2) == (before or [])[1:3]
    assert await driver.queue.read_log(id, 4) == []
    assert await driver.queue.fold_ended(older_than_s=-1.0) == 0


async def test_a_folded_result_lives_as_long_as_the_log_would_have(driver: Driver) -> None:
    id = await ended_job(driver, "a", result_ttl_s=100)
    assert await driver.queue.fold(id) == "ok"
    assert 90 < await driver.redis.ttl(driver.keys.result(id)) <= 100


async def test_a_job_that_has_not_ended_is_not_folded(driver: Driver) -> None:
    id = await driver.enqueue()
    await driver.say(await driver.claim_one(), "a")
    assert await driver.queue.fold(id) == "gone"
    assert len(await driver.events(id)) == 1


async def test_an_expired_job_leaves_the_list_of_those_to_fold(driver: Driver) -> None:
    id = await ended_job(driver, "a")
    await driver.redis.delete(driver.keys.job(id), driver.keys.tokens(id))
    assert await driver.queue.fold_ended(older_than_s=-1.0) == 0
    assert not await driver.redis.exists(driver.keys.ended)


async def test_a_log_is_read_in_pages(driver: Driver) -> None:
    id = await ended_job(driver, *(str(number) for number in range(600)))
    pages, cursor = [], 0
    while page := await driver.queue.read_log(id, cursor):
        pages.append(len(page))
        cursor += len(page)
    assert pages == [256, 256, 89]
    assert await driver.queue.fold(id) == "ok"
    assert len(await driver.queue.read_log(id, 0, count=1_000) or ()) == 601


async def test_a_log_that_is_empty_is_not_a_log_that_is_gone(driver: Driver) -> None:
    id = await driver.enqueue()
    assert await driver.queue.read_log(id) == []
    assert await driver.queue.read_log(new_job_id(driver.queue.name)) is None
    assert await driver.queue.status(new_job_id(driver.queue.name)) is None


# --- the janitor ------------------------------------------------------------------------------------------


async def test_a_deadline_ends_a_job_that_never_reaches_the_head(driver: Driver) -> None:
    await driver.enqueue()
    late = await driver.enqueue(queue_timeout_s=100.0)
    delayed = await driver.enqueue(not_before=FAR_FUTURE, deadline=FAR_FUTURE + 1)
    await driver.rewind(late, qdeadline=1)
    await driver.rewind(delayed, deadline=1)
    await driver.redis.zadd(driver.keys.deadlines, {late: 1, delayed: 1})
    swept = await driver.queue.janitor()
    assert (swept.num_expired, swept.num_waiting_jobs) == (2, 1)
    for id in (late, delayed):
        assert [event.type for event in await driver.events(id)] == ["expired"]


async def test_the_owner_of_a_late_job_has_a_grace_to_end_it_itself(driver: Driver) -> None:
    id = await driver.enqueue(timeout_s=100.0)
    job = await driver.claim_one()
    seconds, _ = await driver.redis.time()
    await driver.rewind(id, deadline=(seconds - 5) * 1_000)
    await driver.redis.zadd(driver.keys.deadlines, {id: 1})
    assert (await driver.queue.janitor()).num_expired == 0
    assert await driver.state(id) == "running"
    assert await driver.redis.zscore(driver.keys.deadlines, id) == (seconds - 5 + 30) * 1_000
    await driver.rewind(id, deadline=(seconds - 60) * 1_000)
    await driver.redis.zadd(driver.keys.deadlines, {id: 1})
    assert (await driver.queue.janitor()).num_expired == 1
    (refusal,) = await driver.say(job, "late", seq=2)
    assert refusal.reason == "fence"


async def test_the_earliest_limit_of_a_job_is_the_one_to_look_at(driver: Driver) -> None:
    id = await driver.enqueue(timeout_s=60.0, queue_timeout_s=30.0)
    other = await driver.enqueue(timeout_s=60.0, queue_timeout_s=90.0)
    for job, wait_s in ((id, 30.0), (other, 60.0)):
        status = await driver.queue.status(job)
        assert status is not None
        due_ms = await driver.redis.zscore(driver.keys.deadlines, job)
        assert due_ms == round((status.created_at + wait_s) * 1_000)


async def test_a_queue_timeout_of_a_job_that_speaks_is_forgotten(driver: Driver) -> None:
    spoken, silent = await driver.enqueue(queue_timeout_s=30.0), await driver.enqueue(queue_timeout_s=30.0)
    jobs = {job.id: job for job in (await driver.claim()).deliveries}
    await driver.say(jobs[spoken], "a")
    for id in (spoken, silent):
        await driver.rewind(id, qdeadline=1)
    await driver.redis.zadd(driver.keys.deadlines, {spoken: 1, silent: 1, new_job_id(driver.queue.name): 1})
    assert (await driver.queue.janitor()).num_expired == 0, "they run"
    looked_at_later = await driver.redis.zrange(driver.keys.deadlines, 0, -1)
    assert looked_at_later == [silent.encode()], "it may come back without having said anything"
    assert (await driver.redis.zscore(driver.keys.deadlines, silent)) > 1_000


async def test_deadlines_of_ended_jobs_are_forgotten(driver: Driver) -> None:
    await ended_job(driver, "a", timeout_s=100.0)
    assert not await driver.redis.exists(driver.keys.deadlines)


async def test_a_build_that_does_not_come_back_fails_its_jobs_with_what_they_said(driver: Driver) -> None:
    id = await orphan(driver)
    assert (await driver.queue.janitor(resume_wait_s=60.0)).num_orphans == 0, "it has been gone for no time"
    await driver.lose_build("one", id)
    assert (await driver.queue.janitor(resume_wait_s=60.0)).num_orphans == 1
    events = await driver.events(id)
    assert [event.type for event in events] == ["tokens", "failed"]
    assert events[-1].error is not None
    assert events[-1].error["code"] == "no_worker"
    assert not await driver.redis.exists(driver.keys.fingerprints)


async def test_a_build_that_is_busy_but_alive_keeps_its_jobs(driver: Driver) -> None:
    id = await orphan(driver)
    await driver.lose_build("one", id)
    assert (await driver.queue.janitor(fingerprint="one", resume_wait_s=60.0)).num_orphans == 0
    assert await driver.state(id) == "returned"


async def test_a_build_that_nobody_could_see_gets_its_time_anew(driver: Driver) -> None:
    """After an outage, or when the clock was set forward, one build's janitor comes first: the other may come next."""
    id = await orphan(driver)
    await driver.queue.janitor(fingerprint="one")
    await driver.lose_build("one", id)
    await driver.redis.delete(driver.keys.looked)  # as its time to live would have
    assert (await driver.queue.janitor(fingerprint="two")).num_orphans == 0
    assert (await driver.queue.janitor(fingerprint="two")).num_orphans == 0
    assert await driver.redis.pttl(driver.keys.looked) > 29_000, (
        "whoever looks says so, for half of the time that is given"
    )
    job = await driver.claim_one("a", fingerprint="one")
    assert (job.id, job.seq) == (id, 1)


async def test_all_who_are_late_at_once_are_told_so_at_once(driver: Driver) -> None:
    """A round comes once per lease: a crowd must not wait for as many of them as it has slices."""
    ids = [await driver.enqueue(queue_timeout_s=100.0) for _ in range(10)]
    for id in ids:
        await driver.rewind(id, qdeadline=1)
    await driver.redis.zadd(driver.keys.deadlines, dict.fromkeys(ids, 1), xx=True)
    swept = await driver.queue.janitor(slice_size=4)
    assert (swept.num_expired, swept.num_waiting_jobs) == (10, 0)


async def test_one_round_of_the_janitor_has_a_bound(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "JANITOR_SLICES", 3)
    ids = [await driver.enqueue(queue_timeout_s=100.0) for _ in range(10)]
    for id in ids:
        await driver.rewind(id, qdeadline=1)
    await driver.redis.zadd(driver.keys.deadlines, dict.fromkeys(ids, 1), xx=True)
    assert (await driver.queue.janitor(slice_size=2)).num_expired == 6
    assert (await driver.queue.janitor(slice_size=2)).num_expired == 4


async def test_an_orphan_may_go_on_with_another_build_which_is_told(driver: Driver) -> None:
    id = await orphan(driver)
    await driver.lose_build("one", id)
    assert (await driver.queue.janitor(resume_mismatch="continue")).num_orphans == 1
    assert not await driver.redis.exists(driver.keys.held("interactive", "one"))
    job = await driver.claim_one("b", fingerprint="two")
    assert (job.id, job.seq, job.fingerprints) == (id, 1, ("one",))
    await driver.queue.release(id, job.fence)
    again = await driver.claim_one("b", fingerprint="two")
    assert again.fingerprints == ("one",), "the log still holds tokens of the first build"


async def test_the_end_of_an_answer_of_several_builds_names_them_in_order(driver: Driver) -> None:
    """Whoever ends it: here a cancel, which no worker writes."""
    id = await orphan(driver)
    for build, before in (("two", ("one",)), ("three", ("one", "two"))):
        await driver.lose_build(before[-1], id)
        assert (await driver.queue.janitor(resume_mismatch="continue")).num_orphans == 1
        job = await driver.claim_one("b", fingerprint=build)
        assert job.fingerprints == before
        await driver.say(job, build)
        await driver.queue.release(id, job.fence)
    silent = await driver.claim_one("b", fingerprint="three")
    assert silent.fingerprints == ("one", "two", "three")
    await driver.queue.cancel(id)
    assert (await driver.events(id))[-1].fingerprints == ("one", "two", "three")


async def test_an_answer_of_one_build_names_none(driver: Driver) -> None:
    id = await driver.enqueue()
    job = await driver.claim_one(fingerprint="one")
    await driver.say(job, "a")
    await driver.queue.cancel(id)
    assert (await driver.events(id))[-1].fingerprints is None


async def test_a_fingerprint_that_would_break_an_event_is_not_named(driver: Driver) -> None:
    id = await orphan(driver)
    await driver.redis.hset(driver.keys.job(id), mapping={"was": 'x" y', "fp": ""})
    await driver.queue.cancel(id)
    assert (await driver.events(id))[-1].fingerprints is None


async def test_a_held_place_without_a_job_is_cleared(driver: Driver) -> None:
    id = await orphan(driver)
    await driver.lose_build("one", id)
    await driver.redis.delete(driver.keys.job(id))
    assert (await driver.queue.janitor()).num_orphans == 0
    assert not await driver.redis.exists(driver.keys.held("interactive", "one"), driver.keys.fingerprints)


async def orphan(driver: Driver) -> JobId:
    id = await driver.enqueue()
    job = await driver.claim_one("a", fingerprint="one")
    await driver.say(job, "x")
    await driver.queue.release(id, job.fence)
    return id


async def test_wrong_counts_and_empty_tenants_are_put_right(driver: Driver) -> None:
    await driver.enqueue(num_prompt_tokens=3)
    await driver.redis.hset(driver.keys.counts, mapping={"jobs": 99, "tok": 7})
    await driver.redis.zadd(driver.keys.fair("bulk"), {"nobody": 5})
    swept = await driver.queue.janitor()
    assert (swept.num_waiting_jobs, swept.num_waiting_tokens, swept.num_tidied) == (1, 3, 1)
    assert await driver.queue.counts() == (1, 3)
    assert not await driver.redis.exists(driver.keys.fair("bulk"))


async def test_a_recount_of_a_long_queue_stays_short(driver: Driver) -> None:
    """Beyond 2 000 entries the jobs are counted and the tokens left as they were: reading all would take too long."""
    await driver.enqueue(num_prompt_tokens=3)
    pipe = driver.redis.pipeline(transaction=False)
    for _ in range(2_000):
        pipe.xadd(driver.keys.jobs("interactive", "-"), {"j": "x", "est": "7"})
    await pipe.execute()
    await driver.queue.janitor()
    assert await driver.queue.counts() == (2_001, 3)


async def test_a_delayed_job_that_the_janitor_finds_rings(driver: Driver) -> None:
    id = await driver.enqueue(not_before=FAR_FUTURE)
    await driver.redis.zadd(driver.keys.later, {id: 1})
    assert (await driver.queue.janitor()).num_due == 1
    assert await driver.redis.llen(driver.keys.bell) == 1
    assert (await driver.claim_one()).id == id


async def test_the_janitor_forgets_tenants_without_debt_and_streams_that_are_none(driver: Driver) -> None:
    await driver.enqueue(band="bulk")
    await driver.redis.hset(driver.keys.virtual_time, "bulk", "50")
    await driver.redis.zadd(driver.keys.idle("bulk"), {"even": 50, "ahead": 51})
    await driver.redis.zadd(driver.keys.fair("bulk"), {"broken": 1})
    await driver.redis.set(driver.keys.jobs("bulk", "broken"), "not a stream")
    assert (await driver.queue.janitor()).num_tidied == 1
    assert await driver.redis.zrange(driver.keys.idle("bulk"), 0, -1) == [b"ahead"]
    assert await driver.redis.zrange(driver.keys.fair("bulk"), 0, -1) == [b"-"]


async def test_debts_are_forgiven_when_nobody_waits_and_nobody_works(driver: Driver) -> None:
    """Until then they stand; afterwards all begin where the one with the largest ended, and nobody is remembered."""
    for tenant, num_tokens in (("ann", 5), ("bob", 70)):
        await driver.enqueue(tenant=tenant, num_prompt_tokens=num_tokens)
    ann, bob = (await driver.claim()).deliveries
    await driver.queue.janitor()
    assert await driver.redis.zcard(driver.keys.idle("interactive")) == 2, "they are still at work"
    await driver.finish(ann)
    await driver.finish(bob)
    debts = dict(await driver.redis.zrange(driver.keys.idle("interactive"), 0, -1, withscores=True))
    await driver.queue.janitor()
    assert not await driver.redis.exists(driver.keys.idle("interactive"))
    assert float(await driver.redis.hget(driver.keys.virtual_time, "interactive")) == max(debts.values())
    for tenant in ("ann", "bob", "cy"):
        await driver.enqueue(tenant=tenant)
    fair = await driver.redis.zrange(driver.keys.fair("interactive"), 0, -1, withscores=True)
    assert {score for _, score in fair} == {max(debts.values())}


async def test_an_epoch_lasts_as_long_as_the_data(driver: Driver) -> None:
    first = await driver.queue.epoch()
    assert [await driver.queue.epoch() for _ in range(3)] == [first] * 3
    await driver.redis.delete(driver.keys.epoch)
    assert await driver.queue.epoch() != first
