"""API keys: who comes in, for whom, and that nobody sees another tenant's jobs."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, AuthenticationError, PermissionDeniedError
from tests.api.api_wire import Answer
from tests.api.conftest import Api, ScriptedWorker, StartApi
from tests.api.refusing_redis import RefusingRedis

from jitney import AsyncClient
from jitney.apikeys import ApiKey, add_key, digest_of_secret, make_key, revoke_key
from jitney.connection import Redis
from jitney.embedded import EmbeddedServer
from jitney.keys import API_KEYS
from jitney_api.access import NEEDS
from jitney_api.app import create_app
from jitney_api.settings import ApiSettings

BODY = {"prompt": "hello", "max_tokens": 4}
MakeKey = Callable[..., Awaitable[str]]


@pytest.fixture
async def make(redis: Redis) -> Any:
    """`await make("acme", "read")`: a key that Redis knows until the test's end."""
    names = []

    async def make_one(tenant: str = "-", *scopes: str) -> str:
        secret, key = make_key(f"t-{secrets.token_hex(6)}", tenant=tenant, scopes=scopes or ("generate", "read"))
        names.append(key.name)
        await add_key(redis, key)
        return secret

    yield make_one
    for name in names:
        await revoke_key(redis, name)


@pytest.fixture
async def guarded(start_api: StartApi, write_queue_card: Any) -> Api:
    """An API that asks for keys and remembers none."""
    await write_queue_card()
    return await start_api(access="keys", key_cache_s=0)


def bearer(secret: str) -> str:
    return f"Bearer {secret}"


