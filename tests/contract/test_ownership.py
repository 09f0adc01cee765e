"""Whoever holds the current fence writes; nobody else, whatever was lost on the way."""

from __future__ import annotations

from dataclasses import replace

from contract_driver import LEASE_S, Driver

from jitney.messages import Event
from jitney.queue import Append, Held, pack_ids, unpack_ids
from jitney.scripts import load


async def test_a_job_is_handed_out_once(driver: Driver) -> None:
    id = await driver.enqueue()
    assert (await driver.claim_one("a")).id == id
    assert (await driver.claim("b")).deliveries == ()


async def test_what_was_appended_is_in_the_log_with_its_seq_as_id(driver: Driver) -> None:
    await driver.enqueue()
    job = await driver.claim_one()
    assert await driver.say(job, "a", "b") == []
    entries = await driver.redis.xrange(driver.keys.tokens(job.id))
    assert [id for id, _ in entries] == [b"1-0", b"2-0"]
    assert [list(fields) for _, fields in entries] == [[b"e"], [b"e"]]
    assert [event.text for event in await driver.events(job.id)] == ["a", "b"]
    status = await driver.queue.status(job.id)
    assert status is not None
    assert (status.seq, status.num_tokens, status.state, status.owner) == (2, 2, "running", "w")


async def test_each_event_is_one_message_of_the_channel_with_the_same_bytes(driver: Driver) -> None:
    id = await driver.enqueue()
    async with driver.redis.pubsub() as reader:
        await reader.subscribe(driver.keys.tokens(id))
        job = await driver.claim_one()
        await driver.say(job, "line\nbreak", "é")
        await driver.finish(job, seq=3, num_tokens=2)
        messages = []
        async for message in reader.listen():
            if message["type"] == "message":
                messages.append(message["data"])
            if len(messages) == 3:
                break
    assert messages == await driver.queue.read_log(id)
    assert all(b"\n" not in message for message in messages)
    assert [Event.decode(message).type for message in messages] == ["tokens", "tokens", "finished"]


async def test_a_repeated_append_is_no_refusal(driver: Driver) -> None:
    await driver.enqueue()
    job = await driver.claim_one()
    assert await driver.say(job, "a", "b") == []
    assert await driver.say(job, "a", "b") == [], "its first sending was accepted and the reply lost"
    assert len(await driver.events(job.id)) == 2


async def test_an_append_after_a_gap_is_refused_with_the_last_seq(driver: Driver) -> None:
    await driver.enqueue()
    job = await driver.claim_one()
    await driver.say(job, "a")
    (refusal,) = await driver.say(job, "c", seq=3)
    assert (refusal.id, refusal.reason, refusal.seq) == (job.id, "seq", 1)
    assert len(await driver.events(job.id)) == 1


async def test_an_append_that_overlaps_is_refused(driver: Driver) -> None:
    await driver.enqueue()
    job = await driver.claim_one()
    await driver.say(job, "a", "b")
    (refusal,) = await driver.say(job, "B", "C", seq=2)
    assert (refusal.reason, refusal.seq) == ("seq", 2)


async def test_a_worker_that_was_thought_dead_can_do_nothing(driver: Driver) -> None:
    id = await driver.enqueue()
    ghost = await driver.claim_one("a")
    await driver.say(ghost, "a")
    await driver.end_lease(id)
    owner = await driver.claim_one("b")
    assert owner.fence != ghost.fence
    assert (owner.tries, owner.seq, owner.num_tokens) == (2, 1, 1)
    (refusal,) = await driver.say(ghost, "x", seq=2)
    assert refusal.reason == "fence"
    assert await driver.finish(ghost, seq=2) == "fence"
    assert await driver.queue.release(id, ghost.fence) == "fence"
    assert await driver.queue.retry(id, ghost.fence) == "fence"
    assert await driver.queue.renew(LEASE_S, [driver.held(ghost)]) == {id}
    assert await driver.say(owner, "b") == []
    assert [event.text for event in await driver.events(id)] == ["a", "b"]


async def test_a_late_owner_goes_on_if_nobody_took_over(driver: Driver) -> None:
    """The lease is over, but the job is still its own: nothing is computed twice."""
    id = await driver.enqueue()
    job = await driver.claim_one()
    await driver.end_lease(id)
    assert await driver.say(job, "a") == []
    assert await driver.queue.renew(LEASE_S, [driver.held(job)]) == set()
    assert (await driver.claim("b")).deliveries == ()


