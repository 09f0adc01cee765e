"""Who is next: band, what came back, the least served tenant, the oldest; and what a claim passes over."""

from __future__ import annotations

import asyncio
from collections import Counter

from contract_driver import Driver

from jitney.connection import Redis, connect_blocking
from jitney.embedded import EmbeddedServer
from jitney.keys import Band
from jitney.messages import Event
from jitney.queue import Append


async def picks(driver: Driver, number: int) -> list[str]:
    """Tenants of the next jobs, claimed one at a time and neither ended nor returned."""
    return [(await driver.claim_one()).tenant for _ in range(number)]


async def test_bands_are_served_in_order(driver: Driver) -> None:
    bands: tuple[Band, ...] = ("bulk", "interactive", "standard")
    for band in bands * 2:
        await driver.enqueue(band=band)
    claimed = await driver.claim(credit=5)
    assert [job.band for job in claimed.deliveries] == ["interactive"] * 2 + ["standard"] * 2 + ["bulk"]
    assert claimed.num_waiting == 1


async def test_what_came_back_is_ahead_of_new_jobs_of_its_band_but_not_of_a_better_band(driver: Driver) -> None:
    old = await driver.enqueue(band="bulk")
    job = await driver.claim_one()
    new = await driver.enqueue(band="bulk")
    better = await driver.enqueue(band="standard")
    await driver.queue.release(old, job.fence)
    assert [job.id for job in (await driver.claim()).deliveries] == [better, old, new]


async def test_returned_jobs_come_back_in_the_order_of_their_arrival(driver: Driver) -> None:
    ids = [await driver.enqueue() for _ in range(4)]
    # Ties sort by id: give each its own millisecond.
    for number, id in enumerate(ids):
        await driver.rewind(id, at=1_000 + number)
    jobs = (await driver.claim()).deliveries
    for job in reversed(jobs):
        await driver.queue.release(job.id, job.fence)
    assert [job.id for job in (await driver.claim()).deliveries] == ids


async def test_a_flood_of_one_tenant_does_not_keep_others_waiting(driver: Driver) -> None:
    for _ in range(300):
        await driver.enqueue(tenant="flood", max_tokens=100)
    for tenant in range(49):
        for _ in range(2):
            await driver.enqueue(tenant=f"t{tenant}", max_tokens=100)
    served = Counter(await picks(driver, 100))
    assert served["flood"] <= 3
    assert sum(served.values()) - served["flood"] >= 97


async def test_two_busy_tenants_share_evenly(driver: Driver) -> None:
    for _ in range(30):
        await driver.enqueue(tenant="ann", max_tokens=50)
    for _ in range(30):
        await driver.enqueue(tenant="bob", max_tokens=50)
    assert Counter(await picks(driver, 20)) == {"ann": 10, "bob": 10}


async def test_tenants_pay_by_tokens_not_by_jobs(driver: Driver) -> None:
    for _ in range(20):
        await driver.enqueue(tenant="long", num_prompt_tokens=290, max_tokens=10)
        await driver.enqueue(tenant="short", num_prompt_tokens=90, max_tokens=10)
    assert Counter(await picks(driver, 16)) == {"long": 4, "short": 12}


async def test_a_weight_buys_a_larger_share(driver: Driver) -> None:
    await driver.redis.hset(driver.keys.weights, "gold", 3)
    for _ in range(40):
        await driver.enqueue(tenant="gold", max_tokens=50)
        await driver.enqueue(tenant="tin", max_tokens=50)
    assert Counter(await picks(driver, 40)) == {"gold": 30, "tin": 10}


async def test_a_newcomer_has_neither_debt_nor_credit(driver: Driver) -> None:
    for _ in range(60):
        await driver.enqueue(tenant="old", max_tokens=50)
    await picks(driver, 20)
    for _ in range(20):
        await driver.enqueue(tenant="new", max_tokens=50)
    served = Counter(await picks(driver, 20))
    assert abs(served["new"] - served["old"]) <= 2


