"""Anyone may write to Redis. What is no job is dropped with a reason; good jobs beside it run, counts stay right."""

from __future__ import annotations

import pytest
from contract_driver import LEASE_S, Driver

from jitney.keys import new_job_id
from jitney.messages import Event

FAR_FUTURE = 4_000_000_000.0
RUBBISH: dict[str, dict[bytes | str, bytes | str]] = {
    "bytes that are not UTF-8": {"payload": b"\x82\xa2"},
    "no job id": {"est": "5"},
    "an id that is none": {"j": "../x", "est": "5"},
    "an id of bytes": {"j": b"\xff\xfe", "est": b"\xff"},
    "an estimate that is none": {"j": "{tag}", "est": "1e300"},
    "an empty id": {"j": "", "est": ""},
    "a huge entry": {"j": b"x" * 1_000_000},
}


@pytest.mark.parametrize("fields", RUBBISH.values(), ids=[name.replace(" ", "-") for name in RUBBISH])
async def test_an_entry_that_names_no_job_is_buried_and_the_next_ones_run(
    driver: Driver, fields: dict[bytes | str, bytes | str]
) -> None:
    stream = driver.keys.jobs("interactive", "-")
    first = await driver.enqueue(num_prompt_tokens=3)
    await driver.redis.xadd(stream, fields)
    second = await driver.enqueue(num_prompt_tokens=4)
    third = await driver.enqueue(num_prompt_tokens=5)
    claimed = await driver.claim(credit=2)
    assert [job.id for job in claimed.deliveries] == [first, second]
    assert await driver.queue.counts() == (1, 5)
    (dead,) = await driver.queue.dead()
    assert (dead.id, dead.reason, dead.band, dead.tenant) == ("", "undecodable", "interactive", "-")
    assert len(dead.fields["raw"]) <= 512
    assert [job.id for job in (await driver.claim()).deliveries] == [third]
    assert not await driver.redis.exists(stream)


async def test_a_flood_of_rubbish_ends(driver: Driver) -> None:
    await driver.enqueue()
    pipe = driver.redis.pipeline(transaction=False)
    for number in range(1_500):
        pipe.xadd(driver.keys.jobs("interactive", "-"), {"x": str(number)})
    await pipe.execute()
    good = await driver.enqueue()
    found = set()
    for _ in range(10):
        found |= {job.id for job in (await driver.claim(credit=4)).deliveries}
    assert good in found
    assert await driver.queue.counts() == (0, 0)
    assert await driver.redis.xlen(driver.keys.dead) <= 1_100


async def test_a_lost_record_ends_its_readers_wait_and_leaves_the_others_alone(driver: Driver) -> None:
    """Two of four records vanish: two jobs run, the readers of the lost ones get a last event."""
    ids = [await driver.enqueue(num_prompt_tokens=2) for _ in range(4)]
    await driver.redis.delete(driver.keys.job(ids[0]), driver.keys.job(ids[2]))
    claimed = await driver.claim()
    assert [job.id for job in claimed.deliveries] == [ids[1], ids[3]]
    assert claimed.gone == (ids[0], ids[2])
    assert await driver.queue.counts() == (0, 0)
    for id in (ids[0], ids[2]):
        (event,) = await driver.events(id)
        assert (event.type, event.seq) == ("failed", 1)
        assert event.error is not None
        assert event.error["code"] == "job_lost"
        assert await driver.redis.ttl(driver.keys.tokens(id)) > 0
        assert not await driver.redis.exists(driver.keys.body(id))


async def test_a_lost_body_ends_the_job(driver: Driver) -> None:
    id, good = await driver.enqueue(), await driver.enqueue()
    await driver.redis.delete(driver.keys.body(id))
    claimed = await driver.claim()
    assert ([job.id for job in claimed.deliveries], claimed.gone) == ([good], (id,))
    (event,) = await driver.events(id)
    assert event.type == "failed"
    assert event.error is not None
    assert event.error["code"] == "job_lost"


async def test_a_second_entry_of_a_job_hands_it_out_once(driver: Driver) -> None:
    id = await driver.enqueue(num_prompt_tokens=3)
    await driver.redis.xadd(driver.keys.jobs("interactive", "-"), {"j": id, "est": "3"})
    await driver.enqueue(num_prompt_tokens=4)
    claimed = await driver.claim()
    assert len(claimed.deliveries) == 2
    assert await driver.queue.counts() == (0, 0)


async def test_an_entry_in_another_tenants_stream_moves_no_job(driver: Driver) -> None:
    id = await driver.enqueue(tenant="ann")
    await driver.enqueue(tenant="bob")
    await driver.redis.xadd(driver.keys.jobs("interactive", "bob"), {"j": id, "est": "1"})
    tenants = sorted(job.tenant for job in (await driver.claim()).deliveries)
    assert tenants == ["ann", "bob"]


async def test_keys_of_the_wrong_type_stop_nobody_else(driver: Driver) -> None:
    broken = await driver.enqueue(tenant="broken")
    lost, good = await driver.enqueue(tenant="ok"), await driver.enqueue(tenant="ok")
    await driver.redis.set(driver.keys.jobs("interactive", "broken"), "not a stream")
    await driver.redis.set(driver.keys.job(lost), "not a hash")
    claimed = await driver.claim()
    assert [job.id for job in claimed.deliveries] == [good]
    assert (await driver.claim()).deliveries == ()
    assert await driver.queue.counts() == (0, 0)
    assert await driver.redis.delete(driver.keys.jobs("interactive", "broken")) == 1
    assert await driver.queue.repair(broken) == "queued"
    assert [job.id for job in (await driver.claim()).deliveries] == [broken]


