"""The outbox: what asked to be told is in it from the moment of its end, until somebody has answered for it."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest
from tests.conftest import WriteCard
from tests.contract.contract_driver import Driver
from tests.webhooks.receiver import PATIENCE_S, SECRET, Receiver, answer, settings_for

from jitney import AsyncClient
from jitney.connection import Redis
from jitney.errors import InvalidJob
from jitney.keys import QUEUES, Keys
from jitney.logs import listening
from jitney.messages import Event, usage_of
from jitney.queue import Ending, Queue
from jitney.tasks import end_tasks
from jitney.upkeeping import keep_up
from jitney.webhooks.announcements import BATCHES, Announcements
from jitney.webhooks.events import event_id
from jitney.webhooks.outbox import Verdict, after_failure, announce, deliver_due, judge, keep_delivering
from jitney.webhooks.sending import Answer
from jitney.webhooks.settings import WebhookSettings
from jitney.webhooks.wish import Webhook

LEASE_S = 1_000.0


@pytest.fixture
async def driver(redis: Redis, queue_name: str, write_queue_card: WriteCard) -> Driver:
    await write_queue_card()
    return Driver(Queue(redis, queue_name))


@pytest.fixture
def outbox(driver: Driver) -> Announcements:
    return Announcements(driver.redis, driver.keys.prefix)


def hook(url: str = "https://hooks.example.com/", object: str = "job", **fields: object) -> str:
    return Webhook(url=url, **fields).hook(object)  # type: ignore[arg-type]


async def end(driver: Driver, how: str, finish_reason: str = "stop") -> None:
    """End the next job."""
    if how == "dead":
        job = await driver.claim_one()
        assert await driver.queue.retry(job.id, job.fence, max_tries=1, error={"code": "x", "message": "x"}) == "dead"
        return
    job = await driver.claim_one()
    fields = {"choices": ({"choice": 0, "finish_reason": finish_reason, "num_tokens": 0},)} if how == "finished" else {}
    event = Event(how, job.seq + 1, usage=usage_of(1, 0), **fields).encode()  # type: ignore[arg-type]
    assert await driver.queue.finish(Ending(job.id, job.fence, job.seq + 1, 0, how, [event])) == "ok"


@pytest.mark.parametrize(
    ("how", "ending"), [("finished", "finished"), ("failed", "failed"), ("expired", "expired"), ("dead", "failed")]
)
async def test_a_webhook_is_in_the_outbox_as_soon_as_its_job_has_ended(
    driver: Driver, outbox: Announcements, how: str, ending: str
) -> None:
    id = await driver.enqueue(hook=hook())
    assert await outbox.claim(10, LEASE_S) == []
    await end(driver, how)
    [one] = await outbox.claim(10, LEASE_S)
    assert (one.id, one.object, one.ending, one.url) == (id, "job", ending, "https://hooks.example.com/")
    status = await driver.queue.status(id)
    assert status is not None
    assert one.at_ms == round((status.ended_at or 0) * 1_000)


async def test_a_cancelled_job_and_one_whose_deadline_passed_are_announced_by_webhook(
    driver: Driver, outbox: Announcements
) -> None:
    cancelled, late = await driver.enqueue(hook=hook()), await driver.enqueue(hook=hook(), deadline=1.0)
    await driver.queue.cancel(cancelled)
    await driver.queue.janitor()
    told = {(one.id, one.ending) for one in await outbox.claim(10, LEASE_S)}
    assert told == {(cancelled, "cancelled"), (late, "expired")}


async def test_an_answer_that_was_cut_off_is_an_incomplete_one_in_its_webhook(
    driver: Driver, outbox: Announcements
) -> None:
    await driver.enqueue(hook=hook(object="response"))
    await end(driver, "finished", finish_reason="length")
    [one] = await outbox.claim(10, LEASE_S)
    assert (one.object, one.ending) == ("response", "incomplete")


async def test_only_endings_that_were_asked_for_are_announced_by_webhook(driver: Driver, outbox: Announcements) -> None:
    await driver.enqueue(hook=hook(events=("failed", "expired")))
    await end(driver, "finished")
    failed = await driver.enqueue(hook=hook(events=("failed", "expired")))
    await end(driver, "failed")
    assert [one.id for one in await outbox.claim(10, LEASE_S)] == [failed]


async def test_a_job_without_a_webhook_leaves_nothing_in_the_outbox(driver: Driver) -> None:
    await driver.enqueue()
    await end(driver, "finished")
    assert not any(name.startswith("hook") for name in await driver.key_names())


async def test_a_strangers_value_in_place_of_the_webhooks_holds_up_no_job(
    driver: Driver, outbox: Announcements
) -> None:
    id = await driver.enqueue(hook=hook())
    await driver.redis.set(driver.keys.hooks, "x")
    await driver.redis.set(driver.keys.hook(id), "x")
    await end(driver, "finished")
    assert [one.id for one in await outbox.claim(10, LEASE_S)] == [id]
    await driver.redis.set(driver.keys.hook(id), "x")
    await driver.redis.zadd(driver.keys.hooks, {id: 1})
    assert await outbox.claim(10, LEASE_S) == []
    assert await driver.redis.zcard(driver.keys.hooks) == 0
    await driver.redis.set(driver.keys.hooks, "x")
    assert await outbox.claim(10, LEASE_S) == []


async def test_a_job_queued_anew_has_its_webhook_too(driver: Driver, outbox: Announcements) -> None:
    body = b'{"v":1,"prompt":"hi","webhook":{"url":"https://hooks.example.com/anew"}}'
    old = await driver.enqueue(body=body, hook=hook("https://hooks.example.com/anew"))
    await end(driver, "dead")
    new = await driver.queue.requeue_dead(old)
    await end(driver, "finished")
    told = {(one.id, one.ending, one.url) for one in await outbox.claim(10, LEASE_S)}
    assert told == {
        (old, "failed", "https://hooks.example.com/anew"),
        (new, "finished", "https://hooks.example.com/anew"),
    }


async def test_a_webhook_is_one_deliverers_for_the_time_of_its_lease(driver: Driver, outbox: Announcements) -> None:
    for _ in range(3):
        await driver.enqueue(hook=hook())
        await end(driver, "finished")
    first, second = await outbox.claim(2, LEASE_S), await outbox.claim(2, LEASE_S)
    assert (len(first), len(second)) == (2, 1)
    assert await outbox.claim(2, LEASE_S) == []
    assert {one.attempt for one in (*first, *second)} == {1}


async def lapse(driver: Driver, id: str) -> None:
    """As if the lease of whoever tells it had ended."""
    assert await driver.redis.zadd(driver.keys.hooks, {id: 1}, xx=True, ch=True) == 1


async def test_a_deliverer_whose_lease_has_ended_records_no_failure_of_a_webhook_but_may_record_success(
    driver: Driver, outbox: Announcements
) -> None:
    id = await driver.enqueue(hook=hook())
    await end(driver, "finished")
    [first] = await outbox.claim(1, LEASE_S)
    await lapse(driver, id)
    [second] = await outbox.claim(1, LEASE_S)
    assert (second.id, second.attempt) == (id, 2)
    assert not await outbox.settle(first, "dead", trouble="late")
    assert not await outbox.settle(first, "later", delay_s=0.001)
    assert await outbox.claim(1, LEASE_S) == []
    assert await outbox.settle(first, "told")
    assert not await outbox.settle(second, "dead", trouble="too late")
    assert not any(name.startswith("hook") for name in await driver.key_names())


async def test_a_webhook_that_was_told_is_gone_and_one_that_failed_comes_again(
    driver: Driver, receiver: Receiver
) -> None:
    id = await driver.enqueue(hook=hook(receiver.url()))
    await end(driver, "finished")
    settings = settings_for(receiver, backoff_s=0.001)
    receiver.answers.extend([answer(500), answer(302, f"location: {receiver.url(path='/elsewhere')}")])
    assert await deliver_due(driver.redis, settings, limit=10) == 1
    for _ in range(2):
        await lapse(driver, id)
        assert await deliver_due(driver.redis, settings, limit=10) == 1
    assert len({(told.headers["webhook-id"], told.body) for told in receiver.told}) == 1
    assert [told.line for told in receiver.told] == ["POST /hook HTTP/1.1"] * 3
    assert await deliver_due(driver.redis, settings, limit=10) == 0
    assert not any(name.startswith("hook") for name in await driver.key_names())


async def test_a_webhook_is_given_up_after_its_last_attempt_and_can_be_tried_anew(
    driver: Driver, outbox: Announcements, receiver: Receiver
) -> None:
    id = await driver.enqueue(hook=hook(receiver.url()))
    await end(driver, "finished")
    settings = settings_for(receiver, max_attempts=2)
    for round in (1, 2):
        receiver.answers.extend([answer(500), answer(503)])
        assert await deliver_due(driver.redis, settings, limit=10) == 1
        [waiting] = await outbox.kept(10)
        assert (waiting.state, waiting.trouble, waiting.num_attempts) == ("waiting", "HTTP 500", 2 * round - 1)
        now, _ = await driver.redis.time()
        assert waiting.when - now <= settings.backoff_s + 1.0
        await lapse(driver, id)
        assert await deliver_due(driver.redis, settings, limit=10) == 1
        [dead] = await outbox.kept(10)
        assert (dead.id, dead.state, dead.trouble) == (id, "dead", "HTTP 503 (attempt 2 of 2)")
        assert await deliver_due(driver.redis, settings, limit=10) == 0
        assert await outbox.retry(id)
        assert not await outbox.retry(id)
    assert await deliver_due(driver.redis, settings, limit=10) == 1
    assert await outbox.kept(10) == []
    assert len(receiver.told) == 5


async def test_an_endpoint_that_is_gone_hears_no_more_of_its_webhook(
    driver: Driver, outbox: Announcements, receiver: Receiver
) -> None:
    await driver.enqueue(hook=hook(receiver.url()))
    await end(driver, "finished")
    receiver.answers.append(answer(410))
    assert await deliver_due(driver.redis, settings_for(receiver), limit=10) == 1
    [dead] = await outbox.kept(10)
    assert (dead.state, dead.num_attempts) == ("dead", 1)
    assert dead.trouble.startswith("HTTP 410")


async def test_a_webhook_whose_host_is_allowed_no_longer_is_not_sent(
    driver: Driver, outbox: Announcements, receiver: Receiver
) -> None:
    await driver.enqueue(hook=hook(receiver.url()))
    await end(driver, "finished")
    settings = settings_for(receiver, allowed_hosts=("hooks.example.com",), private_hosts=())
    assert await deliver_due(driver.redis, settings, limit=10) == 1
    [dead] = await outbox.kept(10)
    assert dead.state == "dead"
    assert "none of the hosts" in dead.trouble
    assert receiver.num_connections == 0


async def test_where_webhooks_are_off_nothing_is_taken_from_the_outbox(
    driver: Driver, outbox: Announcements, receiver: Receiver
) -> None:
    await driver.enqueue(hook=hook(receiver.url()))
    await end(driver, "finished")
    assert await deliver_due(driver.redis, WebhookSettings.load(), limit=10) == 0
    assert len(await outbox.claim(1, LEASE_S)) == 1


async def test_webhooks_of_many_queues_are_told_by_one_deliverer_and_no_more_than_the_limit(
    driver: Driver, receiver: Receiver, write_queue_card: WriteCard
) -> None:
    other = Driver(Queue(driver.redis, f"{driver.queue.name}-b"))
    await write_queue_card(other.queue.name)
    for one in (driver, driver, other, other):
        await one.enqueue(hook=hook(receiver.url()))
        await end(one, "finished")
    settings = settings_for(receiver)
    assert [await deliver_due(driver.redis, settings, limit=3) for _ in range(3)] == [3, 1, 0]
    assert len({told.headers["webhook-id"] for told in receiver.told}) == 4


async def test_the_end_of_a_batch_is_announced_by_webhook_once(redis: Redis, receiver: Receiver) -> None:
    settings = settings_for(receiver, url=receiver.url(path="/own"))
    for _ in range(2):
        await announce(redis, settings, event="batch.completed", object_id="batch_1")
    await announce(redis, settings, event="batch.expired", object_id="batch_2", url=receiver.url())
    assert await deliver_due(redis, settings, limit=10) == 2
    told = {told.line: told.event for told in receiver.told}
    assert told["POST /own HTTP/1.1"]["type"] == "batch.completed"
    assert told["POST /own HTTP/1.1"]["id"] == event_id("batch", "completed", "batch_1")
    assert told["POST /hook HTTP/1.1"]["data"] == {"id": "batch_2"}
    assert not [name async for name in redis.scan_iter(f"{BATCHES}:*")]


async def test_the_upkeep_delivers_webhooks_where_no_api_does(
    redis_url: str, redis: Redis, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_for(receiver, url=receiver.url())
    await announce(redis, settings, event="batch.completed", object_id="batch_1")
    own = {
        "ALLOWED_HOSTS": ",".join(settings.allowed_hosts),
        "PRIVATE_HOSTS": ",".join(settings.private_hosts),
        "SECRET": SECRET,
        "ALLOW_HTTP": "true",
    }
    for name, value in own.items():
        monkeypatch.setenv(f"JITNEY_WEBHOOKS__{name}", value)
    async with AsyncClient(redis_url) as client:
        assert (await keep_up(client, []))["webhooks"] == {"tried": 1}
    assert [told.event["type"] for told in receiver.told] == ["batch.completed"]


async def test_a_batch_that_is_announced_again_while_its_webhook_is_under_way_is_not_told_twice(
    redis: Redis, receiver: Receiver
) -> None:
    settings = settings_for(receiver, url=receiver.url())
    await announce(redis, settings, event="batch.failed", object_id="batch_1")
    [one] = await Announcements(redis, BATCHES).claim(10, LEASE_S)
    await announce(redis, settings, event="batch.failed", object_id="batch_1")
    assert await deliver_due(redis, settings, limit=10) == 0
    assert await Announcements(redis, BATCHES).settle(one, "told")


async def test_a_batch_is_announced_by_webhook_to_nobody_unless_somebody_is_named(
    redis: Redis, receiver: Receiver
) -> None:
    await announce(redis, WebhookSettings.load(), event="batch.completed", object_id="batch_1")
    await announce(redis, settings_for(receiver), event="batch.completed", object_id="batch_1")
    assert not [name async for name in redis.scan_iter(f"{BATCHES}:*")]
    with pytest.raises(InvalidJob, match="none of"):
        await announce(redis, settings_for(receiver), event="batch.done", object_id="batch_1", url=receiver.url())
    with pytest.raises(InvalidJob, match="JITNEY_WEBHOOKS__ALLOWED_HOSTS"):
        await announce(
            redis, settings_for(receiver), event="batch.failed", object_id="batch_1", url="http://a.example/"
        )


async def test_the_oldest_webhook_makes_room_where_nobody_delivers(driver: Driver, outbox: Announcements) -> None:
    """At a hundredth of the real bound, which is written into the script."""
    from jitney import scripts

    small = scripts.as_script(
        "hook_add", scripts.assemble("hook_add").replace("HOOK_ENTRIES = 100000", "HOOK_ENTRIES = 3")
    )
    for number in range(5):
        call = scripts.Call(
            [driver.keys.counts], [driver.keys.prefix, f"b{number}", "batch", "failed", "https://a.example/"]
        )
        await scripts.run(driver.redis, small, call)
        await driver.redis.zadd(driver.keys.hooks, {f"b{number}": number}, xx=True)
    assert [one.id for one in await outbox.claim(10, LEASE_S)] == ["b2", "b3", "b4"]
    assert sorted(await driver.key_names() & {f"hook:b{n}" for n in range(5)}) == ["hook:b2", "hook:b3", "hook:b4"]


async def num_looks(redis: Redis) -> int:
    """How often somebody has asked for the queues, or for any other hash."""
    return int((await redis.info("commandstats"))["cmdstat_hgetall"]["calls"])


async def test_whoever_keeps_delivering_webhooks_outlives_what_goes_wrong_and_says_it_once(
    driver: Driver, outbox: Announcements, receiver: Receiver, write_queue_card: WriteCard
) -> None:
    heard = list[str]()
    broken = asyncio.Event()

    def listen(event: MutableMapping[str, Any]) -> None:
        heard.append(event["event"])
        broken.set()

    await driver.redis.set(QUEUES, "a stranger's")
    settings = settings_for(receiver, poll_s=0.01)
    with listening(listen):
        delivering = asyncio.create_task(keep_delivering(driver.redis, settings))
        async with asyncio.timeout(PATIENCE_S):
            await broken.wait()
            before = await num_looks(driver.redis)
            while await num_looks(driver.redis) < before + 3:
                pass  # each look is a call to the server
        await driver.redis.delete(QUEUES)
        await write_queue_card()
        await driver.enqueue(hook=hook(receiver.url()))
        await end(driver, "finished")
        await receiver.wait_told(1)
        await end_tasks([delivering])
    assert heard == ["webhooks_wait"]


SETTINGS = WebhookSettings(backoff_s=5.0, max_backoff_s=300.0, max_attempts=5)


def test_the_wait_before_the_next_webhook_attempt_grows_fourfold_up_to_its_bound() -> None:
    assert [after_failure("x", attempt, SETTINGS, 0.0).delay_s for attempt in (1, 2, 3, 4)] == [5.0, 20.0, 80.0, 300.0]
    assert after_failure("x", 3, SETTINGS, 1.0).delay_s == 60.0
    assert after_failure("x", 5, SETTINGS, 0.0).outcome == "dead"


@pytest.mark.parametrize("status", [200, 201, 202, 204, 299])
def test_a_webhook_is_told_when_the_endpoint_says_so(status: int) -> None:
    assert judge(Answer(status, None), 1, SETTINGS, 0.5) == Verdict("told")


@pytest.mark.parametrize("status", [300, 301, 302, 307, 400, 401, 404, 409, 429, 500, 503])
def test_any_other_answer_to_a_webhook_is_a_failure(status: int) -> None:
    assert judge(Answer(status, None), 1, SETTINGS, 0.0) == Verdict("later", 5.0, f"HTTP {status}")


@pytest.mark.parametrize(
    ("status", "retry_after", "delay_s"),
    [
        (429, "60", 60.0),
        (503, "1", 5.0),
        (503, "999999", 300.0),
        (500, "60", 5.0),
        (429, "Wed, 21 Oct 2026 07:28:00 GMT", 5.0),
        (429, "9" * 400, 5.0),
        (429, "-1", 5.0),
        (429, "²", 5.0),
    ],
)
def test_a_busy_endpoint_may_ask_for_a_longer_wait_for_its_webhook(
    status: int, retry_after: str, delay_s: float
) -> None:
    assert judge(Answer(status, retry_after), 1, SETTINGS, 0.0).delay_s == delay_s


def test_the_outbox_of_batch_webhooks_is_no_queues() -> None:
    with pytest.raises(InvalidJob):
        Keys(BATCHES.strip("{}").partition(":")[2])