async def test_renewing_in_slices_tells_all_that_is_lost(driver: Driver) -> None:
    for _ in range(600):
        await driver.enqueue()
    jobs = (await driver.claim(credit=600)).deliveries
    assert len(jobs) == 600
    lost = [job for number, job in enumerate(jobs) if number % 100 == 0]
    for job in lost:
        await driver.queue.cancel(job.id)
    assert await driver.queue.renew(LEASE_S, [driver.held(job) for job in jobs]) == {job.id for job in lost}


async def test_renewing_puts_a_lost_lease_set_back(driver: Driver) -> None:
    await driver.enqueue()
    job = await driver.claim_one()
    await driver.redis.delete(driver.keys.leases("interactive"))
    assert await driver.queue.renew(LEASE_S, [driver.held(job)]) == set()
    await driver.end_lease(job.id)


async def test_renewing_nothing_is_nothing(driver: Driver) -> None:
    assert await driver.queue.renew(LEASE_S, []) == set()
    assert await driver.queue.append([]) == []


async def test_a_lost_reply_of_claim_is_found_again(driver: Driver) -> None:
    for _ in range(3):
        await driver.enqueue(timeout_s=1_000.0)
    claimed = await driver.queue.claim("w", "lost", credit=2, fingerprint="fp", lease_s=LEASE_S)
    adopted = await driver.queue.adopt("w", "lost")
    assert [replace(job, time_left_ms=None) for job in adopted] == [
        replace(job, time_left_ms=None) for job in claimed.deliveries
    ]
    assert all(job.time_left_ms is not None and 0 < job.time_left_ms <= 1_000_000 for job in adopted)
    assert await driver.queue.adopt("w", "never-sent") == ()
    assert await driver.queue.adopt("other", "lost") == ()


async def test_an_adopted_job_whose_deadline_has_passed_has_no_time_left(driver: Driver) -> None:
    """Not: a deadline it does not have."""
    id = await driver.enqueue(timeout_s=1_000.0)
    await driver.queue.claim("w", "lost", credit=1, fingerprint="fp", lease_s=LEASE_S)
    await driver.rewind(id, deadline=1)
    (job,) = await driver.queue.adopt("w", "lost")
    assert job.time_left_ms == 0


async def test_what_was_lost_again_is_not_adopted(driver: Driver) -> None:
    first, second = await driver.enqueue(), await driver.enqueue()
    await driver.queue.claim("w", "lost", credit=2, fingerprint="fp", lease_s=LEASE_S)
    await driver.queue.cancel(first)
    assert [job.id for job in await driver.queue.adopt("w", "lost")] == [second]


async def test_a_repeated_finish_is_ok_and_ends_once(driver: Driver) -> None:
    await driver.enqueue()
    job = await driver.claim_one()
    assert await driver.finish(job) == "ok"
    assert await driver.finish(job) == "ok"
    assert len(await driver.events(job.id)) == 1
    assert await driver.redis.xlen(driver.keys.usage) == 1


async def test_finish_says_who_came_first(driver: Driver) -> None:
    await driver.enqueue()
    job = await driver.claim_one()
    await driver.queue.cancel(job.id)
    assert await driver.finish(job, seq=2) == "done"
    assert [event.type for event in await driver.events(job.id)] == ["cancelled"]


async def test_finish_after_a_gap_is_refused(driver: Driver) -> None:
    await driver.enqueue()
    job = await driver.claim_one()
    assert await driver.finish(job, seq=2) == "seq"
    assert await driver.state(job.id) == "running"


async def test_finish_of_a_job_that_is_gone_says_so(driver: Driver) -> None:
    await driver.enqueue()
    job = await driver.claim_one()
    await driver.redis.delete(driver.keys.job(job.id))
    assert await driver.finish(job) == "gone"
    assert await driver.queue.release(job.id, job.fence) == "gone"
    assert await driver.queue.retry(job.id, job.fence) == "gone"
    (refusal,) = await driver.say(job, "a")
    assert refusal.reason == "fence"


async def test_one_refused_job_of_a_step_leaves_the_others_alone(driver: Driver) -> None:
    """150 jobs in one step are three calls; the refused ones are in the first and the last."""
    for _ in range(150):
        await driver.enqueue()
    jobs = (await driver.claim(credit=150)).deliveries
    event = Event("tokens", 1, token_ids=(1,), text="x").encode()
    appends = [Append(job.id, job.fence, 1, 1, [event]) for job in jobs]
    appends[3] = replace(appends[3], fence=jobs[4].fence)
    appends[149] = replace(appends[149], first_seq=9)
    await driver.redis.script_load(load("append").source)
    calls = await script_calls(driver)
    refusals = await driver.queue.append(appends)
    assert await script_calls(driver) == calls + 3, "at most 64 jobs a call: a longer one would hold up the server"
    assert [(refusal.id, refusal.reason) for refusal in refusals] == [(jobs[3].id, "fence"), (jobs[149].id, "seq")]
    lengths = [await driver.redis.xlen(driver.keys.tokens(job.id)) for job in jobs]
    assert lengths == [int(number not in (3, 149)) for number in range(150)]


