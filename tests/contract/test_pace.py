"""How fast a queue is worked off: tokens over the time in which somebody was at work, and the pauses made from it.

Time passes here by moving every stamp of the queue back; what the scripts make of it is compared exactly.
"""

from __future__ import annotations

import pytest
from contract_driver import Driver

from jitney.errors import Overloaded
from jitney.keys import BANDS, JobId
from jitney.queue import Backlog, Limits
from jitney.replies import MAX_RETRY_S, MIN_RETRY_S

HOUR_MS = 3_600_000


class Pace:
    """The queue's own figures, and time that passes."""

    def __init__(self, driver: Driver) -> None:
        self._driver, self._redis, self._keys = driver, driver.redis, driver.keys

    async def number(self, field: str) -> float | None:
        stored = await self._redis.hget(self._keys.virtual_time, field)
        return None if stored is None else float(stored)

    async def worked_ms(self) -> float | None:
        """Of the window that runs, while its clock stands."""
        began, rests = await self.number("from"), await self.number("rest")
        return None if began is None or rests is None else rests - began

    async def claimed_at(self, id: JobId) -> float:
        return float(await self._redis.hget(self._keys.job(id), "since"))

    async def ended_at(self, id: JobId) -> float:
        return float(await self._redis.hget(self._keys.job(id), "ended"))

    async def passes(self, ms: int, *, leases: bool = False) -> None:
        """leases: those that live run out at the beginning of that time, as if their owners had died then."""
        for field in ("from", "rest"):
            if await self.number(field) is not None:
                await self._redis.hincrby(self._keys.virtual_time, field, -ms)
        if leases:
            seconds, microseconds = await self._redis.time()
            died_at = seconds * 1_000 + microseconds // 1_000 - ms
            for band in BANDS:
                for id in await self._redis.zrange(self._keys.leases(band), 0, -1):
                    await self._redis.zadd(self._keys.leases(band), {id: died_at})


@pytest.fixture
def pace(driver: Driver) -> Pace:
    return Pace(driver)


async def run_one(driver: Driver, pace: Pace, ms: int, num_tokens: int) -> JobId:
    """A job of 5 prompt tokens that is worked on for `ms` (and what the calls take)."""
    id = await driver.enqueue(num_prompt_tokens=5)
    job = await driver.claim_one()
    await pace.passes(ms)
    assert await driver.finish(job, num_tokens=num_tokens) == "ok"
    return id


async def test_the_clock_starts_with_the_first_claim(driver: Driver, pace: Pace) -> None:
    await driver.enqueue()
    assert await pace.number("from") is None
    job = await driver.claim_one()
    assert await pace.number("from") == await pace.claimed_at(job.id)
    assert await driver.queue.backlog() == Backlog(0, 0, None, 0.0)


async def test_the_rate_is_the_tokens_of_a_window_over_its_time(driver: Driver, pace: Pace) -> None:
    for _ in range(3):
        await driver.enqueue(num_prompt_tokens=5)
    jobs = (await driver.claim()).deliveries
    await driver.finish(jobs[0], num_tokens=45)
    assert await pace.number("rate") is None, "the window is too short to say anything"
    await pace.passes(10_000)
    began = await pace.number("from")
    await driver.finish(jobs[1], num_tokens=45)
    now = await pace.ended_at(jobs[1].id)
    assert began is not None
    assert await pace.number("rate") == 100 * 1_000 / (now - began)
    assert (await pace.number("from"), await pace.number("sum")) == (now, 0), "the next window begins"


async def test_each_window_weighs_as_much_as_all_before_it(driver: Driver, pace: Pace) -> None:
    await driver.redis.hset(driver.keys.virtual_time, "rate", "64")
    await driver.enqueue(num_prompt_tokens=5)
    job = await driver.claim_one()
    await pace.passes(10_000)
    began = await pace.number("from")
    await driver.finish(job, num_tokens=45)
    assert began is not None
    assert await pace.number("rate") == (64 + 50_000 / (await pace.ended_at(job.id) - began)) / 2


async def test_idle_hours_do_not_count(driver: Driver, pace: Pace) -> None:
    first = await run_one(driver, pace, 2_000, 45)
    worked = await pace.worked_ms()
    assert await pace.number("rest") == await pace.ended_at(first)
    await pace.passes(HOUR_MS)
    assert await pace.worked_ms() == worked, "nobody is at work"
    await driver.enqueue()
    second = await driver.claim_one()
    assert worked is not None
    assert await pace.number("from") == await pace.claimed_at(second.id) - worked
    assert await pace.number("rest") is None