async def refused(answer: Answer, status: int, code: str) -> dict[str, Any]:
    """The error, once it is one of OpenAI's shape with this status and code."""
    wire = await answer.json()
    assert wire.keys() == {"error"}
    error: dict[str, Any] = wire["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (answer.status, error["code"]) == (status, code)
    assert "x-request-id" in answer.headers
    return error


def served() -> dict[tuple[str, str], Any]:
    """Method and path of every operation of the OpenAPI document, with what it says of keys."""
    document = create_app(ApiSettings(redis_url="redis://127.0.0.1:1/0", access="keys")).openapi()
    return {
        (method.upper(), path): operation.get("security")
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    }


def test_the_table_of_scopes_is_the_list_of_routes_and_the_document_says_the_same():
    shown = {(method, path.replace(":path}", "}")): needed for (method, path), needed in NEEDS.items()}
    for path in ("/openapi.json", "/docs", "/", "/page/{name}"):
        assert shown.pop(("GET", path)) is None  # served, and not described by itself
    assert shown.pop(("GET", "/v1/overview/events")) == "read"  # never ends; docs/PAGE.md describes it
    security = served()
    assert shown.keys() == security.keys()
    assert {route: [{"bearer": [needed]}] if needed else None for route, needed in shown.items()} == security


def test_the_page_about_keys_shows_the_same_table():
    page = (Path(__file__).parents[2] / "docs" / "API_KEYS.md").read_text()
    rows = [line.split("|")[1:3] for line in page.splitlines() if line.startswith("| `") and " /" in line]
    shown = {
        tuple(one.strip(" `").split(" ", 1)): needed.strip(" `") for routes, needed in rows for one in routes.split(",")
    }
    table = {(method, path.replace(":path}", "}")): needed or "no key" for (method, path), needed in NEEDS.items()}
    assert shown == table


def test_a_route_that_the_table_does_not_name_keeps_the_application_from_starting(monkeypatch):
    monkeypatch.delitem(NEEDS, ("GET", "/v1/models"))
    with pytest.raises(AssertionError, match="/v1/models"):
        create_app(ApiSettings(redis_url="redis://127.0.0.1:1/0"))


def test_a_document_of_an_api_that_asks_nobody_speaks_of_no_keys():
    document = create_app(ApiSettings(redis_url="redis://127.0.0.1:1/0")).openapi()
    assert "securitySchemes" not in document["components"]
    assert "401" not in document["paths"]["/v1/jobs"]["post"]["responses"]


async def call(api: Api, route: tuple[str, str], **headers: str) -> Answer:
    method, path = route
    job = f"{api.model}.0123456789012345678901"
    ids = {"job_id": job, "response_id": f"resp_{job}", "file_id": "file-x", "batch_id": "batch_x"}
    path = path.format(name="live.css", **ids, model=api.model)
    body = {"model": api.model, **BODY} if method == "POST" else None
    if "chat" in path:
        body = {"model": api.model, "messages": [{"role": "user", "content": "x"}]}
    return await api.ask(method, path, body, **headers)


SHOWN = {(method, path.replace(":path}", "}")): needed for (method, path), needed in NEEDS.items()}


@pytest.mark.parametrize("route", SHOWN)
async def test_every_route_asks_for_its_scope_and_for_no_other(guarded, make, route):
    """Asked without a key, with all other scopes, and with its own alone."""
    needed = SHOWN[route]
    if needed is None:
        assert (await call(guarded, route)).status == 200
        return
    answer = await call(guarded, route)
    await refused(answer, 401, "invalid_api_key")
    assert answer.headers["www-authenticate"] == 'Bearer realm="jitney"'
    others = await make("-", *{"generate", "read", "admin"} - {needed})
    error = await refused(await call(guarded, route, authorization=bearer(others)), 403, "insufficient_scope")
    assert needed in error["message"]
    if route[0] != "POST":  # those would wait for a worker
        own = await make("-", needed)
        assert (await call(guarded, route, authorization=bearer(own))).status not in (401, 403)


async def test_the_key_is_asked_for_before_the_body_is_read(guarded):
    head = "POST /v1/jobs HTTP/1.1\nhost: x\ncontent-type: application/json\ncontent-length: 900000"
    await refused(await guarded.send(head), 401, "invalid_api_key")


async def test_an_unknown_path_and_a_wrong_method_are_told_without_a_key(guarded):
    await refused(await guarded.get("/v1/nothing"), 404, "unknown_url")
    answer = await guarded.ask("PUT", "/v1/jobs")
    await refused(answer, 405, "method_not_allowed")
    assert answer.headers["allow"] == "POST"


@pytest.mark.parametrize(
    "given",
    [
        *("", "Bearer", "Bearer ", "bearer   ", "Basic {key}", "Token {key}", "{key}", "Bearer{key}", "Bearer: {key}"),
        *("Bearer {key}x", "Bearer {half}", "Bearer wrong", "Bearer schlüssel", "Bearer {key} {key}", "Bearer a\tb"),
        *('Bearer "{key}"', "Bearer *", "Bearer jitney:keys", "Bearer {digest}", "Bearer " + "k" * 4_000),
    ],
)
async def test_what_is_no_key_is_a_401_and_never_a_500(guarded, make, given):
    secret = await make()
    words = {"key": secret, "half": secret[: len(secret) // 2], "digest": digest_of_secret(secret.encode())}
    answer = await guarded.get("/v1/models", authorization=given.format(**words))
    error = await refused(answer, 401, "invalid_api_key")
    assert secret[:20] not in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("given", ["Bearer {key}", "bearer {key}", "BEARER {key}", "Bearer   {key}", "Bearer {key} "])
async def test_the_scheme_may_be_written_as_http_allows(guarded, make, given):
    secret = await make()
    assert (await guarded.get("/v1/models", authorization=given.format(key=secret))).status == 200


async def test_two_authorization_headers_are_refused_though_one_is_right(guarded, make):
    secret = await make()
    head = f"GET /v1/models HTTP/1.1\nhost: x\nauthorization: Bearer {secret}\nauthorization: Bearer {secret}"
    await refused(await guarded.send(head), 401, "invalid_api_key")


async def test_a_key_in_the_url_or_in_another_header_opens_nothing(guarded, make):
    secret = await make()
    for path in (f"/v1/models?api_key={secret}", f"/v1/models?access_token={secret}"):
        await refused(await guarded.get(path), 401, "invalid_api_key")
    await refused(await guarded.get("/v1/models", x_api_key=secret), 401, "invalid_api_key")


async def test_no_key_and_no_digest_is_ever_logged(guarded, make, capfd, caplog):
    secret = await make("-", "read")
    caplog.set_level(logging.DEBUG)
    await guarded.get("/v1/models", authorization=bearer(secret))
    await guarded.get("/v1/models", authorization=bearer(secret + "x"))
    await guarded.post("/v1/jobs", {"model": guarded.model, **BODY}, authorization=bearer(secret))
    await guarded.get(f"/v1/models?api_key={secret}")
    said = "".join(capfd.readouterr()) + caplog.text
    assert secret[10:] not in said
    assert digest_of_secret(secret.encode()) not in said


async def test_redis_holds_the_hash_and_nothing_of_the_key(make, redis):
    secret = await make("acme", "read")
    stored = json.loads(await redis.hget(API_KEYS, digest_of_secret(secret.encode())))
    assert (stored["tenant"], stored["scopes"]) == ("acme", ["read"])
    everything = repr(await redis.hgetall(API_KEYS))
    assert secret.removeprefix("jitney_") not in everything


@pytest.mark.parametrize(
    "stored", [b"", b"{}", b"[]", b"null", b"\xff", b'{"name":"x","scopes":["root"]}', b'{"name":"x","until":1}']
)
async def test_a_key_that_cannot_be_read_opens_nothing(guarded, redis, stored):
    """Also one with a field that this build does not know: it may be a limit."""
    digest = digest_of_secret(b"odd")
    await redis.hset(API_KEYS, digest, stored)
    try:
        await refused(await guarded.get("/v1/models", authorization="Bearer odd"), 401, "invalid_api_key")
    finally:
        await redis.hdel(API_KEYS, digest)


async def test_a_key_of_the_settings_opens_and_needs_no_redis_to_be_known(start_api, write_queue_card):
    await write_queue_card()
    key = ApiKey(name="web", sha256=digest_of_secret("schlüssel".encode("latin-1")), tenant="acme", scopes=("read",))
    api = await start_api(keys=(key,))
    assert (await api.get("/v1/models", authorization="Bearer schlüssel")).status == 200
    await refused(await api.get("/v1/models"), 401, "invalid_api_key")
    await refused(await api.get("/health", authorization="Bearer schlüssel"), 403, "insufficient_scope")


# Tenants


async def test_the_job_belongs_to_the_tenant_of_the_key_whatever_the_body_says(guarded, make, worker):
    secret = await make("acme")
    body = {"model": guarded.model, **BODY, "metadata": {"tenant": "globex"}}
    assert (await guarded.post("/v1/jobs", body, authorization=bearer(secret))).status == 202
    job = await worker.claim()
    assert (job.delivery.tenant, job.spec.tenant) == ("acme", "acme")


async def test_a_tenant_in_the_body_is_refused(guarded, make):
    secret = await make("acme")
    body = {"model": guarded.model, **BODY, "tenant": "globex"}
    error = await refused(await guarded.post("/v1/jobs", body, authorization=bearer(secret)), 400, "unknown_field")
    assert error["param"] == "tenant"


@pytest.mark.parametrize("state", ["waiting", "running", "finished"])
@pytest.mark.parametrize(
    ("method", "tail"), [("GET", ""), ("DELETE", ""), ("GET", "/events"), ("GET", "/events?starting_after=1")]
)
async def test_another_tenants_job_is_like_one_that_never_was(guarded, make, worker, state, method, tail):
    owner, other = await make("acme"), await make("globex", "generate", "read", "admin")
    body = {"model": guarded.model, **BODY}
    created = await (await guarded.post("/v1/jobs", body, authorization=bearer(owner))).json()
    if state != "waiting":
        job = await worker.claim()
        await job.say("secret")
        if state == "finished":
            await job.finish()
    answer = await guarded.ask(method, f"/v1/jobs/{created['id']}{tail}", authorization=bearer(other))
    theirs = await refused(answer, 404, "job_not_found")
    unknown = created["id"][:-4] + "0000"
    answer = await guarded.ask(method, f"/v1/jobs/{unknown}{tail}", authorization=bearer(other))
    nobodys = await refused(answer, 404, "job_not_found")
    assert theirs["message"].replace(created["id"], "X") == nobodys["message"].replace(unknown, "X")
    mine = await guarded.get(f"/v1/jobs/{created['id']}", authorization=bearer(owner))
    expected = {"waiting": "queued", "running": "running", "finished": "finished"}[state]
    assert (await mine.json())["status"] == expected


@pytest.mark.parametrize("state", ["waiting", "finished"])
@pytest.mark.parametrize(
    ("method", "tail"),
    [("GET", ""), ("POST", "/cancel"), ("GET", "?stream=true"), ("GET", "?stream=true&starting_after=0")],
)
async def test_another_tenants_response_is_like_one_that_never_was(guarded, make, worker, state, method, tail):
    owner, other = await make("acme"), await make("globex", "generate", "read", "admin")
    body = {"model": guarded.model, "input": "hello", "background": True}
    created = await (await guarded.post("/v1/responses", body, authorization=bearer(owner))).json()
    if state == "finished":
        await worker.serve("secret")
    unknown = created["id"][:-4] + "0000"
    told = []
    for id in (created["id"], unknown):
        answer = await guarded.ask(method, f"/v1/responses/{id}{tail}", authorization=bearer(other))
        told.append((await refused(answer, 404, "job_not_found"))["message"].replace(id, "X"))
        body = {"model": guarded.model, "input": "and?", "previous_response_id": id}
        answer = await guarded.post("/v1/responses", body, authorization=bearer(other))
        error = await refused(answer, 400, "previous_response_not_found")
        told.append(error["message"].replace(id, "X"))
    assert told[:2] == told[2:]
    mine = await guarded.get(f"/v1/responses/{created['id']}", authorization=bearer(owner))
    assert (await mine.json())["status"] == {"waiting": "queued", "finished": "completed"}[state]


async def test_a_key_that_may_not_read_is_told_no_answer_by_a_detour(guarded, make, worker):
    """A response can be cancelled, and gone on with: both show what was said."""
    body = {"model": guarded.model, "input": "hello"}
    reads, writes = await make("acme", "generate", "read"), await make("acme", "generate")
    asking = asyncio.ensure_future(guarded.post("/v1/responses", body, authorization=bearer(writes)))
    job = await worker.claim()
    await job.finish("a secret")
    created = await (await asking).json()
    for answer in (
        await guarded.post(f"/v1/responses/{created['id']}/cancel", {}, authorization=bearer(writes)),
        await guarded.post(
            "/v1/responses", {**body, "previous_response_id": created["id"]}, authorization=bearer(writes)
        ),
    ):
        await refused(answer, 403, "insufficient_scope")
    cancelled = await guarded.post(f"/v1/responses/{created['id']}/cancel", {}, authorization=bearer(reads))
    assert (await cancelled.json())["status"] == "completed"


async def test_two_keys_of_one_tenant_share_its_jobs(guarded, make, worker):
    starts, reads = await make("acme", "generate"), await make("acme", "read")
    body = {"model": guarded.model, **BODY}
    created = await (await guarded.post("/v1/jobs", body, authorization=bearer(starts))).json()
    await worker.serve("Hi")
    seen = await guarded.get(f"/v1/jobs/{created['id']}", authorization=bearer(reads))
    assert (await seen.json())["choices"][0]["text"] == "Hi"


async def test_an_idempotency_key_of_another_tenant_is_another_one(guarded, make):
    ids = []
    for tenant in ("acme", "globex", "acme"):
        secret = await make(tenant)
        body = {"model": guarded.model, **BODY}
        answer = await guarded.post("/v1/jobs", body, authorization=bearer(secret), idempotency_key="order-1")
        ids.append((await answer.json())["id"])
    assert ids[0] == ids[2] != ids[1]


async def test_where_nobody_is_asked_for_a_key_every_job_can_be_seen(api, redis):
    """As before: without keys there are no tenants over HTTP, and what a client of Redis enqueued is there, too."""
    async with AsyncClient(api.service.settings.redis_url.get_secret_value(), queue=api.model) as client:
        job = await client.enqueue("hello", tenant="acme")
    assert (await api.get(f"/v1/jobs/{job.id}")).status == 200


# How long a key is believed, and what happens when Redis cannot say


async def test_a_revoked_key_opens_nothing_any_more(guarded, redis):
    secret, key = make_key(f"t-{secrets.token_hex(6)}", tenant="-", scopes=["read"])
    await add_key(redis, key)
    assert (await guarded.get("/v1/models", authorization=bearer(secret))).status == 200
    assert await revoke_key(redis, key.name)
    await refused(await guarded.get("/v1/models", authorization=bearer(secret)), 401, "invalid_api_key")


async def test_a_key_is_remembered_for_its_time_and_an_unknown_one_never(start_api, make, redis, monkeypatch):
    """By a clock that the test moves: within the time Redis is not asked, after it the revocation holds."""
    api = await start_api(access="keys", key_cache_s=60)
    secret = await make("-", "read")
    digest = digest_of_secret(secret.encode())
    keyring = api.service.keyring
    assert keyring is not None
    assert await keyring.find(secret.encode()) is not None
    stored = await redis.hget(API_KEYS, digest)
    await redis.hdel(API_KEYS, digest)
    assert await keyring.find(secret.encode()) is not None
    _, key = keyring._known[digest]
    keyring._known[digest] = (0.0, key)  # its time is over
    assert await keyring.find(secret.encode()) is None
    await redis.hset(API_KEYS, digest, stored)  # and let in again: nobody remembers that it was unknown
    assert await keyring.find(secret.encode()) is not None


async def test_many_keys_are_not_remembered_without_bound(start_api, make, monkeypatch):
    monkeypatch.setattr("jitney_api.keyring.MAX_REMEMBERED", 3)
    api = await start_api(access="keys", key_cache_s=60)
    keyring = api.service.keyring
    assert keyring is not None
    for _ in range(5):
        assert await keyring.find((await make()).encode()) is not None
        assert await keyring.find(secrets.token_bytes(8)) is None
    assert len(keyring._known) == 3


async def test_a_redis_that_cannot_say_is_a_503_and_lets_nobody_in(start_api, make, server: EmbeddedServer):
    secret = await make()
    async with RefusingRedis(server.port) as refusing:
        url = server.url.replace(f":{server.port}/", f":{refusing.port}/")
        api = await start_api(access="keys", key_cache_s=0, redis_url=url)
        assert (await api.get("/v1/models", authorization=bearer(secret))).status == 200
        for refusal in (b"LOADING Redis is loading", b"NOPERM no permissions", b"BUSY a script runs"):
            await refusing.refuse(refusal)
            for given in (secret, "wrong"):
                answer = await api.get("/v1/models", authorization=bearer(given))
                await refused(answer, 503, "queue_unavailable")
        await refusing.relent()
        assert (await api.get("/v1/models", authorization=bearer(secret))).status == 200


async def test_jobs_of_a_key_that_asks_at_once_many_times_are_all_its_own(guarded, make, worker: ScriptedWorker):
    """Requests of two tenants in one moment: none is taken for the other's."""
    keys = {tenant: await make(tenant) for tenant in ("acme", "globex")}
    body = {"model": guarded.model, **BODY}

    async def create(tenant: str) -> tuple[str, str]:
        answer = await guarded.post("/v1/jobs", body, authorization=bearer(keys[tenant]))
        return (await answer.json())["id"], tenant

    owners = dict(await asyncio.gather(*(create(tenant) for tenant in ["acme", "globex"] * 20)))
    for _ in owners:
        job = await worker.claim()
        assert job.delivery.tenant == owners[job.id]


async def test_the_official_client_understands_both_refusals(guarded, make):
    base = f"http://127.0.0.1:{guarded.port}/v1"
    async with AsyncOpenAI(base_url=base, api_key="wrong", max_retries=0) as client:
        with pytest.raises(AuthenticationError):
            await client.models.list()
    async with AsyncOpenAI(base_url=base, api_key=await make("-", "generate"), max_retries=0) as client:
        with pytest.raises(PermissionDeniedError):
            await client.models.list()
    async with AsyncOpenAI(base_url=base, api_key=await make("-", "read"), max_retries=0) as client:
        assert guarded.model in [model.id async for model in await client.models.list()]
