"""What somebody deletes or overwrites is put right by the janitor: each job runs, or its readers are told its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from contract_driver import LEASE_S, Driver

from jitney import AsyncClient
from jitney.errors import JobFailed
from jitney.keys import JobId, new_job_id
from jitney.queue import Queue
from jitney.upkeep import SWEEP_PAGE

FAR_FUTURE = 4_000_000_000.0
STATES = ("waiting", "later", "running", "returned", "held")


async def job_in(driver: Driver, state: str, **fields: Any) -> JobId:
    """A job of 7 prompt tokens in that state; `held`: returned, with one event in its log, to its own build alone."""
    id = await driver.enqueue(
        num_prompt_tokens=7, not_before=FAR_FUTURE if state == "later" else None, tenant="ann", band="bulk", **fields
    )
    if state not in ("waiting", "later"):
        job = await driver.claim_one()
        assert job.id == id
        if state == "held":
            await driver.say(job, "x")
        if state != "running":
            await driver.queue.release(id, job.fence)
    return id


async def job_in_each_state(driver: Driver) -> dict[str, JobId]:
    for _ in range(3):
        await driver.enqueue(num_prompt_tokens=7, tenant="ann", band="bulk", timeout_s=900.0)
    running, returned, held = (await driver.claim()).deliveries
    await driver.say(held, "x")
    for job in (returned, held):
        await driver.queue.release(job.id, job.fence)
    rest = {state: await job_in(driver, state, timeout_s=900.0) for state in ("waiting", "later")}
    return {"running": running.id, "returned": returned.id, "held": held.id, **rest}


async def rounds(driver: Driver) -> int:
    """Janitor rounds until one has seen the whole key space. Returns how many keys they repaired."""
    num_repaired = (await driver.queue.janitor()).num_repaired
    while await driver.redis.exists(driver.keys.sweep):
        num_repaired += (await driver.queue.janitor()).num_repaired
    return num_repaired


async def ending(driver: Driver, id: JobId) -> tuple[str, str]:
    """Type and code of the last event of an ended job; all of them have dense seqs and only the last is an end."""
    events = await driver.events(id)
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    last = events[-1]
    assert [event.type for event in events[:-1]] == ["tokens"] * (len(events) - 1)
    return last.type, (last.error or {}).get("code", "")


# --- places ----------------------------------------------------------------------------------------------


async def delete(driver: Driver, *names: str) -> None:
    assert await driver.redis.delete(*names) == len(names)


Damage = Callable[[Driver], Awaitable[Any]]
STREAM_DAMAGE: dict[str, Damage] = {
    "the stream is deleted": lambda d: delete(d, d.keys.jobs("bulk", "ann")),
    "the stream is trimmed to one": lambda d: d.redis.xtrim(d.keys.jobs("bulk", "ann"), maxlen=1, approximate=False),
    "the fair set is deleted": lambda d: delete(d, d.keys.fair("bulk")),
    "both are deleted": lambda d: delete(d, d.keys.fair("bulk"), d.keys.jobs("bulk", "ann")),
    "the counts are deleted": lambda d: delete(d, d.keys.counts),
    "the counts are nonsense": lambda d: d.redis.hset(d.keys.counts, mapping={"jobs": "-4", "tok": "x"}),
    "something else lies there": lambda d: d.redis.set(d.keys.jobs("bulk", "ann"), "not a stream"),
    "everything but jobs is deleted": lambda d: delete_all_but_jobs(d),
}


async def delete_all_but_jobs(driver: Driver) -> None:
    """Only the records and bodies are left."""
    names = [name for name in await driver.key_names() if name.split(":")[0] not in ("job", "body", "ids", "tokens")]
    await driver.redis.delete(*(f"{driver.keys.prefix}:{name}" for name in names))


@pytest.mark.parametrize("damage", STREAM_DAMAGE.values(), ids=[name.replace(" ", "-") for name in STREAM_DAMAGE])
async def test_waiting_jobs_survive_the_loss_of_what_names_them(driver: Driver, damage: Damage) -> None:
    ids = {await job_in(driver, "waiting") for _ in range(3)}
    await damage(driver)
    await rounds(driver)
    assert await driver.queue.counts() == (3, 21)
    assert await driver.redis.llen(driver.keys.bell) >= 1, "somebody may be waiting for them"
    assert await rounds(driver) == 0, "a second look finds nothing"
    claimed = await driver.claim()
    assert {job.id for job in claimed.deliveries} == ids
    assert await driver.queue.counts() == (0, 0)
    assert not await driver.redis.exists(driver.keys.jobs("bulk", "ann"), driver.keys.fair("bulk"))


async def test_jobs_of_every_state_survive_the_loss_of_every_index(driver: Driver) -> None:
    ids = await job_in_each_state(driver)
    deadlines = await driver.redis.zrange(driver.keys.deadlines, 0, -1, withscores=True)
    await delete_all_but_jobs(driver)
    assert await rounds(driver) == 5
    for state, id in ids.items():
        assert await driver.queue.repair(id) == "ok", state
    assert await driver.redis.zrange(driver.keys.deadlines, 0, -1, withscores=True) == deadlines
    assert await driver.redis.zscore(driver.keys.later, ids["later"]) == FAR_FUTURE * 1_000
    claimed = [job.id for job in (await driver.claim()).deliveries]
    assert sorted(claimed) == sorted([ids["held"], ids["returned"], ids["waiting"]])


async def test_a_delayed_retry_keeps_its_time(driver: Driver) -> None:
    id = await job_in(driver, "running")
    job = await driver.redis.hget(driver.keys.job(id), "fence")
    await driver.queue.retry(id, job.decode(), delay_s=500.0)
    due = await driver.redis.zscore(driver.keys.later, id)
    await delete(driver, driver.keys.later)
    assert await rounds(driver) == 1
    assert await driver.redis.zscore(driver.keys.later, id) == due


async def lease_left_s(driver: Driver, id: JobId) -> float:
    seconds, microseconds = await driver.redis.time()
    return await driver.redis.zscore(driver.keys.leases("bulk"), id) / 1e3 - seconds - microseconds / 1e6


async def test_a_running_job_without_a_lease_gets_one_as_its_owner_asked_for(driver: Driver) -> None:
    id = await job_in(driver, "running")
    await delete(driver, driver.keys.leases("bulk"))
    assert await rounds(driver) == 1
    assert LEASE_S - 5 < await lease_left_s(driver, id) <= LEASE_S
    await driver.end_lease(id, "bulk")
    assert (await driver.claim_one()).tries == 2


async def test_a_lease_from_a_clock_that_was_ahead_is_cut_to_what_its_owner_asked_for(driver: Driver) -> None:
    """Whoever died then would be waited for until the clock is there again."""
    id = await job_in(driver, "running")
    seconds, _ = await driver.redis.time()
    await driver.redis.zadd(driver.keys.leases("bulk"), {id: (seconds + LEASE_S + 60) * 1_000})
    assert await rounds(driver) == 1
    assert await lease_left_s(driver, id) <= LEASE_S
    assert await rounds(driver) == 0


@pytest.mark.parametrize("was_given_back", ["before", "after"])
async def test_a_job_from_a_clock_that_was_ahead_is_claimable_when_it_is_given_back(
    driver: Driver, was_given_back: str
) -> None:
    """It was enqueued in what is now the future, an hour from now."""
    id = await job_in(driver, "running")
    fence = (await driver.redis.hget(driver.keys.job(id), "fence")).decode()
    seconds, _ = await driver.redis.time()
    await driver.rewind(id, at=(seconds + 3_600) * 1_000)
    await driver.queue.release(id, fence)
    if was_given_back == "before":
        await driver.redis.zadd(driver.keys.leases("bulk"), {id: (seconds + 3_600) * 1_000})
        assert await rounds(driver) == 1
    assert await rounds(driver) == 0
    assert (await driver.claim_one()).id == id


async def test_an_owner_that_lives_keeps_its_job_when_the_leases_are_deleted(driver: Driver) -> None:
    await driver.enqueue()
    job = await driver.claim_one()
    await delete(driver, driver.keys.leases("interactive"))
    assert await driver.queue.renew(30.0, [driver.held(job)]) == set()
    assert await rounds(driver) == 0
    assert await driver.finish(job) == "ok"


async def test_a_build_that_nobody_remembers_still_loses_its_jobs_in_time(driver: Driver) -> None:
    """Without its entry among the builds, what is held for one would be held for ever."""
    id = await job_in(driver, "held")
    await delete(driver, driver.keys.fingerprints)
    assert await rounds(driver) == 1
    await driver.lose_build("fp", id)
    assert (await driver.queue.janitor()).num_orphans == 1
    assert await ending(driver, id) == ("failed", "no_worker")


# --- jobs that cannot run any more ------------------------------------------------------------------------


@pytest.mark.parametrize("state", [state for state in STATES if state != "running"])
async def test_a_job_whose_body_is_gone_ends(driver: Driver, state: str) -> None:
    id, other = await job_in(driver, state), await job_in(driver, "waiting")
    await delete(driver, driver.keys.body(id))
    assert await rounds(driver) == 1
    assert await ending(driver, id) == ("failed", "job_lost")
    assert await driver.queue.counts() == (1, 7)
    assert [job.id for job in (await driver.claim()).deliveries] == [other]


async def test_a_running_job_does_not_need_its_body(driver: Driver) -> None:
    await driver.enqueue()
    job = await driver.claim_one()
    await delete(driver, driver.keys.body(job.id))
    assert await rounds(driver) == 0
    assert await driver.finish(job) == "ok"


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("loss", ["deleted", "overwritten", "unreadable"])
async def test_a_job_whose_record_is_gone_ends_where_its_readers_are(driver: Driver, state: str, loss: str) -> None:
    id, other = await job_in(driver, state), await job_in(driver, "waiting")
    if loss == "unreadable":
        await driver.redis.hset(driver.keys.job(id), "state", "somewhere")
    else:
        await delete(driver, driver.keys.job(id))
    if loss == "overwritten":
        await driver.redis.set(driver.keys.job(id), "not a hash")
    assert await rounds(driver) >= 1
    assert await ending(driver, id) == ("failed", "job_lost")
    assert len(await driver.events(id)) == (2 if state == "held" else 1)
    assert await driver.state(id) == "done"
    assert [job.id for job in (await driver.claim()).deliveries] == [other]
    await driver.queue.cancel(other)
    await rounds(driver)
    assert await driver.queue.counts() == (0, 0)
    for name in await driver.key_names():
        if id in name:
            assert await driver.redis.pttl(f"{driver.keys.prefix}:{name}") > 0, f"{name} would stay for ever"


async def test_an_answer_that_has_ended_is_not_ended_again(driver: Driver) -> None:
    await driver.enqueue()
    job = await driver.claim_one()
    await driver.say(job, "a")
    await driver.finish(job, seq=2, num_tokens=1)
    await driver.redis.persist(driver.keys.tokens(job.id))
    await delete(driver, driver.keys.job(job.id))
    assert await rounds(driver) == 1
    assert [event.type for event in await driver.events(job.id)] == ["tokens", "finished"]
    assert await driver.redis.pttl(driver.keys.tokens(job.id)) > 0


async def test_an_ended_job_lives_no_longer_than_it_was_to(driver: Driver) -> None:
    id = await driver.enqueue(result_ttl_s=100)
    job = await driver.claim_one()
    await driver.say(job, "a")
    await driver.finish(job, seq=2, num_tokens=1)
    for key in (driver.keys.job(id), driver.keys.tokens(id)):
        await driver.redis.persist(key)
    await delete(driver, driver.keys.ended)
    assert await rounds(driver) == 1
    for key in (driver.keys.job(id), driver.keys.tokens(id)):
        assert 90_000 < await driver.redis.pttl(key) <= 100_000
    assert await driver.queue.fold_ended(older_than_s=-1.0) == 1, "its log would stay a stream"
    assert await rounds(driver) == 0


async def test_a_reader_hears_of_a_job_that_cannot_run(driver: Driver, redis_url: str, write_queue_card: Any) -> None:
    await write_queue_card()
    async with AsyncClient(redis_url, queue=driver.queue.name) as client:
        job = await client.enqueue("hi")
        reading = asyncio.create_task(job.result(timeout_s=20.0))
        await delete(driver, driver.keys.body(job.id))
        await rounds(driver)
        with pytest.raises(JobFailed) as caught:
            await reading
        assert caught.value.code == "job_lost"


async def test_names_of_strangers_are_left_alone(driver: Driver) -> None:
    strange = ("body:../x", "jobs:nobody:t", "jobs:bulk", "held:bulk", "ids:", "tokens:*", "job:x", "dead:x")
    for name in strange:
        await driver.redis.set(f"{driver.keys.prefix}:{name}", "1")
    assert await rounds(driver) == 0
    assert {name for name in await driver.key_names() if name in strange} == set(strange)


async def test_repair_of_nothing_says_so(driver: Driver) -> None:
    assert await driver.queue.repair(new_job_id(driver.queue.name)) == "gone"
    assert await driver.key_names() == set()


async def test_a_key_that_vanished_since_it_was_found_is_no_repair(driver: Driver) -> None:
    id = await driver.enqueue()
    await driver.queue.cancel(id)
    await driver.redis.pexpire(driver.keys.job(id), 0)
    assert await rounds(driver) == 0


# --- the sweep --------------------------------------------------------------------------------------------


async def num_scans(driver: Driver) -> int:
    stats = await driver.redis.info("commandstats")
    return int(stats.get("cmdstat_scan", {}).get("calls", 0))


Fill = Callable[[int], Awaitable[None]]


@pytest.fixture
async def fill(driver: Driver) -> AsyncIterator[Fill]:
    """`await fill(n)`: so many keys that are no queue's, for as long as the test lasts."""
    filled: list[str] = []

    async def write(num_keys: int) -> None:
        filled.extend(f"{{jitney:{driver.queue.name}}}-not-ours:{number}" for number in range(num_keys))
        await driver.redis.mset(dict.fromkeys(filled, "x"))

    yield write
    await driver.redis.unlink(*filled)


