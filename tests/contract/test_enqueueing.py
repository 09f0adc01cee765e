"""Writing a job: once, within bounds, or not at all."""

from __future__ import annotations

import pytest
from contract_driver import Driver

from jitney.connection import connect_once
from jitney.errors import IdempotencyConflict, InvalidJob, Overloaded, QueueUnavailable
from jitney.queue import Entry, Limits, Queue

FAR_FUTURE = 4_000_000_000.0


async def test_a_job_is_waiting_with_what_was_asked(driver: Driver) -> None:
    id = await driver.enqueue(tenant="ann", band="bulk", num_prompt_tokens=7, timeout_s=60.0)
    status = await driver.queue.status(id)
    assert status is not None
    assert (status.state, status.band, status.tenant, status.num_prompt_tokens) == ("waiting", "bulk", "ann", 7)
    assert status.deadline is not None
    assert abs(status.deadline - status.created_at - 60.0) < 1e-6, "a duration counts from the server's own clock"
    assert status.started_at is None
    assert status.ended_at is None
    assert await driver.queue.counts() == (1, 7)


async def test_the_earlier_of_deadline_and_timeout_holds(driver: Driver) -> None:
    id = await driver.enqueue(deadline=1.5, timeout_s=60.0)
    status = await driver.queue.status(id)
    assert status is not None
    assert status.deadline == 1.5


async def test_a_timeout_of_a_delayed_job_counts_from_its_time(driver: Driver) -> None:
    id = await driver.enqueue(not_before=FAR_FUTURE, timeout_s=60.0)
    status = await driver.queue.status(id)
    assert status is not None
    assert (status.state, status.deadline) == ("later", FAR_FUTURE + 60.0)
    assert await driver.queue.counts() == (0, 0), "a delayed job is not waiting yet"


async def test_a_time_that_has_passed_delays_nothing(driver: Driver) -> None:
    assert await driver.state(await driver.enqueue(not_before=1.0)) == "waiting"


async def test_the_same_job_sent_twice_is_one_job(driver: Driver) -> None:
    entry = driver.entry()
    assert not (await driver.submit(entry)).duplicate
    again = await driver.submit(entry)
    assert (again.id, again.duplicate) == (entry.id, True)
    assert await driver.queue.counts() == (1, 1)
    assert len((await driver.claim()).deliveries) == 1


async def test_the_same_id_with_another_body_is_refused(driver: Driver) -> None:
    entry = driver.entry()
    await driver.submit(entry)
    with pytest.raises(IdempotencyConflict):
        await driver.submit(driver.entry(b'{"v":1,"prompt":"ho"}', id=entry.id))
    assert (await driver.claim_one()).body == entry.body


async def test_an_idempotency_key_answers_the_job_that_exists(driver: Driver) -> None:
    first = await driver.enqueue(idempotency_key="key 1")
    again = await driver.submit(driver.entry(idempotency_key="key 1"))
    assert (again.id, again.duplicate) == (first, True)
    delivery = await driver.claim_one()
    running = await driver.submit(driver.entry(idempotency_key="key 1"))
    assert running.id == first
    await driver.finish(delivery)
    ended = await driver.submit(driver.entry(idempotency_key="key 1"))
    assert (ended.id, ended.duplicate) == (first, True)
    assert await driver.queue.counts() == (0, 0)


async def test_an_idempotency_key_refuses_another_body(driver: Driver) -> None:
    await driver.enqueue(idempotency_key="k")
    with pytest.raises(IdempotencyConflict, match="another body"):
        await driver.enqueue(body=b'{"v":1,"prompt":"ho"}', idempotency_key="k")
    assert await driver.queue.counts() == (1, 1)


async def test_tenants_do_not_share_idempotency_keys(driver: Driver) -> None:
    first = await driver.enqueue(tenant="ann", idempotency_key="k")
    second = await driver.submit(driver.entry(tenant="bob", idempotency_key="k"))
    assert second.id != first
    assert not second.duplicate


async def test_an_idempotency_key_whose_job_is_gone_enqueues_anew(driver: Driver) -> None:
    first = await driver.enqueue(idempotency_key="k")
    await driver.finish(await driver.claim_one())
    await driver.redis.delete(driver.keys.job(first))
    second = await driver.submit(driver.entry(b'{"v":1,"prompt":"ho"}', idempotency_key="k"))
    assert second.id != first
    assert not second.duplicate