async def test_leaving_and_returning_wins_nothing(driver: Driver) -> None:
    """A tenant with one job at a time gets no more than one with a backlog."""
    for _ in range(40):
        await driver.enqueue(tenant="backlog", max_tokens=50)
    served: Counter[str] = Counter()
    for _ in range(40):
        if not await driver.redis.exists(driver.keys.jobs("interactive", "hopper")):
            await driver.enqueue(tenant="hopper", max_tokens=50)
        served.update(await picks(driver, 1))
    assert abs(served["hopper"] - served["backlog"]) <= 2


async def test_short_answers_to_large_limits_do_not_buy_the_future(driver: Driver) -> None:
    """Charged by what answers really cost, a tenant gets no refunds that would shut others out."""
    for _ in range(120):
        await driver.enqueue(tenant="ann", max_tokens=4_096)
    for _ in range(40):
        await driver.finish(await driver.claim_one(), num_tokens=100)
    running = [await driver.claim_one() for _ in range(20)]
    for _ in range(40):
        await driver.enqueue(tenant="bob", max_tokens=4_096)
    for job in running:
        await driver.finish(job, num_tokens=100)
    served = Counter(await picks(driver, 40))
    assert served["bob"] >= 15, served


async def test_the_charge_follows_the_mean_of_real_answers(driver: Driver) -> None:
    """First 320 tokens, then 640 moves the mean by a thirty-second of the difference; no answer is no answer."""
    for num_tokens in (320, 640, 0):
        await driver.enqueue(num_prompt_tokens=1)
        await driver.finish(await driver.claim_one(), num_tokens=num_tokens)
    assert float(await driver.redis.hget(driver.keys.virtual_time, "avg")) == 330.0
    await driver.enqueue(tenant="ann", num_prompt_tokens=1)
    await driver.enqueue(tenant="bob", num_prompt_tokens=1, max_tokens=5)
    for job in (await driver.claim()).deliveries:
        paid = await driver.redis.hget(driver.keys.job(job.id), "paid")
        assert float(paid) == {"ann": 331.0, "bob": 6.0}[job.tenant]


async def test_the_end_settles_what_the_answer_really_cost(driver: Driver) -> None:
    """Bob was charged for 10 + 100 tokens and used 10 + 0: Ann, with the same charge, is now behind him."""
    for tenant in ("ann", "bob"):
        for _ in range(3):
            await driver.enqueue(tenant=tenant, num_prompt_tokens=10, max_tokens=100)
    first, second = await driver.claim_one(), await driver.claim_one()
    assert (first.tenant, second.tenant) == ("ann", "bob")
    await driver.finish(second)
    assert await picks(driver, 2) == ["bob", "ann"]


async def test_the_true_prompt_replaces_the_estimate_in_the_account(driver: Driver) -> None:
    for tenant in ("ann", "bob"):
        for _ in range(3):
            await driver.enqueue(tenant=tenant, num_prompt_tokens=100, max_tokens=10)
    first, second = await driver.claim_one(), await driver.claim_one()
    started = Event("started", 1, attempt=1).encode()
    await driver.queue.append([Append(first.id, first.fence, 1, 0, [started], b"", 900)])
    await driver.queue.append([Append(second.id, second.fence, 1, 0, [started], b"", 5)])
    assert await driver.redis.zscore(driver.keys.fair("interactive"), "ann") == 910.0
    assert await driver.redis.zscore(driver.keys.fair("interactive"), "bob") == 15.0
    await driver.finish(first, seq=2, num_tokens=10)
    assert await driver.redis.zscore(driver.keys.fair("interactive"), "ann") == 910.0, "and is not paid twice"


async def test_a_debt_waits_for_a_tenant_that_is_away(driver: Driver) -> None:
    """Charged 10 + 100, used 10 + 300: the difference is not forgotten because nothing of hers waits."""
    await driver.enqueue(tenant="ann", num_prompt_tokens=10, max_tokens=100)
    job = await driver.claim_one()
    assert await driver.redis.zscore(driver.keys.idle("interactive"), "ann") == 110.0
    await driver.finish(job, num_tokens=300)
    assert await driver.redis.zscore(driver.keys.idle("interactive"), "ann") == 310.0
    await driver.enqueue(tenant="ann")
    assert await driver.redis.zscore(driver.keys.fair("interactive"), "ann") == 310.0
    assert not await driver.redis.exists(driver.keys.idle("interactive"))