async def script_calls(driver: Driver) -> int:
    return int((await driver.redis.info("commandstats"))["cmdstat_evalsha"]["calls"])


async def test_a_log_that_vanished_does_not_begin_anew(driver: Driver) -> None:
    await driver.enqueue()
    job = await driver.claim_one()
    await driver.say(job, "a")
    await driver.redis.delete(driver.keys.tokens(job.id))
    (refusal,) = await driver.say(job, "b", seq=2)
    assert refusal.reason == "nolog"
    assert not await driver.redis.exists(driver.keys.tokens(job.id))
    assert await driver.finish(job, seq=2) == "ok", "the job can still be ended"


async def test_an_error_of_the_server_is_that_jobs_alone(driver: Driver) -> None:
    await driver.enqueue()
    await driver.enqueue()
    bad, good = (await driver.claim()).deliveries
    await driver.redis.set(driver.keys.tokens(bad.id), "not a stream")
    event = Event("tokens", 1, token_ids=(1,), text="x").encode()
    (refusal,) = await driver.queue.append([Append(job.id, job.fence, 1, 1, [event]) for job in (bad, good)])
    assert (refusal.id, refusal.reason) == (bad.id, "error")
    assert refusal.text.startswith("WRONGTYPE")
    assert len(await driver.events(good.id)) == 1


async def test_prompt_ids_wait_for_the_next_owner_and_go_with_the_end(driver: Driver) -> None:
    await driver.enqueue(num_prompt_tokens=10)
    job = await driver.claim_one()
    assert job.prompt_ids is None
    packed = pack_ids((0, 5, 2**32 - 1))
    started = Event("started", 1, attempt=1).encode()
    await driver.queue.append([Append(job.id, job.fence, 1, 0, [started], packed, 3)])
    status = await driver.queue.status(job.id)
    assert status is not None
    assert status.num_prompt_tokens == 3
    await driver.queue.release(job.id, job.fence)
    again = await driver.claim_one()
    assert again.prompt_ids is not None
    assert unpack_ids(again.prompt_ids) == (0, 5, 2**32 - 1)
    await driver.finish(again)
    assert not await driver.redis.exists(driver.keys.ids(job.id))


async def test_a_released_job_is_the_next_and_costs_no_attempt(driver: Driver) -> None:
    first, second = await driver.enqueue(), await driver.enqueue()
    job = await driver.claim_one("a")
    assert job.id == first
    assert await driver.queue.release(first, job.fence) == "ok"
    assert await driver.state(first) == "returned"
    (refusal,) = await driver.say(job, "late")
    assert refusal.reason == "fence"
    again = await driver.claim_one("b")
    assert (again.id, again.tries, again.strikes) == (first, 1, 0)
    assert (await driver.claim_one("b")).id == second


async def test_a_job_released_with_a_delay_waits_for_its_time(driver: Driver) -> None:
    id = await driver.enqueue()
    job = await driver.claim_one()
    await driver.queue.release(id, job.fence, delay_s=500.0)
    assert await driver.state(id) == "later"
    claimed = await driver.claim()
    assert claimed.deliveries == ()
    assert claimed.next_due_ms is not None
    assert 490_000 < claimed.next_due_ms <= 500_000
    await driver.redis.zadd(driver.keys.later, {id: 1})
    assert (await driver.claim_one()).id == id


async def test_a_job_without_progress_becomes_a_suspect_and_then_dead(driver: Driver) -> None:
    id = await driver.enqueue()
    for tries, strikes in ((1, 0), (2, 1), (3, 2)):
        job = await driver.claim_one()
        assert (job.tries, job.strikes) == (tries, strikes)
        await driver.end_lease(id)
    claimed = await driver.claim()
    assert (claimed.deliveries, claimed.gone) == ((), (id,))
    (event,) = await driver.events(id)
    assert event.type == "failed"
    assert event.error is not None
    assert event.error["code"] == "max_attempts"
    (dead,) = await driver.queue.dead()
    assert (dead.id, dead.reason, dead.num_tokens) == (id, "max_attempts", 0)