async def test_an_idempotency_key_lives_as_long_as_the_result(driver: Driver) -> None:
    await driver.enqueue(idempotency_key="k", result_ttl_s=50)
    key = driver.keys.idempotency("-", "k")
    assert await driver.redis.ttl(key) > 30 * 86_400
    await driver.finish(await driver.claim_one())
    assert 40 < await driver.redis.ttl(key) <= 50


@pytest.mark.parametrize("key", ["a:b", "*", "{tag}", "x" * 300, "\r\nX: y", "nul\0", "\udc80"])
async def test_no_text_of_a_user_becomes_part_of_a_key(driver: Driver, key: str) -> None:
    await driver.enqueue(idempotency_key=key)
    (name,) = [name for name in await driver.key_names() if name.startswith("idem:")]
    assert len(name) == len("idem:") + 40
    assert name.removeprefix("idem:").isalnum()


@pytest.mark.parametrize(
    ("limits", "which"),
    [
        (Limits(max_waiting_jobs=3), "waiting jobs"),
        (Limits(max_waiting_tokens=35), "waiting tokens"),
        (Limits(max_tenant_jobs=3), "jobs of this tenant"),
    ],
)
async def test_a_full_queue_refuses_and_writes_nothing(driver: Driver, limits: Limits, which: str) -> None:
    for _ in range(3):
        await driver.enqueue(limits=limits, num_prompt_tokens=10)
    before = await driver.key_names()
    with pytest.raises(Overloaded) as caught:
        await driver.enqueue(limits=limits, num_prompt_tokens=10, idempotency_key="k", timeout_s=5.0)
    assert caught.value.which == which
    assert (caught.value.waiting_jobs, caught.value.waiting_tokens) == (3, 30)
    assert 1.0 <= caught.value.retry_after_s <= 120.0
    assert await driver.key_names() == before
    await driver.claim_one()
    await driver.enqueue(limits=limits, num_prompt_tokens=10)


async def test_a_full_tenant_is_no_other_tenants_trouble(driver: Driver) -> None:
    limits = Limits(max_tenant_jobs=1)
    await driver.enqueue(tenant="ann", limits=limits)
    await driver.enqueue(tenant="bob", limits=limits)
    with pytest.raises(Overloaded):
        await driver.enqueue(tenant="ann", limits=limits)


async def test_delayed_jobs_have_a_bound_of_their_own(driver: Driver) -> None:
    limits = Limits(max_waiting_jobs=1, max_later_jobs=1)
    await driver.enqueue(limits=limits, not_before=FAR_FUTURE)
    with pytest.raises(Overloaded) as caught:
        await driver.enqueue(limits=limits, not_before=FAR_FUTURE)
    assert caught.value.which == "delayed jobs"
    await driver.enqueue(limits=limits)


async def test_a_job_larger_than_the_bound_passes_through_an_empty_queue(driver: Driver) -> None:
    await driver.enqueue(limits=Limits(max_waiting_tokens=10), num_prompt_tokens=50)
    with pytest.raises(Overloaded):
        await driver.enqueue(limits=Limits(max_waiting_tokens=10), num_prompt_tokens=1)


async def test_a_server_that_does_not_answer_is_unavailable(queue_name: str) -> None:
    client = connect_once("redis://127.0.0.1:1/0", timeout_s=1.0)
    queue = Queue(client, queue_name)
    with pytest.raises(QueueUnavailable):
        await Driver(queue).enqueue()
    with pytest.raises(QueueUnavailable):
        await queue.cancel(Driver(queue).entry().id)
    await client.aclose()


def test_an_entry_has_defaults_for_everything_but_the_job_itself(queue_name: str) -> None:
    entry = Driver(Queue(connect_once("redis://127.0.0.1:1/0"), queue_name)).entry()
    assert entry == Entry(id=entry.id, body=entry.body, digest=entry.digest)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", "a:b"),
        ("id", "*"),
        ("id", "other." + "0" * 22),
        ("id", "{tag}." + "0" * 22),
        ("tenant", "a:b"),
        ("tenant", "x" * 65),
        ("tenant", ""),
        ("band", "urgent"),
    ],
)
async def test_what_must_not_stand_in_a_key_is_refused(driver: Driver, field: str, value: str) -> None:
    with pytest.raises(InvalidJob):
        await driver.enqueue(**{field: value})
    assert await driver.key_names() == set()
