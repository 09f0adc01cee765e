"""The client over HTTP: keys and tenants, refusals, retries of what may be repeated, and where it will not go."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from tests.api.api_wire import PATIENCE_S, until
from tests.api.conftest import Api, ScriptedWorker, StartApi
from tests.faults.proxy import Proxy

from jitney import (
    AsyncClient,
    Client,
    IdempotencyConflict,
    InvalidJob,
    JitneyError,
    JobNotFound,
    KeyRefused,
    NotDurable,
    Overloaded,
    PromptTooLong,
    QueueUnavailable,
    ScopeMissing,
    SettingsError,
    StreamLost,
    UnknownQueue,
)
from jitney.apikeys import ApiKey, make_key
from jitney.cards import QueueCard, write_card
from jitney.connection import Redis, connect
from jitney.embedded import EmbeddedServer
from jitney.http_errors import error_of_answer, error_of_wire, retry_after_s
from jitney.http_link import HttpLink
from jitney.keys import new_job_id
from jitney.queue import Limits
from jitney_api.failures import error_response, wire_of


@pytest.fixture(autouse=True)
def _no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("JITNEY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def address(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def a_key(tenant: str = "-", *scopes: str) -> tuple[str, ApiKey]:
    return make_key(f"key-of-{tenant}-{'-'.join(scopes)}", tenant=tenant, scopes=scopes or ("generate", "read"))


async def refused(asked: Any, kind: type[JitneyError]) -> Any:
    with pytest.raises(JitneyError) as raised:
        await asked
    assert type(raised.value) is kind, repr(raised.value)
    return raised.value


# --- keys and tenants ------------------------------------------------------------------------------


async def test_a_key_opens_what_its_scopes_say_and_no_more(start_api: StartApi, write_queue_card: Any) -> None:
    await write_queue_card()
    (generates, first), (reads, second) = a_key("acme", "generate"), a_key("acme", "read")
    api = await start_api(access="keys", keys=(first, second))
    url = address(api.port)
    async with AsyncClient(url, queue=api.model) as nobody, AsyncClient(url, api_key="jitney_x") as stranger:
        await refused(nobody.enqueue("x"), KeyRefused)
        await refused(stranger.job(new_job_id(api.model)).status(), KeyRefused)
        await refused(stranger.job(new_job_id(api.model)).result(PATIENCE_S), KeyRefused)
    async with (
        AsyncClient(url, queue=api.model, api_key=generates) as writer,
        AsyncClient(url, queue=api.model, api_key=reads) as reader,
    ):
        missing = await refused(reader.enqueue("x"), ScopeMissing)
        assert (missing.needed, missing.held, missing.code) == ("generate", ["read"], "insufficient_scope")
        job = await writer.enqueue("x")
        await refused(job.status(), ScopeMissing)
        status = await reader.job(job.id).status()
        assert (status.state, status.tenant) == ("waiting", "acme")
        assert await job.cancel() is True


async def test_another_tenants_job_is_none(start_api: StartApi, write_queue_card: Any) -> None:
    await write_queue_card()
    (ours, first), (theirs, second) = a_key("ours"), a_key("theirs")
    api = await start_api(access="keys", keys=(first, second))
    async with AsyncClient(address(api.port), queue=api.model, api_key=ours) as client:
        job_id = (await client.enqueue("x")).id
    async with AsyncClient(address(api.port), api_key=theirs) as client:
        job = client.job(job_id)
        for asked in (job.status(), job.cancel(), job.result(PATIENCE_S), anext(job.stream())):
            assert job_id in str(await refused(asked, JobNotFound))


async def test_the_tenant_is_the_keys_and_cannot_be_named(api: Api) -> None:
    async with AsyncClient(address(api.port), queue=api.model) as client:
        assert (await refused(client.enqueue("x", tenant="other"), InvalidJob)).param == "tenant"


async def test_the_key_comes_from_the_environment_and_is_nowhere_to_be_seen(
    start_api: StartApi,
    write_queue_card: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    await write_queue_card()
    secret, key = a_key("-", "generate")
    api = await start_api(access="keys", keys=(key,))
    monkeypatch.setenv("JITNEY_API_KEY", f"{secret}\n")
    monkeypatch.setenv("JITNEY_API_URL", f"{address(api.port)}/v1/")
    seen = []
    with caplog.at_level(logging.DEBUG):
        async with AsyncClient(queue=api.model) as client:
            job = await client.enqueue("x")
            seen += [repr(await refused(job.status(), ScopeMissing))]
            link: Any = client._link
            seen += [repr(one) for one in (client, job, link, link._api, link._api._http, vars(link), vars(link._api))]
        seen += [repr(await refused(job.status(), QueueUnavailable))]
    printed = capsys.readouterr()
    assert secret not in "".join([*seen, caplog.text, printed.out, printed.err])


@pytest.mark.parametrize("key", ["", " ", "a b", "schlüssel", "a\nb: c", "\0"])
def test_a_key_that_no_header_can_carry_is_refused_unseen(key: str) -> None:
    with pytest.raises(SettingsError, match="api_key") as raised:
        AsyncClient("http://127.0.0.1:1", api_key=key)
    assert not key.strip() or key not in str(raised.value)


async def test_a_key_goes_over_plain_http_to_this_machine_alone_unless_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    for url in ("http://127.0.0.1:1", "http://localhost", "http://[::1]:8000", "https://api.example"):
        await AsyncClient(url, api_key="k").aclose()
    await AsyncClient("http://api.example").aclose()  # without a key there is none to lose
    with pytest.raises(SettingsError, match=r"to api\.example over http://.*allow_plain_http"):
        AsyncClient("http://api.example", api_key="k")
    await AsyncClient("http://api.example", api_key="k", allow_plain_http=True).aclose()
    monkeypatch.setenv("JITNEY_ALLOW_PLAIN_HTTP", "1")
    await AsyncClient("http://api.example", api_key="k").aclose()


# --- where a client goes ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "options", "said"),
    [
        ("http://127.0.0.1:1", {"durability": "strict"}, "durability=strict"),
        ("http://127.0.0.1:1", {"limits": Limits()}, "limits"),
        ("redis://127.0.0.1:1/0", {"api_key": "k"}, "api_key opens an API"),
        ("http://user:hunter2@h", {}, "not the address of an API"),
        ("http://h:port", {}, "not the address of an API"),
        ("https://", {}, "not the address of an API"),
        ("http://h/?key=hunter2", {}, "not the address of an API"),
    ],
)
def test_what_an_api_cannot_be_told_is_refused_by_name(url: str, options: dict[str, Any], said: str) -> None:
    for client in (AsyncClient, Client):
        with pytest.raises(SettingsError, match=said) as raised:
            client(url, **options)
        assert "hunter2" not in str(raised.value)


def test_two_addresses_in_the_environment_contradict_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITNEY_API_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("JITNEY_REDIS_URL", "redis://127.0.0.1:1/0")
    with pytest.raises(SettingsError, match="JITNEY_REDIS_URL and JITNEY_API_URL"):
        AsyncClient()
    monkeypatch.setenv("JITNEY_API_URL", "redis://:hunter2@h")
    with pytest.raises(SettingsError, match=r"^JITNEY_API_URL: not the address") as raised:
        AsyncClient()
    assert "hunter2" not in str(raised.value)


async def test_an_api_goes_to_redis_whatever_the_environment_names(
    start_api: StartApi, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JITNEY_API_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("JITNEY_REDIS_URL", redis_url)
    api = await start_api(redis_url=None)
    assert (await api.get("/v1/models")).status == 200


async def test_what_only_redis_has_is_refused_in_plain_words(api: Api) -> None:
    async with AsyncClient(address(api.port)) as client:
        for asked in (lambda: client.redis, lambda: client.reader, lambda: client.queue("q")):
            with pytest.raises(SettingsError, match="needs the Redis URL"):
                asked()
        await refused(client.card(), SettingsError)


async def test_without_a_name_it_is_the_only_queue_there_is(start_api: StartApi, tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path / "server") as server:
        redis = connect(server.url, name="jitney-test")
        api = await start_api(redis_url=server.url)
        async with AsyncClient(address(api.port)) as client:
            assert (await refused(client.enqueue("x"), UnknownQueue)).known == []
            await write_card(redis, "only", QueueCard(model="m", max_model_len=64, vocab_size=10))
            assert (await client.enqueue("x")).id.startswith("only.")
        await redis.aclose()


def test_without_the_library_it_says_what_to_install() -> None:
    script = """
        import sys
        sys.modules["httpx2"] = None
        from jitney import Client, SettingsError
        try:
            Client("http://127.0.0.1:1")
        except SettingsError as error:
            print(error)
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60)
    assert ended.stderr == ""
    assert ended.stdout.endswith("pip install 'jitney[http]'\n")