async def test_a_tenant_without_debt_leaves_nothing_behind(driver: Driver) -> None:
    """Paid back to where everybody is: a tenant that never returns needs no memory."""
    await driver.enqueue(tenant="ann", num_prompt_tokens=10, max_tokens=100)
    job = await driver.claim_one()
    await driver.redis.hset(driver.keys.virtual_time, "interactive", "50")
    await driver.finish(job)
    assert not await driver.redis.exists(driver.keys.idle("interactive"))


async def test_a_job_that_comes_back_is_not_charged_again(driver: Driver) -> None:
    id = await driver.enqueue(tenant="ann", num_prompt_tokens=10, max_tokens=100)
    await driver.enqueue(tenant="ann")
    for _ in range(3):
        job = await driver.claim_one()
        assert job.id == id
        await driver.queue.release(id, job.fence)
    assert await driver.redis.zscore(driver.keys.fair("interactive"), "ann") == 110.0


async def test_what_expires_in_the_queue_costs_its_tenant_nothing(driver: Driver) -> None:
    late = await driver.enqueue(tenant="ann", num_prompt_tokens=1_000, queue_timeout_s=50.0)
    next_one = await driver.enqueue(tenant="ann", num_prompt_tokens=10, max_tokens=10)
    await driver.rewind(late, qdeadline=1)
    claimed = await driver.claim()
    assert claimed.gone == (late,)
    assert [job.id for job in claimed.deliveries] == [next_one]
    (event,) = await driver.events(late)
    assert event.type == "expired"
    assert event.usage == {"prompt_tokens": 1_000, "completion_tokens": 0, "cached_tokens": 0}
    assert await driver.redis.zscore(driver.keys.idle("interactive"), "ann") == 20.0
    assert await driver.queue.counts() == (0, 0)


async def test_a_queue_timeout_ends_with_the_first_event(driver: Driver) -> None:
    id = await driver.enqueue(queue_timeout_s=50.0)
    job = await driver.claim_one()
    await driver.say(job, "a")
    await driver.rewind(id, qdeadline=1)
    await driver.queue.release(id, job.fence)
    assert (await driver.claim_one()).id == id


async def test_a_deadline_holds_after_the_first_event_too(driver: Driver) -> None:
    id = await driver.enqueue(timeout_s=50.0)
    job = await driver.claim_one()
    await driver.say(job, "a")
    await driver.rewind(id, deadline=1)
    await driver.queue.release(id, job.fence)
    assert (await driver.claim()).gone == (id,)
    assert [event.type for event in await driver.events(id)] == ["tokens", "expired"]


async def test_a_thousand_expired_jobs_do_not_stand_in_the_way(driver: Driver) -> None:
    """A claim looks at a bounded number of entries; it rings so that the next one goes on."""
    late = [await driver.enqueue(queue_timeout_s=50.0) for _ in range(600)]
    pipe = driver.redis.pipeline(transaction=False)
    for id in late:
        pipe.hset(driver.keys.job(id), "qdeadline", 1)
    await pipe.execute()
    good = await driver.enqueue()
    gone, rounds = 0, 0
    while True:
        claimed = await driver.claim(credit=4)
        gone += len(claimed.gone)
        rounds += 1
        if claimed.deliveries:
            break
        assert len(claimed.gone) >= 100
        assert await driver.redis.llen(driver.keys.bell) > 0
    assert (gone, claimed.deliveries[0].id) == (600, good)
    assert rounds <= 6


