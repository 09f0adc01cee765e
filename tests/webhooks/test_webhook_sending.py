"""One POST: the address that was judged is the one connected to, and nothing else is followed, believed or waited for.

The answers of the name service are the test's own (B65: mlflow/mlflow#24179, frankbria/codeframe#706).
"""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpcore2
import pytest
from tests.webhooks.receiver import Receiver, Told, answer, resolving, settings_for

from jitney.webhooks.endpoints import Endpoint, RefusedEndpoint
from jitney.webhooks.sending import Answer, post, system_resolver, trust

HOST = "hooks.example.com"


async def send(url: str, settings: Any, resolver: Any = system_resolver, **options: Any) -> Answer:
    options = {"timeout_s": 20.0, "context": trust(settings.ca_file), **options}
    return await post(Endpoint.parse(url, settings), b"{}", {"webhook-id": "evt_1"}, resolver=resolver, **options)


async def test_a_webhook_is_one_post_to_the_address_that_its_name_had(receiver: Receiver) -> None:
    resolver = resolving(["127.0.0.1"], ["192.0.2.1"])
    settings = settings_for(receiver, HOST)
    assert await send(receiver.url(HOST, "/a?b=c"), settings, resolver) == Answer(204, None)
    [told] = receiver.told
    assert told.line == "POST /a?b=c HTTP/1.1"
    assert told.headers["host"] == f"{HOST}:{receiver.port}"
    assert told.headers["content-type"] == "application/json"
    assert told.headers["webhook-id"] == "evt_1"
    assert "cookie" not in told.headers
    assert resolver.asked == [HOST]


@pytest.mark.parametrize(
    "addresses",
    [
        ["127.0.0.1"],
        ["10.1.2.3"],
        ["::1"],
        ["::ffff:127.0.0.1"],
        ["169.254.169.254"],
        ["::ffff:169.254.169.254"],
        ["93.184.215.14", "127.0.0.1"],
        ["127.0.0.1", "93.184.215.14"],
        ["0.0.0.0"],
    ],
)
async def test_a_public_name_that_leads_inside_is_sent_no_webhook(receiver: Receiver, addresses: Sequence[str]) -> None:
    settings = settings_for(receiver, HOST, private_hosts=())
    with pytest.raises(RefusedEndpoint, match=f"{HOST}, which leads to"):
        await send(receiver.url(HOST), settings, resolving(addresses))
    assert receiver.num_connections == 0


