"""After a drain, whatever the endings were, Redis holds what an idle queue holds: the ledger and the pace."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest
from contract_driver import Driver

from jitney.errors import Overloaded
from jitney.keys import JobId
from jitney.queue import Delivery, Limits

NUM_JOBS = 500
FAR_FUTURE = 4_000_000_000.0
IDLE = {"usage", "vt"}
LARGEST_VT_BYTES = 1_024


class Mix:
    """Every way a job can go. Each runs one job, alone in its queue, to its end."""

    def __init__(self, driver: Driver) -> None:
        self.driver, self.queue, self.keys = driver, driver.queue, driver.keys
        self._numbers = itertools.count()

    async def new(self, **fields: object) -> JobId:
        """Of many tenants and all bands, with deadlines and keys."""
        number = next(self._numbers)
        band = ("interactive", "standard", "bulk")[number % 3]
        more = {"timeout_s": 900.0, "queue_timeout_s": 600.0} if number % 2 else {}
        key = {"idempotency_key": f"key {number}"} if number % 5 == 0 else {}
        given = {"tenant": f"t{number % 97}", "band": band, "num_prompt_tokens": 1 + number % 40, **more, **key}
        return await self.driver.enqueue(**given | fields)

    async def claimed(self, fingerprint: str = "fp") -> Delivery:
        await self.new()
        return await self.driver.claim_one(fingerprint=fingerprint)

    async def held(self, fingerprint: str = "fp") -> Delivery:
        """Given back with something said, to its own build."""
        job = await self.claimed(fingerprint)
        await self.driver.say(job, "a")
        assert await self.queue.release(job.id, job.fence) == "ok"
        return job

    async def finished(self) -> None:
        job = await self.claimed()
        await self.driver.say(job, "a", "b")
        assert await self.driver.finish(job, seq=3, num_tokens=2) == "ok"

    async def finished_and_folded(self) -> None:
        await self.finished()
        assert await self.queue.fold_ended(older_than_s=-1.0) >= 1

    async def failed_unsaid(self) -> None:
        assert await self.driver.finish(await self.claimed()) == "ok"

    async def cancelled_waiting(self) -> None:
        assert (await self.queue.cancel(await self.new())).was == "waiting"

    async def cancelled_later(self) -> None:
        assert (await self.queue.cancel(await self.new(not_before=FAR_FUTURE))).was == "later"

    async def cancelled_running(self) -> None:
        job = await self.claimed()
        await self.driver.say(job, "a")
        assert (await self.queue.cancel(job.id)).was == "running"

    async def cancelled_returned(self) -> None:
        job = await self.claimed()
        await self.queue.release(job.id, job.fence)
        assert (await self.queue.cancel(job.id)).was == "returned"

    async def cancelled_held(self) -> None:
        assert (await self.queue.cancel((await self.held()).id)).was == "returned"

    async def expired_waiting(self) -> None:
        await self._expire(await self.new(timeout_s=900.0))

    async def expired_later(self) -> None:
        await self._expire(await self.new(not_before=FAR_FUTURE, deadline=FAR_FUTURE + 1))

    async def expired_running(self) -> None:
        await self._expire((await self.claimed()).id)

    async def expired_held(self) -> None:
        await self._expire((await self.held()).id)

    async def _expire(self, id: JobId) -> None:
        await self.driver.rewind(id, deadline=1)
        await self.driver.redis.zadd(self.keys.deadlines, {id: 1})
        assert (await self.queue.janitor()).num_expired == 1

    async def orphaned(self) -> None:
        job = await self.held("old-build")
        await self.driver.lose_build("old-build", job.id)
        assert (await self.queue.janitor()).num_orphans == 1

    async def retried(self) -> None:
        job = await self.claimed()
        assert await self.queue.retry(job.id, job.fence, delay_s=100.0) == "ok"
        await self.driver.redis.zadd(self.keys.later, {job.id: 1}, xx=True)
        assert await self.driver.finish(await self.driver.claim_one()) == "ok"

    async def taken_over(self) -> None:
        job = await self.claimed()
        await self.driver.end_lease(job.id, job.band)
        assert await self.driver.finish(await self.driver.claim_one("other")) == "ok"

    async def resumed(self) -> None:
        job = await self.held()
        again = await self.driver.claim_one("other")
        assert (again.id, again.seq) == (job.id, 1)
        assert await self.driver.finish(again, num_tokens=1) == "ok"

    async def buried_and_dropped(self) -> None:
        assert await self.queue.drop_dead(await self._bury())

    async def buried_and_requeued(self) -> None:
        id = await self.queue.requeue_dead(await self._bury())
        assert (await self.queue.cancel(id)).was == "waiting"

    async def _bury(self) -> JobId:
        await self.new(body=b'{"v":1,"prompt":"x"}')
        job = await self.driver.claim_one()
        assert await self.queue.retry(job.id, job.fence, max_tries=1) == "dead"
        return job.id

    async def lost(self) -> None:
        id = await self.new()
        await self.driver.redis.delete(self.keys.body(id))
        assert (await self.driver.claim()).gone == (id,)

    async def forgotten(self) -> None:
        id = await self.new()
        await self.driver.redis.delete(self.keys.job(id))
        assert (await self.driver.claim()).gone == (id,)

    async def asked_twice(self) -> None:
        entry = self.driver.entry(idempotency_key="once more", timeout_s=5.0)
        assert [(await self.driver.submit(entry)).duplicate for _ in range(2)] == [False, True]
        assert (await self.driver.submit(self.driver.entry(idempotency_key="once more"))).duplicate
        assert (await self.queue.cancel(entry.id)).was == "waiting"
        await self.driver.redis.delete(self.keys.idempotency("-", "once more"))

    async def refused(self) -> None:
        """The first of two, and no trace of the second."""
        id, limits = await self.new(), Limits(max_waiting_jobs=1)
        with pytest.raises(Overloaded):
            await self.new(limits=limits, timeout_s=5.0, idempotency_key="never")
        assert (await self.queue.cancel(id)).was == "waiting"


ENDINGS = [name for name in vars(Mix) if not name.startswith("_") and name not in ("new", "claimed", "held")]


async def drain(driver: Driver, num_jobs: int) -> Counter[str]:
    """Run jobs through every ending in turn; how many of each."""
    mix, tally = Mix(driver), Counter[str]()
    for number in range(num_jobs):
        name = ENDINGS[number % len(ENDINGS)]
        ending: Callable[[], Awaitable[None]] = getattr(mix, name)
        await ending()
        tally[name] += 1
    return tally


async def life_of_results_ends(driver: Driver) -> int:
    """Every key that has an end reaches it. How many there were."""
    names = [f"{driver.keys.prefix}:{name}" for name in await driver.key_names()]
    mortal = [name for name in names if await driver.redis.pttl(name) > 0]
    for name in mortal:
        await driver.redis.pexpire(name, 0)
    return len(mortal)


async def keep_house(driver: Driver) -> None:
    """What every worker does when there is nothing to do."""
    assert (await driver.claim()).deliveries == ()  # and none of the old build, which is no more
    while await driver.queue.fold_ended(older_than_s=-1.0) or await driver.redis.exists(driver.keys.ended):
        pass
    await driver.queue.janitor(fingerprint="fp")
    while await driver.redis.exists(driver.keys.sweep):
        await driver.queue.janitor(fingerprint="fp")


@pytest.mark.timeout(120)
async def test_after_five_hundred_jobs_of_every_ending_the_queue_is_idle_again(driver: Driver) -> None:
    tally = await drain(driver, NUM_JOBS)
    assert len(tally) == len(ENDINGS) == 22
    await keep_house(driver)
    lasting = {name for name in await driver.key_names() if await driver.redis.pttl(f"{driver.keys.prefix}:{name}") < 0}
    assert lasting == IDLE, "everything else has an end"
    assert await life_of_results_ends(driver) >= NUM_JOBS
    await keep_house(driver)
    assert await driver.key_names() == IDLE
    assert await driver.queue.counts() == (0, 0)
    assert await driver.queue.dead() == []
    num_ended = NUM_JOBS + tally["buried_and_requeued"]
    assert await driver.redis.xlen(driver.keys.usage) == num_ended, "one line of the ledger for each job"


@pytest.mark.timeout(120)
async def test_what_an_idle_queue_holds_does_not_grow(driver: Driver) -> None:
    for _ in range(2):
        await drain(driver, 4 * len(ENDINGS))
        await keep_house(driver)
        await life_of_results_ends(driver)
        await keep_house(driver)
        assert await driver.redis.memory_usage(driver.keys.virtual_time) < LARGEST_VT_BYTES
        assert set(await driver.redis.hkeys(driver.keys.virtual_time)) <= {
            *(b"interactive", b"standard", b"bulk"),
            *(b"avg", b"rate", b"sum", b"from", b"rest"),
        }
        assert await driver.key_names() == IDLE