# --- the same answers ------------------------------------------------------------------------------


async def test_a_status_is_the_same_by_redis_and_over_http(api: Api, worker: ScriptedWorker, redis_url: str) -> None:
    async with AsyncClient(redis_url, queue=api.model) as by_redis, AsyncClient(address(api.port)) as by_http:
        job = await by_redis.enqueue("x", band="standard", deadline=4_000_000_000.0)

        async def same() -> str:
            told, known = await by_http.job(job.id).status(), await by_redis.job(job.id).status()
            assert told == dataclasses.replace(known, owner="")
            return told.state

        assert await same() == "waiting"
        turn = await worker.claim()
        await turn.say("a", "b")
        assert await same() == "running"
        await turn.finish()
        assert await same() == "done"


ERRORS: list[JitneyError] = [
    InvalidJob("temperature is hot", param="temperature", code="unknown_field"),
    PromptTooLong(9, 8, what="the prompt"),
    UnknownQueue("é", ["a", "b"]),
    KeyRefused("an API key is needed"),
    ScopeMissing("read", held=["generate"]),
    IdempotencyConflict("another body"),
    Overloaded("jobs", waiting_jobs=3, waiting_tokens=4, retry_after_s=2.5),
    JobNotFound("no job"),
    StreamLost("gone"),
    SettingsError("durability=strict needs appendfsync"),
    NotDurable("late", job_id="q.1"),
    QueueUnavailable("silence"),
    JitneyError("a bug"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_comes_out_of_http_as_it_went_in(error: JitneyError) -> None:
    answer = error_response(error)
    again = error_of_answer(answer.status_code, dict(answer.headers), bytes(answer.body))
    assert type(again) is type(error)
    assert again.wire() == wire_of(error)
    assert [getattr(again, name) for name in error.told] == [getattr(error, name) for name in error.told]
    assert error_of_wire(wire_of(error)).wire() == wire_of(error)  # as in a stream, where no header can say more


def test_a_list_of_names_that_fits_no_header_is_left_out() -> None:
    error = UnknownQueue("x", [f"queue-{number}" for number in range(1_000)])
    answer = error_response(error)
    again = error_of_answer(answer.status_code, dict(answer.headers), bytes(answer.body))
    assert isinstance(again, UnknownQueue)
    assert again.known == []


@pytest.mark.parametrize(
    ("status", "kind"),
    [(401, KeyRefused), (404, SettingsError), (429, Overloaded), (500, JitneyError), (502, QueueUnavailable)],
)
@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"error": 5}', b'{"detail": "x"}', b"\xff"])
def test_the_words_of_some_proxy_are_an_error_of_their_status(
    status: int, kind: type[JitneyError], body: bytes
) -> None:
    error = error_of_answer(status, {"retry-after": "7"}, body)
    assert type(error) is kind
    assert f"HTTP {status}" in str(error)
    assert getattr(error, "retry_after_s", 7.0) == 7.0


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [({"retry-after": "3", "retry-after-ms": "2500"}, 2.5), ({"retry-after": "3"}, 3.0), ({}, 1.0)],
)
def test_when_to_come_back(headers: dict[str, str], seconds: float) -> None:
    assert retry_after_s(headers) == seconds
    assert retry_after_s({"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}) == 1.0


async def test_a_full_queue_says_when_to_come_back(start_api: StartApi, write_queue_card: Any) -> None:
    await write_queue_card()
    api = await start_api(max_waiting_jobs=1)
    async with AsyncClient(address(api.port), queue=api.model) as client:
        await client.enqueue("x")
        error = await refused(client.enqueue("x"), Overloaded)
    assert (error.waiting_jobs, error.waiting_tokens > 0, error.retry_after_s > 0) == (1, True, True)


# --- what is sent again ----------------------------------------------------------------------------


async def lose_replies(proxy: Proxy, num: int) -> None:
    """The requests arrive, their answers do not."""
    proxy.cut_in_reply(1)
    await proxy.cuts(num)
    proxy.heal()


async def test_a_request_whose_answer_was_lost_is_one_job(api: Api, worker: ScriptedWorker) -> None:
    async with Proxy(api.port) as proxy, AsyncClient(address(proxy.port), queue=api.model) as client:
        job, _ = await asyncio.gather(client.enqueue("x"), lose_replies(proxy, 2))
        assert proxy.num_cut == 2
        assert await worker.queue.counts() == (1, 1)
        assert (await worker.claim()).id == job.id
        first, second = [await client.enqueue("x") for _ in range(2)]
        assert len({job.id, first.id, second.id}) == 3  # a key is drawn for each call, not for each body


async def test_a_cancellation_whose_answer_was_lost_still_counts(api: Api) -> None:
    async with Proxy(api.port) as proxy, AsyncClient(address(proxy.port), queue=api.model) as client:
        job = await client.enqueue("x")
        cancelled, _ = await asyncio.gather(job.cancel(), lose_replies(proxy, 1))
        assert (cancelled, proxy.num_cut) == (True, 1)
        assert await job.cancel() is False


async def test_drawing_a_key_leaves_the_job_going_when_its_client_leaves(api: Api, worker: ScriptedWorker) -> None:
    async with AsyncClient(address(api.port), queue=api.model) as client:
        await client.enqueue("x")
        await client.enqueue("x", on_disconnect="cancel")
    specs = [(await worker.claim()).spec for _ in range(2)]
    assert [spec.on_disconnect for spec in specs] == ["continue", "cancel"]


def link_to(port: int, model: str, **bounds: float) -> HttpLink:
    return HttpLink(address(port), api_key=None, destination=model, name="test", **bounds)


async def test_a_silent_api_is_asked_again_until_it_answers(api: Api) -> None:
    async with Proxy(api.port) as proxy, AsyncClient(address(api.port), queue=api.model) as client:
        job = await client.enqueue("x")
        link = link_to(proxy.port, api.model, call_timeout_s=0.2, max_call_outage_s=PATIENCE_S)
        proxy.hang()
        asking = asyncio.create_task(link.status(job.id))

        async def was_asked_again() -> bool:
            return len(proxy._ever) >= 3

        await until(was_asked_again, True)
        proxy.heal()
        link._api._http.timeout = PATIENCE_S  # a machine that stands still for a moment is not what is meant here
        assert (await asking).state == "waiting"
        await link.aclose()


async def test_an_api_that_never_answers_is_given_up(api: Api) -> None:
    async with Proxy(api.port) as proxy:
        link = link_to(proxy.port, api.model, call_timeout_s=0.1, max_call_outage_s=0.5)
        proxy.hang()
        error = await refused(link.status(new_job_id(api.model)), QueueUnavailable)
        assert "ReadTimeout" in str(error)
        proxy.refuse()
        error = await refused(link.status(new_job_id(api.model)), QueueUnavailable)
        assert error.__cause__ is not None
        await link.aclose()


async def test_what_will_not_pass_is_not_waited_for(start_api: StartApi, redis_url: str, redis: Redis) -> None:
    api = await start_api(redis_url=redis_url.replace("redis://:", "redis://:wrong"))
    link = link_to(api.port, api.model, max_outage_s=3_600.0, max_call_outage_s=3_600.0)
    job_id = new_job_id(api.model)

    async def read() -> None:
        async with link.follow(job_id) as batches:
            await anext(batches)

    for asked in (link.status(job_id), read()):
        error = await asyncio.wait_for(refused(asked, QueueUnavailable), PATIENCE_S)
        assert "refuses this API" in str(error)
    await link.aclose()


async def test_a_redirection_takes_the_key_nowhere(api: Api) -> None:
    """Some proxy's way to https: the address is to be corrected, not followed."""
    heard = asyncio.Queue[bytes]()

    async def redirect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.put_nowait(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 301 Moved\r\nlocation: http://127.0.0.1:%d/\r\ncontent-length: 0\r\n\r\n" % api.port)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(redirect, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with AsyncClient(address(port), api_key="k") as client:
            error = await refused(client.job(new_job_id("q")).status(), JitneyError)
    assert "HTTP 301" in str(error)
    assert b"authorization: bearer k" in (await heard.get()).lower()
    assert heard.empty()
