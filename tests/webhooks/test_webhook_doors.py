"""A job asks for its webhook at any door: by the client, by `/v1/jobs`, as an extra of OpenAI's endpoints."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, OpenAI
from tests.api.conftest import ScriptedWorker, StartApi
from tests.conftest import WriteCard
from tests.webhooks.receiver import SECRET, Receiver

from jitney import AsyncClient
from jitney.connection import Redis, connect_blocking
from jitney.errors import InvalidJob
from jitney.keys import Keys

Switch = Any


@pytest.fixture
def switch_on(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> Switch:
    """Webhooks to the receiver, for processes and clients that start from now on."""

    def switch(**others: str) -> None:
        settings = {
            "ALLOWED_HOSTS": f"127.0.0.1:{receiver.port}",
            "PRIVATE_HOSTS": "127.0.0.1",
            "ALLOW_HTTP": "1",
            "SECRET": SECRET,
            "POLL_S": "0.05",
            **others,
        }
        for name, value in settings.items():
            monkeypatch.setenv(f"JITNEY_WEBHOOKS__{name}", value)

    return switch


@pytest.fixture
async def worker(
    redis: Redis, redis_url: str, queue_name: str, write_queue_card: WriteCard
) -> AsyncIterator[ScriptedWorker]:
    await write_queue_card(hidden_size=8)
    blocking = connect_blocking(redis_url, block_s=1.0)
    yield ScriptedWorker(redis, blocking, queue_name)
    await blocking.aclose()


def verified(receiver: Receiver, number: int = -1) -> Any:
    told = receiver.told[number]
    return OpenAI(api_key="none", webhook_secret=SECRET).webhooks.unwrap(told.body, told.headers)


async def test_without_settings_every_door_refuses_a_webhook(
    start_api: StartApi, worker: ScriptedWorker, redis: Redis, redis_url: str, queue_name: str
) -> None:
    wish = {"url": "https://hooks.example.com/"}
    async with AsyncClient(redis_url, queue=queue_name) as client:
        with pytest.raises(InvalidJob, match="this deployment calls nobody"):
            await client.enqueue("hi", webhook=wish)
    api = await start_api()
    for answer in (
        await api.post("/v1/jobs", {"model": queue_name, "prompt": "hi", "webhook": wish}),
        await api.complete("hi", webhook=wish),
        await api.chat("hi", webhook=wish),
        await api.post("/v1/responses", {"model": queue_name, "input": "hi", "webhook": wish}),
        await api.post("/v1/embeddings", {"model": queue_name, "input": "hi", "webhook": wish}),
    ):
        assert answer.status == 400
        error = (await answer.json())["error"]
        assert (error["code"], error["param"]) == ("webhooks_off", "webhook")
    assert await redis.exists(Keys(queue_name).counts) == 0


@pytest.mark.parametrize(
    ("wish", "param"),
    [
        ({"url": "https://elsewhere.example/"}, "webhook.url"),
        ({"url": "http://169.254.169.254/"}, "webhook.url"),
        ({"url": ""}, "webhook.url"),
        ({"url": 1}, "webhook.url"),
        ({}, "webhook.url"),
        ({"url": "https://hooks.example.com/", "events": []}, "webhook.events"),
        ({"url": "https://hooks.example.com/", "events": ["started"]}, "webhook.events"),
        ({"url": "https://hooks.example.com/", "secret": "x"}, "webhook.secret"),
        ("https://hooks.example.com/", "webhook"),
    ],
)
async def test_a_webhook_that_is_not_allowed_or_makes_no_sense_is_refused_by_name(
    start_api: StartApi, worker: ScriptedWorker, switch_on: Switch, queue_name: str, wish: Any, param: str
) -> None:
    switch_on()
    api = await start_api()
    answer = await api.post("/v1/jobs", {"model": queue_name, "prompt": "hi", "webhook": wish})
    assert answer.status == 400
    assert (await answer.json())["error"]["param"].startswith(param)


async def test_an_api_tells_the_endpoint_of_a_job_that_a_client_has_left(
    start_api: StartApi, worker: ScriptedWorker, switch_on: Switch, receiver: Receiver
) -> None:
    switch_on()
    api = await start_api()
    id = await api.create_job(webhook={"url": receiver.url()})
    await worker.serve("hello")
    await receiver.wait_told(1)
    event = verified(receiver)
    assert (event.type, event.data.id) == ("job.finished", id)
    assert receiver.told[0].headers["webhook-id"] == event.id


@pytest.mark.parametrize("door", ["redis_url", "api"])
async def test_the_client_asks_for_a_webhook_by_either_link(
    start_api: StartApi,
    redis: Redis,
    redis_url: str,
    worker: ScriptedWorker,
    switch_on: Switch,
    receiver: Receiver,
    door: str,
    queue_name: str,
) -> None:
    switch_on()
    api = await start_api()
    url = redis_url if door == "redis_url" else f"http://127.0.0.1:{api.port}"
    async with AsyncClient(url, queue=queue_name) as client:
        job = await client.enqueue("hi", webhook={"url": receiver.url(), "events": ["cancelled"]})
        await job.cancel()
    await receiver.wait_told(1)
    event = verified(receiver)
    assert (event.type, event.data.id) == ("job.cancelled", job.id)


async def test_a_response_in_the_background_is_told_by_webhook_and_can_be_fetched_by_what_it_says(
    start_api: StartApi, worker: ScriptedWorker, switch_on: Switch, receiver: Receiver, queue_name: str
) -> None:
    """OpenAI's own flow: no field of ours, one endpoint for the whole deployment."""
    switch_on(URL=receiver.url(path="/own"))
    api = await start_api()
    async with AsyncOpenAI(base_url=f"http://127.0.0.1:{api.port}/v1", api_key="none", max_retries=0) as client:
        asked = await client.responses.create(model=queue_name, input="hi", background=True)
        await worker.serve("hello")
        await receiver.wait_told(1)
        event = verified(receiver)
        assert (event.type, event.data.id) == ("response.completed", asked.id)
        assert (await client.responses.retrieve(event.data.id)).output_text == "hello"
    assert receiver.told[0].line == "POST /own HTTP/1.1"