async def test_the_rate_of_a_queue_that_is_mostly_idle_does_not_fall(driver: Driver, pace: Pace) -> None:
    """50 tokens in 5 seconds, once an hour: ten a second, for ever."""
    for _ in range(8):
        await run_one(driver, pace, 5_000, 45)
        await pace.passes(HOUR_MS)
    rate = await pace.number("rate")
    assert rate is not None
    assert 9.5 < rate <= 10.0, "the calls themselves take some milliseconds"


async def test_an_outage_of_all_workers_does_not_count(driver: Driver, pace: Pace) -> None:
    id = await driver.enqueue()
    await driver.claim_one("a")
    await pace.passes(2_000)
    began = await pace.number("from")
    await pace.passes(HOUR_MS, leases=True)
    ran_out = float(await driver.redis.zscore(driver.keys.leases("interactive"), id))
    assert began is not None
    again = await driver.claim_one("b")
    assert again.id == id
    assert await pace.number("from") == await pace.claimed_at(id) - (ran_out - (began - HOUR_MS))


async def test_whoever_stops_while_another_works_stops_no_clock(driver: Driver, pace: Pace) -> None:
    for band in ("bulk", "interactive"):
        await driver.enqueue(band=band)
    first, second = (await driver.claim()).deliveries
    began = await pace.number("from")
    await driver.finish(first, num_tokens=3)
    assert await pace.number("rest") is None
    await driver.enqueue()
    third = await driver.claim_one()
    assert await pace.number("from") == began, "the pause that was none"
    await driver.finish(third)
    await driver.finish(second)
    assert await pace.number("rest") == await pace.ended_at(second.id)


@pytest.mark.parametrize("ways", ["release", "retry", "cancel"])
async def test_every_way_to_stop_working_stops_the_clock(driver: Driver, pace: Pace, ways: str) -> None:
    id = await driver.enqueue()
    job = await driver.claim_one()
    if ways == "release":
        await driver.queue.release(id, job.fence)
    elif ways == "retry":
        await driver.queue.retry(id, job.fence, delay_s=100.0)
    else:
        await driver.queue.cancel(id)
    stamp = await (pace.ended_at if ways == "cancel" else pace.claimed_at)(id)
    assert await pace.number("rest") == stamp


async def test_work_on_jobs_that_do_not_finish_counts_too(driver: Driver, pace: Pace) -> None:
    spoken, silent, waiting = [await driver.enqueue(num_prompt_tokens=5) for _ in range(3)]
    jobs = (await driver.claim(credit=2)).deliveries
    assert [job.id for job in jobs] == [spoken, silent]
    await driver.say(jobs[0], "a", "b")
    for id in (spoken, silent, waiting):
        assert (await driver.queue.cancel(id)).outcome == "cancelled"
    assert await pace.number("sum") == 5 + 2, "nobody has computed anything for the other two"


# --- what is made of it -----------------------------------------------------------------------------------


async def test_the_backlog_is_told_to_whoever_asks(driver: Driver) -> None:
    assert await driver.queue.backlog() == Backlog(0, 0, None, 0.0)
    for _ in range(3):
        await driver.enqueue(num_prompt_tokens=10)
    assert await driver.queue.backlog() == Backlog(3, 30, None, (30 + 3 * 128) / 500)
    await driver.redis.hset(driver.keys.virtual_time, mapping={"avg": 10, "rate": 0.25})
    assert await driver.queue.backlog() == Backlog(3, 30, 0.25, 240.0)


@pytest.mark.parametrize(
    ("rate", "pause_s"),
    [("6", 10.0), ("0.75", 80.0), ("0.001", MAX_RETRY_S), ("1e9", MIN_RETRY_S)],
)
async def test_the_pause_is_the_backlog_over_the_measured_rate_within_bounds(
    driver: Driver, rate: str, pause_s: float
) -> None:
    """30 waiting prompt tokens and 3 answers of 10 tokens."""
    await driver.redis.hset(driver.keys.virtual_time, mapping={"avg": 10, "rate": rate})
    for _ in range(3):
        await driver.enqueue(num_prompt_tokens=10)
    with pytest.raises(Overloaded) as caught:
        await driver.enqueue(limits=Limits(max_waiting_jobs=3))
    assert caught.value.retry_after_s == pause_s
    assert (MIN_RETRY_S, MAX_RETRY_S) == (1.0, 120.0)