async def test_leases_and_delays_of_jobs_that_do_not_exist_are_dropped(driver: Driver) -> None:
    nobody = new_job_id(driver.queue.name)
    await driver.redis.zadd(driver.keys.leases("interactive"), {nobody: 1})
    await driver.redis.zadd(driver.keys.held("interactive", "fp"), {nobody: 1})
    await driver.redis.zadd(driver.keys.later, {nobody: 1})
    good = await driver.enqueue()
    assert [job.id for job in (await driver.claim()).deliveries] == [good]
    await driver.finish((await driver.queue.adopt("w", "n1"))[0])
    places = {name.split(":")[0] for name in await driver.key_names()} & {"leases", "held", "later", "jobs", "fair"}
    assert places == set()


async def test_a_log_written_by_a_stranger_does_not_stop_the_end(driver: Driver) -> None:
    id = await driver.enqueue()
    await driver.redis.set(driver.keys.tokens(id), "not a stream")
    cancelled = await driver.queue.cancel(id)
    assert cancelled.outcome == "cancelled"
    assert await driver.state(id) == "done"


async def test_a_lost_job_is_told_on_the_channel_too(driver: Driver) -> None:
    id = await driver.enqueue()
    async with driver.redis.pubsub() as reader:
        await reader.subscribe(driver.keys.tokens(id))
        await driver.redis.delete(driver.keys.job(id))
        await driver.claim()
        async for message in reader.listen():
            if message["type"] == "message":
                assert Event.decode(message["data"]).is_terminal
                break


async def test_a_log_that_is_no_stream_does_not_keep_others_from_being_folded(driver: Driver) -> None:
    broken, good = await driver.enqueue(), await driver.enqueue()
    for id in (broken, good):
        await driver.queue.cancel(id)
    await driver.redis.set(driver.keys.tokens(broken), "not a stream")
    assert await driver.queue.fold_ended(older_than_s=-1.0) == 1
    assert await driver.redis.exists(driver.keys.result(good))
    assert not await driver.redis.exists(driver.keys.ended)


async def test_readers_pass_over_entries_that_are_not_ours(driver: Driver) -> None:
    id = await driver.enqueue()
    job = await driver.claim_one()
    await driver.say(job, "a")
    await driver.redis.xadd(driver.keys.tokens(id), {"x": "y"}, id="1-1")
    await driver.say(job, "b", seq=2)
    assert [event.text for event in await driver.events(id)] == ["a", "b"]


async def test_a_record_that_is_none_costs_nobody_else_a_lease(driver: Driver) -> None:
    """One call renews the leases of a whole batch."""
    for _ in range(2):
        await driver.enqueue()
    broken, good = (await driver.claim()).deliveries
    await driver.redis.set(driver.keys.job(broken.id), "not a hash")
    assert await driver.queue.renew(LEASE_S, [driver.held(broken), driver.held(good)]) == {broken.id}
    assert [job.id for job in await driver.queue.adopt("w", "n1")] == [good.id]


@pytest.mark.parametrize("kind", ["cancelled", "expired"])
async def test_a_waiting_job_whose_stream_is_none_still_ends_for_its_readers(driver: Driver, kind: str) -> None:
    id = await driver.enqueue(tenant="broken", queue_timeout_s=100.0)
    await driver.redis.set(driver.keys.jobs("interactive", "broken"), "not a stream")
    if kind == "cancelled":
        await driver.queue.cancel(id)
    else:
        await driver.rewind(id, qdeadline=1)
        await driver.redis.zadd(driver.keys.deadlines, {id: 1}, xx=True)
        assert (await driver.queue.janitor()).num_expired == 1
    assert [event.type for event in await driver.events(id)] == [kind]
    assert await driver.redis.ttl(driver.keys.tokens(id)) > 0
    assert await driver.queue.counts() == (0, 0)


async def test_a_delayed_job_falls_due_into_a_stream_that_was_none(driver: Driver) -> None:
    id = await driver.enqueue(tenant="broken", not_before=FAR_FUTURE)
    await driver.redis.set(driver.keys.jobs("interactive", "broken"), "not a stream")
    await driver.redis.zadd(driver.keys.later, {id: 1}, xx=True)
    assert [job.id for job in (await driver.claim()).deliveries] == [id]


async def test_logs_that_a_stranger_wrote_to_do_not_keep_others_from_being_folded(driver: Driver) -> None:
    broken, good = await driver.enqueue(), await driver.enqueue()
    for job in (await driver.claim()).deliveries:
        await driver.say(job, "a")
        if job.id == broken:
            await driver.redis.xadd(driver.keys.tokens(broken), {"x": "y"}, id="1-1")
        await driver.finish(job, seq=2, num_tokens=1)
    await driver.redis.zadd(driver.keys.ended, {broken: 1})
    assert [await driver.queue.fold_ended(older_than_s=-1.0, limit=1) for _ in range(2)] == [0, 1]
    assert await driver.redis.exists(driver.keys.result(good))
    assert [event.type for event in await driver.events(broken)] == ["tokens", "finished"]