async def test_progress_wipes_out_suspicion_but_not_the_total(driver: Driver) -> None:
    id = await driver.enqueue()
    for tries in range(1, 5):
        job = await driver.claim_one(max_tries=4)
        assert (job.tries, job.strikes) == (tries, 0)
        await driver.say(job, "x")
        await driver.end_lease(id)
    assert (await driver.claim(max_tries=4)).gone == (id,)
    assert [event.type for event in await driver.events(id)] == ["tokens"] * 4 + ["failed"]


async def test_a_retried_job_ends_with_its_last_error_and_is_buried_with_its_body(driver: Driver) -> None:
    id = await driver.enqueue(body=b'{"v":1,"prompt":"poison"}')
    error = {"type": "server_error", "code": "nan_logits", "message": 'say "no"', "param": None}
    job = await driver.claim_one()
    assert await driver.queue.retry(id, job.fence, max_strikes=2, error=error) == "ok"
    job = await driver.claim_one()
    assert (job.tries, job.strikes) == (2, 1)
    assert await driver.queue.retry(id, job.fence, max_strikes=2, error=error) == "dead"
    (event,) = await driver.events(id)
    assert (event.type, event.error) == ("failed", error)
    assert event.usage == {"prompt_tokens": 1, "completion_tokens": 0, "cached_tokens": 0}
    (dead,) = await driver.queue.dead()
    assert (dead.id, dead.reason, dead.event) == (id, "max_attempts", event.encode())
    assert await driver.redis.get(driver.keys.body(id)) == b'{"v":1,"prompt":"poison"}'
    assert await driver.redis.ttl(driver.keys.body(id)) > 6 * 86_400


async def test_a_worker_buries_what_it_cannot_read_with_its_reason(driver: Driver) -> None:
    id = await driver.enqueue(body=b"\x82\xa2")
    job = await driver.claim_one()
    assert job.body == b"\x82\xa2"
    error = {"type": "invalid_request_error", "code": "undecodable", "message": "not JSON", "param": None}
    event = Event("failed", 1, error=error).encode()
    ending = replace(driver.ending(job), reason="failed", events=[event], dead_reason="undecodable")
    assert await driver.queue.finish(ending) == "ok"
    (dead,) = await driver.queue.dead()
    assert (dead.id, dead.reason, dead.event) == (id, "undecodable", event)


async def test_the_dead_are_bounded_with_their_bodies(driver: Driver) -> None:
    first = await driver.enqueue()
    await driver.queue.retry(first, (await driver.claim_one()).fence, max_strikes=1)
    pipe = driver.redis.pipeline(transaction=False)
    for number in range(1_000):
        pipe.xadd(driver.keys.dead, {"j": f"{driver.queue.name}.other{number}", "r": "test"})
    await pipe.execute()
    second = await driver.enqueue()
    await driver.queue.retry(second, (await driver.claim_one()).fence, max_strikes=1)
    assert await driver.redis.xlen(driver.keys.dead) == 1_000
    assert not await driver.redis.exists(driver.keys.body(first))
    assert await driver.redis.exists(driver.keys.body(second))


async def test_the_life_of_a_result_is_the_jobs_own_unless_the_end_names_another(driver: Driver) -> None:
    for asked, named, expected in ((100, None, 100), (100, 20, 20)):
        id = await driver.enqueue(result_ttl_s=asked)
        await driver.finish(await driver.claim_one(), keep_s=named)
        assert expected - 10 < await driver.redis.ttl(driver.keys.job(id)) <= expected
        assert expected - 10 < await driver.redis.ttl(driver.keys.tokens(id)) <= expected


async def test_held_is_checked_against_its_own_fence_only(driver: Driver) -> None:
    first, second = await driver.enqueue(), await driver.enqueue()
    jobs = {job.id: job for job in (await driver.claim()).deliveries}
    swapped = [Held(first, jobs[second].fence, "interactive"), Held(second, jobs[first].fence, "interactive")]
    assert await driver.queue.renew(LEASE_S, swapped) == {first, second}


async def test_a_claim_that_arrives_after_its_adoption_takes_nothing(driver: Driver) -> None:
    """Its sender has given the connection up, and asked on another one what it gave: nobody would run these jobs."""
    id = await driver.enqueue()
    assert await driver.queue.adopt("w", "late") == ()
    claimed = await driver.queue.claim("w", "late", credit=1, fingerprint="fp", lease_s=LEASE_S)
    assert claimed.deliveries == ()
    assert await driver.state(id) == "waiting"
    assert (await driver.claim_one()).tries == 1, "the next one is as good as any"


async def test_what_says_that_a_claim_came_too_late_has_an_end(driver: Driver) -> None:
    await driver.queue.adopt("w", "late")
    assert 0 < await driver.redis.ttl(driver.keys.last("w")) <= 3_600