async def test_a_round_costs_a_bounded_number_of_calls_and_the_next_one_goes_on(driver: Driver, fill: Fill) -> None:
    await fill(6 * SWEEP_PAGE)
    id = await job_in(driver, "waiting")
    await delete(driver, driver.keys.jobs("bulk", "ann"))
    num_rounds = num_repaired = 0
    while not num_repaired:
        before = await num_scans(driver)
        num_repaired = await driver.queue.sweep(max_pages=2)
        assert await num_scans(driver) - before <= 2
        num_rounds += 1
        assert num_rounds <= await driver.redis.dbsize() / SWEEP_PAGE + 1, "one pass, by two pages a round"
    assert [job.id for job in (await driver.claim()).deliveries] == [id]


async def test_workers_share_one_pass(driver: Driver, fill: Fill) -> None:
    """Each goes on where another has stopped, so that many make it sooner, and none makes it all."""
    await fill(6 * SWEEP_PAGE)
    workers = [driver.queue, Queue(driver.redis, driver.queue.name), Queue(driver.redis, driver.queue.name)]
    cursors, before = [], await num_scans(driver)
    while not cursors or cursors[-1] is not None:
        await workers[len(cursors) % 3].sweep(max_pages=1)
        cursors.append(await driver.redis.get(driver.keys.sweep))
    assert len(cursors) == await num_scans(driver) - before
    assert len(set(cursors)) == len(cursors) > 3
    assert len(cursors) <= await driver.redis.dbsize() / SWEEP_PAGE + 2


