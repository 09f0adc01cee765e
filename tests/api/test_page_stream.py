"""What the live page is fed with: one look for all who watch, and to everybody what their key may see."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

import orjson
import pytest
from tests.api.api_wire import PATIENCE_S, Answer
from tests.api.conftest import Api, ScriptedWorker, StartApi
from tests.api.refusing_redis import RefusingRedis

from jitney.apikeys import add_key, make_key, revoke_key
from jitney.connection import Redis
from jitney_api.routes_page import _FILES

MakeKey = Callable[..., Awaitable[str]]


async def events(answer: Answer) -> AsyncIterator[tuple[str, int | None, Any]]:
    """(name, id, data) of each, for ever."""
    pending = b""
    async for chunk in answer.chunks():
        *whole, pending = (pending + chunk).split(b"\n\n")
        for frame in whole:
            lines = [line.partition(": ") for line in frame.decode().split("\n") if not line.startswith(":")]
            fields = {name: value for name, _, value in lines}
            if fields:
                number = None if "id" not in fields else int(fields["id"])
                yield fields["event"], number, orjson.loads(fields["data"])


async def some(answer: Answer, num_overviews: int) -> list[tuple[str, int | None, Any]]:
    """Up to so many overviews."""
    seen = []
    async with asyncio.timeout(PATIENCE_S):
        async for event in events(answer):
            seen.append(event)
            if sum(name == "overview" for name, _, _ in seen) == num_overviews:
                return seen
    raise AssertionError("the stream ended")


@pytest.fixture
async def make(redis: Redis) -> AsyncIterator[MakeKey]:
    names = []

    async def make_one(tenant: str, *scopes: str) -> str:
        secret, key = make_key(f"p-{secrets.token_hex(6)}", tenant=tenant, scopes=scopes)
        names.append(key.name)
        await add_key(redis, key)
        return f"Bearer {secret}"

    yield make_one
    for name in names:
        await revoke_key(redis, name)


async def test_ten_pages_share_the_looks_of_one(start_api: StartApi, write_queue_card: Any) -> None:
    """Each look has a number. Ten pages that each made their own would see ten times as many go by."""
    await write_queue_card()
    api = await start_api()
    answers = [await api.get("/v1/overview/events") for _ in range(10)]
    seen = await asyncio.gather(*(some(answer, 4) for answer in answers))
    numbers = [[number for name, number, _ in one if name == "overview"] for one in seen]
    assert all(later == earlier + 1 for one in numbers for earlier, later in pairwise(one))
    moments = [[data["at"] for name, _, data in one if name == "overview"] for one in seen]
    assert all(later - earlier > 0.3 for one in moments for earlier, later in pairwise(one)), "somebody else looks, too"
    by_number: dict[int | None, Any] = {}
    for one in seen:
        for name, number, data in one:
            if name == "overview":
                assert by_number.setdefault(number, data) == data


async def test_nobody_looks_while_no_page_is_open(start_api: StartApi, write_queue_card: Any) -> None:
    await write_queue_card()
    api = await start_api()
    answer = await api.get("/v1/overview/events")
    await some(answer, 1)
    await answer.close()
    looking = api.service.watchtower._task
    assert looking is not None
    await asyncio.wait_for(looking, PATIENCE_S)
    overview = await (await api.get("/v1/overview")).json()
    assert api.model in [queue["name"] for queue in overview["queues"]]


async def test_a_page_shows_what_waits_by_band(api: Api, worker: ScriptedWorker) -> None:
    for band in ("interactive", "bulk", "bulk"):
        await api.create_job(band=band)
    overview = await (await api.get("/v1/overview")).json()
    (queue,) = [one for one in overview["queues"] if one["name"] == api.model]
    assert queue["waiting"] == {"interactive": 1, "standard": 0, "bulk": 2}
    await worker.serve("x", count=3)


async def test_a_page_that_cannot_reach_redis_is_told_so_and_goes_on(
    start_api: StartApi, redis_url: str, write_queue_card: Any
) -> None:
    await write_queue_card()
    port = urlsplit(redis_url).port
    assert port is not None
    async with RefusingRedis(port) as proxy:
        api = await start_api(redis_url=redis_url.replace(f":{port}", f":{proxy.port}"))
        answer = await api.get("/v1/overview/events")
        stream = events(answer)
        async with asyncio.timeout(PATIENCE_S):
            while (await anext(stream))[0] != "overview":
                pass
            await proxy.refuse(b"LOADING the data set is being read")
            while (await anext(stream))[0] != "trouble":
                pass
            await proxy.relent()
            while (await anext(stream))[0] != "overview":
                pass


async def test_a_page_is_whole_in_itself_and_its_policy_lets_nothing_else_in(api: Api) -> None:
    for name in ("", *(f"page/{name}" for name in _FILES)):
        answer = await api.get(f"/{name}")
        body = await answer.body()
        assert answer.status == 200
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert "unsafe" not in policy
        assert b"https://" not in body.replace(b"http://www.w3.org/2000/svg", b"")
        again = await api.get(f"/{name}", if_none_match=answer.headers["etag"])
        assert again.status == 304
    assert (await api.get("/page/..%2flive.html")).status == 404
    assert (await api.get("/page/nothing.js")).status == 404


async def test_a_page_shows_words_to_admins_alone(
    start_api: StartApi, write_queue_card: Any, make: MakeKey, worker: ScriptedWorker
) -> None:
    await write_queue_card()
    api = await start_api(access="keys", key_cache_s=0)
    own, other = await make("acme", "read", "generate"), await make("rival", "read")
    admin = await make("ops", "read", "admin")
    made = await api.post("/v1/jobs", {"model": api.model, "prompt": "tell nobody"}, authorization=own)
    id = (await made.json())["id"]
    job = await worker.claim()
    await job.say("a secret")
    timeline = await api.get(f"/v1/jobs/{id}/timeline", authorization=own)
    told = await timeline.body()
    assert timeline.status == 200
    assert [one["what"] for one in orjson.loads(told)["entries"]][:2] == ["queued", "claimed"]
    assert b"secret" not in told
    assert b"nobody" not in told
    assert (await api.get(f"/v1/jobs/{id}/timeline", authorization=other)).status == 404
    for method, path in (("GET", f"jobs/{id}"), ("DELETE", f"jobs/{id}"), ("GET", "dead"), ("POST", "dead/requeue")):
        assert (await api.ask(method, f"/v1/admin/{path}", authorization=own)).status == 403
    shown = await (await api.get(f"/v1/admin/jobs/{id}", authorization=admin)).json()
    assert (shown["prompt"], shown["texts"], shown["tenant"]) == ("tell nobody", ["a secret"], "acme")
    overview = await (await api.get("/v1/overview", authorization=other)).body()
    assert b"secret" not in overview
    assert b"nobody" not in overview
    cancelled = await (await api.delete(f"/v1/admin/jobs/{id}", authorization=admin)).json()
    assert (cancelled["cancelled"], cancelled["status"]) == (True, "cancelled")
    assert (await api.get("/")).status == 200, "the page itself holds nothing of anybody, and asks for the key"


async def test_a_page_of_another_origin_requeues_nothing(api: Api) -> None:
    """A form, or a script that does not ask first, cannot send JSON as what it is."""
    answer = await api.post("/v1/admin/dead/requeue", b'{"id": "x"}', content_type="text/plain")
    assert (answer.status, (await answer.json())["error"]["code"]) == (415, "unsupported_media_type")
    answer = await api.post("/v1/admin/dead/requeue", {"id": "x"})
    assert (answer.status, (await answer.json())["error"]["param"]) == (400, "id")