async def test_a_name_that_gives_a_public_address_and_then_a_private_one_is_asked_once_for_a_webhook(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rebinding: whoever asked a second time would connect to the receiver."""
    connected: list[str] = []

    async def connect_tcp(_self: Any, host: str, *_: Any, **__: Any) -> Any:
        connected.append(host)
        raise httpcore2.ConnectError("nobody is there")

    monkeypatch.setattr(httpcore2.AnyIOBackend, "connect_tcp", connect_tcp)
    resolver = resolving(["93.184.215.14"], ["127.0.0.1"])
    with pytest.raises(httpcore2.ConnectError):
        await send(receiver.url(HOST), settings_for(receiver, HOST, private_hosts=()), resolver)
    assert connected == ["93.184.215.14"]
    assert resolver.asked == [HOST]


async def test_the_next_attempt_at_a_webhook_judges_the_name_anew(receiver: Receiver) -> None:
    resolver = resolving(["127.0.0.1"], ["169.254.169.254"])
    settings = settings_for(receiver, HOST)
    assert (await send(receiver.url(HOST), settings, resolver)).status == 204
    with pytest.raises(RefusedEndpoint):
        await send(receiver.url(HOST), settings, resolver)


async def test_a_webhook_goes_to_the_next_address_where_the_first_one_does_not_answer(receiver: Receiver) -> None:
    settings = settings_for(receiver, HOST)
    assert (await send(receiver.url(HOST), settings, resolving(["127.0.0.2", "127.0.0.1"]))).status == 204


async def test_a_name_without_an_address_is_a_failure_of_its_webhook(receiver: Receiver) -> None:
    with pytest.raises(OSError, match="no address"):
        await send(receiver.url(HOST), settings_for(receiver, HOST), resolving([]))


async def test_a_webhook_follows_no_redirect(receiver: Receiver) -> None:
    receiver.answers.append(answer(302, "location: http://169.254.169.254/latest/meta-data/"))
    assert (await send(receiver.url(), settings_for(receiver))).status == 302
    assert receiver.num_connections == 1


async def test_a_webhook_goes_through_no_proxy_of_the_environment(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Receiver() as proxy:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        assert (await send(receiver.url(), settings_for(receiver))).status == 204
        assert (len(receiver.told), proxy.num_connections) == (1, 0)


async def test_the_body_of_an_answer_to_a_webhook_is_not_waited_for(receiver: Receiver) -> None:
    receiver.answers.append(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000000000\r\n\r\nand so on")
    assert (await send(receiver.url(), settings_for(receiver))).status == 200


async def test_a_webhook_ends_in_time_whatever_the_endpoint_does(receiver: Receiver) -> None:
    never = asyncio.Event()

    async def wait(_: Told) -> None:
        await never.wait()

    receiver.on_told = wait
    with pytest.raises(TimeoutError):
        await send(receiver.url(), settings_for(receiver), timeout_s=0.3)

    async def resolve_never(_: str, __: int) -> list[str]:
        await never.wait()
        return []

    with pytest.raises(TimeoutError):
        await send(receiver.url(), settings_for(receiver), resolve_never, timeout_s=0.3)
    never.set()


async def test_an_endless_head_of_an_answer_to_a_webhook_is_cut_off(receiver: Receiver) -> None:
    receiver.answers.append(b"HTTP/1.1 200 OK\r\nx: " + b"a" * 1_000_000)
    with pytest.raises(httpcore2.RemoteProtocolError):
        await send(receiver.url(), settings_for(receiver))


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate made out to HOST, which signs itself, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("certificate")
    made, key = folder / "cert.pem", folder / "key.pem"
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    words += ["-days", "2", "-subj", f"/CN={HOST}", "-addext", f"subjectAltName=DNS:{HOST}"]
    subprocess.run([*words, "-keyout", str(key), "-out", str(made)], check=True, capture_output=True, timeout=30)
    return made, key


@pytest.mark.parametrize(("host", "is_trusted"), [(HOST, True), ("other.example.com", False)])
async def test_a_webhook_over_tls_asks_for_the_name_though_it_connects_to_the_address(
    certificate: tuple[Path, Path], host: str, is_trusted: bool
) -> None:
    names: list[str | None] = []
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*certificate)
    context.sni_callback = lambda _socket, name, _context: names.append(name)  # type: ignore[assignment]
    async with Receiver(context) as receiver:
        settings = settings_for(receiver, host, ca_file=certificate[0], allow_http=False)
        sending = send(receiver.url(host, scheme="https"), settings, resolving(["127.0.0.1"]))
        if is_trusted:
            assert (await sending).status == 204
        else:
            with pytest.raises(httpcore2.ConnectError, match="Hostname mismatch"):
                await sending
        assert names == [host]
        assert len(receiver.told) == is_trusted


async def test_a_webhook_is_not_sent_to_who_has_no_certificate_that_is_trusted(certificate: tuple[Path, Path]) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*certificate)
    async with Receiver(context) as receiver:
        with pytest.raises(httpcore2.ConnectError, match="verify failed"):
            await send(receiver.url(HOST, scheme="https"), settings_for(receiver, HOST), resolving(["127.0.0.1"]))
        assert receiver.told == []


async def test_this_machine_looks_names_up_for_webhooks() -> None:
    assert "127.0.0.1" in await system_resolver("localhost", 80) or "::1" in await system_resolver("localhost", 80)