@pytest.mark.parametrize("cursor", ["", "-1", "x" * 30, "99999999999999999999"])
async def test_a_cursor_that_is_none_begins_anew(driver: Driver, cursor: str) -> None:
    await job_in(driver, "waiting")
    await delete(driver, driver.keys.jobs("bulk", "ann"))
    await driver.redis.set(driver.keys.sweep, cursor)
    assert await rounds(driver) == 1
    assert not await driver.redis.exists(driver.keys.sweep)


async def test_a_cursor_does_not_stay_for_ever(driver: Driver, fill: Fill) -> None:
    await fill(3 * SWEEP_PAGE)
    await driver.queue.sweep(max_pages=1)
    assert 0 < await driver.redis.pttl(driver.keys.sweep) <= 3_600_000


async def test_what_is_in_its_place_is_left_there(driver: Driver) -> None:
    await job_in_each_state(driver)
    await driver.queue.cancel(await job_in(driver, "waiting"))
    await driver.queue.janitor()  # which says that it was here
    before = {name: await driver.redis.dump(f"{driver.keys.prefix}:{name}") for name in await driver.key_names()}
    assert await rounds(driver) == 0
    after = {name: await driver.redis.dump(f"{driver.keys.prefix}:{name}") for name in await driver.key_names()}
    assert after == before


async def test_an_entry_of_another_job_is_none_of_this_one(driver: Driver) -> None:
    """A stream that was deleted begins anew; in the same millisecond it gives ids a second time."""
    first, second = [await job_in(driver, "waiting") for _ in range(2)]
    eid = await driver.redis.hget(driver.keys.job(second), "eid")
    await delete(driver, driver.keys.jobs("bulk", "ann"))
    await driver.redis.xadd(driver.keys.jobs("bulk", "ann"), {"j": first, "est": "7"}, id=eid)
    await driver.redis.hset(driver.keys.job(first), "eid", eid)
    assert await rounds(driver) == 1
    assert sorted(job.id for job in (await driver.claim()).deliveries) == sorted([first, second])