async def test_a_job_that_has_begun_waits_for_a_worker_of_its_build(driver: Driver) -> None:
    id = await driver.enqueue()
    job = await driver.claim_one("a", fingerprint="one")
    await driver.say(job, "x")
    await driver.end_lease(id)
    other = await driver.claim("b", fingerprint="two")
    assert (other.deliveries, other.num_moved) == ((), 1)
    assert (await driver.claim("b", fingerprint="two")).num_moved == 0, "moved once, not looked at again"
    again = await driver.claim_one("c", fingerprint="one")
    assert (again.id, again.seq, again.fingerprints) == (id, 1, ("one",))


async def test_what_is_left_for_a_build_rings_its_bell_again(driver: Driver) -> None:
    """One ring may be all that is left of many: whoever took a part passes it on."""
    for _ in range(2):
        await driver.enqueue()
    for job in (await driver.claim("a", fingerprint="one")).deliveries:
        await driver.say(job, "x")
        await driver.queue.release(job.id, job.fence)
    await driver.redis.delete(driver.keys.bell_for("one"), driver.keys.bell)
    await driver.claim_one("b", fingerprint="one")
    assert await driver.redis.llen(driver.keys.bell_for("one")) == 1
    assert not await driver.redis.exists(driver.keys.bell), "no other build may take it"
    await driver.claim_one("b", fingerprint="one")
    await driver.claim("b", fingerprint="one")
    assert not await driver.redis.exists(driver.keys.bell_for("one"))


async def test_a_job_that_has_said_nothing_may_go_to_any_build(driver: Driver) -> None:
    id = await driver.enqueue()
    await driver.claim_one("a", fingerprint="one")
    await driver.end_lease(id)
    job = await driver.claim_one("b", fingerprint="two")
    assert (job.id, job.fingerprints, job.tries) == (id, (), 2)


async def test_without_scan_only_new_jobs_are_looked_at(driver: Driver) -> None:
    id = await driver.enqueue()
    await driver.queue.release(id, (await driver.claim_one()).fence)
    assert (await driver.claim(scan=False)).deliveries == ()
    new = await driver.enqueue()
    assert [job.id for job in (await driver.claim(scan=False)).deliveries] == [new]


async def test_no_credit_takes_nothing_but_lets_delayed_jobs_fall_due(driver: Driver) -> None:
    id = await driver.enqueue(not_before=4_000_000_000.0)
    await driver.redis.zadd(driver.keys.later, {id: 1})
    claimed = await driver.claim(credit=0)
    assert (claimed.deliveries, claimed.num_waiting, claimed.next_due_ms) == ((), 1, None)
    assert await driver.state(id) == "waiting"


async def test_a_ring_wakes_a_waiting_worker_and_an_empty_claim_stops_it(driver: Driver, blocking: Redis) -> None:
    id = await driver.enqueue()
    assert await driver.queue.wait_bell(blocking, "fp", 5.0)
    job = await driver.claim_one()
    assert not await driver.redis.exists(driver.keys.bell)
    await driver.queue.release(id, job.fence)
    assert await driver.queue.wait_bell(blocking, "fp", 5.0), "a job that is handed back rings too"
    job = await driver.claim_one()
    await driver.say(job, "x")
    await driver.queue.release(id, job.fence)
    assert not await driver.queue.wait_bell(blocking, "other", 0.01), "it may not go to another build"
    assert await driver.queue.wait_bell(blocking, "fp", 5.0)
    await driver.claim_one()
    for _ in range(100):
        await driver.enqueue()
    assert await driver.redis.llen(driver.keys.bell) == 64, "a queue without workers keeps no endless list"
    await driver.claim(credit=100)
    await driver.claim()
    assert not await driver.redis.exists(driver.keys.bell)