async def test_a_response_is_told_by_webhook_with_the_state_that_it_has(
    start_api: StartApi, worker: ScriptedWorker, switch_on: Switch, receiver: Receiver, queue_name: str
) -> None:
    switch_on()
    api = await start_api()
    wish = {"webhook": {"url": receiver.url()}}
    async with AsyncOpenAI(base_url=f"http://127.0.0.1:{api.port}/v1", api_key="none", max_retries=0) as client:
        for ending, status in (("length", "incomplete"), ("fail", "failed"), ("cancel", "cancelled")):
            asked = await client.responses.create(model=queue_name, input="hi", background=True, extra_body=wish)
            job = await worker.claim()
            if ending == "cancel":
                await client.responses.cancel(asked.id)
            elif ending == "fail":
                await job.fail()
            else:
                await job.finish(reason=ending)
            event = await told_of(receiver, asked.id)
            assert event["type"] == f"response.{status}"
            assert (await client.responses.retrieve(asked.id)).status == status


async def test_without_a_webhook_of_their_own_answers_in_the_foreground_are_told_to_nobody(
    start_api: StartApi, worker: ScriptedWorker, switch_on: Switch, receiver: Receiver, redis: Redis, queue_name: str
) -> None:
    switch_on(URL=receiver.url(), DELIVER="0")
    api = await start_api()
    job = await api.create_job()
    own = await api.create_job(webhook={})
    await worker.serve("hello", count=2)
    keys = Keys(queue_name)
    assert await redis.hget(keys.job(job), "hook") is None
    assert [id.decode() for id in await redis.zrange(keys.hooks, 0, -1)] == [own]


async def test_an_api_that_is_not_to_deliver_leaves_webhooks_to_others(start_api: StartApi, switch_on: Switch) -> None:
    switch_on(DELIVER="0")
    assert (await start_api()).service._delivering == []
    switch_on(DELIVER="1")
    assert len((await start_api()).service._delivering) == 1


async def test_the_official_client_hears_of_a_webhook_that_is_refused(
    start_api: StartApi, worker: ScriptedWorker, switch_on: Switch, queue_name: str
) -> None:
    switch_on()
    api = await start_api()
    async with AsyncOpenAI(base_url=f"http://127.0.0.1:{api.port}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(BadRequestError, match="none of the hosts"):
            await client.chat.completions.create(
                model=queue_name,
                messages=[{"role": "user", "content": "hi"}],
                extra_body={"webhook": {"url": "https://elsewhere.example/"}},
            )


async def told_of(receiver: Receiver, id: str) -> dict[str, Any]:
    """The event of that response, as soon as it is there."""
    count = 1
    while True:
        for told in await receiver.wait_told(count):
            if told.event["data"]["id"] == id:
                return told.event
        count += 1