async def test_workers_that_wake_by_the_bell_alone_take_every_job_once(driver: Driver, server: EmbeddedServer) -> None:
    """Nobody polls: a lost ring would leave the last jobs waiting for ever."""
    num_jobs, taken, all_taken = 240, list[str](), asyncio.Event()

    async def work(worker: str) -> None:
        async with connect_blocking(server.url, block_s=60.0) as blocking:
            while not all_taken.is_set():
                await driver.queue.wait_bell(blocking, "fp", 60.0)
                for job in (await driver.claim(worker, credit=3)).deliveries:
                    taken.append(job.id)
                    await driver.finish(job)
                if len(taken) == num_jobs:
                    all_taken.set()

    workers = [asyncio.create_task(work(f"w{number}")) for number in range(4)]
    ids = []
    for burst in range(num_jobs // 6):
        ids += await asyncio.gather(*(driver.enqueue(tenant=f"t{burst % 5}") for _ in range(6)))
    async with asyncio.timeout(30):
        await all_taken.wait()
        for _ in workers:
            await driver.redis.rpush(driver.keys.bell, "1")
        await asyncio.gather(*workers)
    assert sorted(taken) == sorted(ids)


async def test_a_suspect_is_handed_out_alone_and_what_is_left_rings(driver: Driver) -> None:
    """Jobs in front of it come first, jobs behind it with the next claim."""
    first = await driver.enqueue(band="interactive")
    suspect = await driver.enqueue(band="standard")
    behind = await driver.enqueue(band="bulk")
    claimed = {job.id: job for job in (await driver.claim("a")).deliveries}
    await driver.say(claimed[first], "x")
    await driver.say(claimed[behind], "x")
    await driver.end_lease(first, "interactive")
    await driver.end_lease(suspect, "standard")
    await driver.end_lease(behind, "bulk")
    assert [(job.id, job.strikes) for job in (await driver.claim("b")).deliveries] == [(first, 0)]
    await driver.redis.delete(driver.keys.bell)
    assert [(job.id, job.strikes) for job in (await driver.claim("b")).deliveries] == [(suspect, 1)]
    assert await driver.redis.llen(driver.keys.bell) == 1, "somebody else may take what is behind it"
    assert [(job.id, job.strikes) for job in (await driver.claim("b")).deliveries] == [(behind, 0)]


async def test_a_suspect_that_waits_in_its_tenants_queue_is_alone_too(driver: Driver) -> None:
    """A delayed retry that never began goes back there."""
    suspect = await driver.enqueue()
    await driver.queue.retry(suspect, (await driver.claim_one()).fence, delay_s=500.0)
    before, after = await driver.enqueue(), await driver.enqueue()
    await driver.redis.zadd(driver.keys.later, {suspect: 1})
    last = await driver.enqueue()
    assert [job.id for job in (await driver.claim()).deliveries] == [before, after, last]
    assert await driver.state(suspect) == "waiting", "it came due in that claim, behind those that waited"
    assert await driver.queue.counts() == (1, 1)
    await driver.enqueue()
    assert [job.id for job in (await driver.claim()).deliveries] == [suspect]
    assert len((await driver.claim()).deliveries) == 1


async def test_a_suspect_that_is_left_keeps_its_place_among_the_held(driver: Driver) -> None:
    progressed, suspect = await driver.enqueue(), await driver.enqueue()
    await driver.rewind(progressed, at=1)
    for _ in range(2):  # in the first claim both gain a token, in the second one none
        jobs = {job.id: job for job in (await driver.claim()).deliveries}
        for id in (progressed, suspect):
            if jobs[id].seq == 0:
                await driver.say(jobs[id], "x")
                await driver.queue.release(id, jobs[id].fence)
    await driver.queue.release(progressed, jobs[progressed].fence)
    await driver.queue.retry(suspect, jobs[suspect].fence)
    assert [job.id for job in (await driver.claim()).deliveries] == [progressed]
    assert await driver.redis.zrange(driver.keys.held("interactive", "fp"), 0, -1) == [suspect.encode()]
    (alone,) = (await driver.claim()).deliveries
    assert (alone.id, alone.strikes) == (suspect, 1)


async def test_a_suspect_that_ends_in_the_claim_leaves_room_for_others(driver: Driver) -> None:
    worn_out, healthy = await driver.enqueue(), await driver.enqueue()
    await driver.claim_one()
    await driver.end_lease(worn_out)
    claimed = await driver.claim(max_strikes=1)
    assert claimed.gone == (worn_out,)
    assert [job.id for job in claimed.deliveries] == [healthy]
