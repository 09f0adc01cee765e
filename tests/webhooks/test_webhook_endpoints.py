"""Which addresses are called: what is refused before anything is looked up, and what a name may lead to (B65)."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from jitney.errors import InvalidJob
from jitney.webhooks.addresses import refusal
from jitney.webhooks.endpoints import Endpoint, RefusedEndpoint, allowed_host


@dataclass(frozen=True)
class Allowing:
    allowed_hosts: tuple[str, ...] = ("hooks.example.com", "*.partner.example", "api.example.com:8443", "127.0.0.1")
    private_hosts: tuple[str, ...] = ()
    allow_http: bool = False


ALL = Allowing()


@pytest.mark.parametrize(
    ("url", "host", "port", "target"),
    [
        ("https://hooks.example.com/a?b=c", "hooks.example.com", 443, "/a?b=c"),
        ("https://HOOKS.example.com:443", "hooks.example.com", 443, "/"),
        ("https://hooks.example.com?x", "hooks.example.com", 443, "/?x"),
        ("https://a.partner.example/", "a.partner.example", 443, "/"),
        ("https://a.b.partner.example/", "a.b.partner.example", 443, "/"),
        ("https://api.example.com:8443/%7Ea", "api.example.com", 8443, "/%7Ea"),
    ],
)
def test_a_webhook_may_go_to_a_host_that_is_named_or_lies_below_one(
    url: str, host: str, port: int, target: str
) -> None:
    endpoint = Endpoint.parse(url, ALL)
    assert (endpoint.host, endpoint.port, endpoint.target, endpoint.private_too) == (host, port, target, False)


@pytest.mark.parametrize(
    "url",
    [
        "https://elsewhere.example/",
        "https://partner.example/",
        "https://evilpartner.example/",
        "https://hooks.example.com.evil.example/",
        "https://hooks.example.com:8443/",
        "https://api.example.com/",
        "https://hooks.example.com:0/",
        "https://hooks.example.com:65536/",
        "http://hooks.example.com/",
        "ftp://hooks.example.com/",
        "//hooks.example.com/",
        "hooks.example.com",
        "",
    ],
)
def test_a_webhook_goes_to_no_other_host_port_or_scheme(url: str) -> None:
    with pytest.raises(RefusedEndpoint):
        Endpoint.parse(url, ALL)


@pytest.mark.parametrize(
    "url",
    [
        "https://user@hooks.example.com/",
        "https://user:pass@hooks.example.com/",
        "https://evil.example@hooks.example.com/",
        "https://hooks.example.com@evil.example/",
        "https://hooks.example.com#@evil.example/",
        "https://hooks.example.com\\@evil.example/",
        "https://hooks.example.com /",
        "https://hooks.example.com/\r\nX: y",
        "https://hooks.example.com/a b",
        "https://hooks.example.com\t/",
        "https://hooks.example.com./",
        "https://hooks..example.com/",
        "https://höoks.example.com/",
        "https://hooks。example。com/",
        "https://%68ooks.example.com/",
        "https:///hooks.example.com/",
        "https://hooks.example.com:443:443/",
        "https://hooks.example.com/" + "a" * 2_048,
    ],
)
def test_what_two_readers_of_a_webhook_url_could_take_for_two_things_is_refused(url: str) -> None:
    with pytest.raises(RefusedEndpoint) as refused:
        Endpoint.parse(url, ALL)
    assert refused.value.param == "webhook.url"
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize(
    "host",
    ["0x7f000001", "2130706433", "0177.0.0.1", "127.1", "127.0.0.1.", "0x7f.0.0.1", "1", "127.0.0.01", "[::1%25lo]"],
)
def test_a_webhook_address_in_an_unusual_form_is_refused_even_where_everything_is_allowed(host: str) -> None:
    everything = Allowing(allowed_hosts=("127.0.0.1", "[::1]", "*.example.com"), allow_http=True)
    with pytest.raises(RefusedEndpoint, match=r"an address is written as|is not https://"):
        Endpoint.parse(f"https://{host}/", everything)


def test_an_international_name_of_a_webhook_host_is_compared_in_ascii() -> None:
    named = Allowing(allowed_hosts=("xn--hks-jna.example.com",))
    assert Endpoint.parse("https://XN--hks-jna.example.com/", named).host == "xn--hks-jna.example.com"


def test_an_address_of_a_webhook_is_one_thing_however_it_is_written() -> None:
    named = Allowing(allowed_hosts=("[::1]:8443",), private_hosts=("[::1]",))
    endpoint = Endpoint.parse("https://[0:0:0:0:0:0:0:1]:8443/", named)
    assert (endpoint.host, endpoint.private_too, endpoint.authority) == ("::1", True, "[::1]:8443")
    assert Endpoint.parse("https://hooks.example.com/", ALL).authority == "hooks.example.com"


@pytest.mark.parametrize("entry", ["*", "*.com", "https://a.example", "a.example/", "a.*.example", "", "a:b", "a:0"])
def test_an_entry_that_is_no_webhook_host_is_refused(entry: str) -> None:
    with pytest.raises(ValueError, match=r"no host|ports are|top-level"):
        allowed_host(entry)


def test_the_refusal_of_a_webhook_says_whom_to_ask() -> None:
    with pytest.raises(InvalidJob, match="JITNEY_WEBHOOKS__ALLOWED_HOSTS"):
        Endpoint.parse("https://elsewhere.example/", ALL)


PRIVATE = ["127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "::1", "fd12:3456::1", "::ffff:10.0.0.1"]
NEVER = [
    "169.254.169.254",
    "::ffff:169.254.169.254",
    "::ffff:a9fe:a9fe",
    "64:ff9b::a9fe:a9fe",
    "2002:a9fe:a9fe::1",
    "fd00:ec2::254",
    "168.63.129.16",
    "100.100.100.200",
    "192.0.0.192",
    "fd20:ce::254",
    "fd00:c1::a9fe:a9fe",
    "100.64.0.1",
    "240.0.0.1",
    "255.255.255.255",
    "0.1.2.3",
    "0.0.0.0",
    "::169.254.169.254",
    "::127.0.0.1",
    "::ffff:0:169.254.169.254",
    "64:ff9b:1::a9fe:a9fe",
    "fec0::1",
    "5f00::1",
    "::",
    "fe80::1",
    "fe80::1%eth0",
    "2606:2800:21f:cb07:6820:80da:af6b:8b2c%eth0",
    "224.0.0.1",
    "ff02::1",
    "no address",
    "",
]
PUBLIC = ["93.184.215.14", "2606:2800:21f:cb07:6820:80da:af6b:8b2c", "::ffff:93.184.215.14", "64:ff9b::5db8:d70e"]


@pytest.mark.parametrize("address", PRIVATE)
def test_a_webhook_is_sent_to_a_private_address_only_where_the_operator_means_it(address: str) -> None:
    assert refusal(address, private_too=False) is not None
    assert refusal(address, private_too=True) is None


@pytest.mark.parametrize("address", NEVER)
def test_a_webhook_is_never_sent_to(address: str) -> None:
    assert refusal(address, private_too=False) is not None
    assert refusal(address, private_too=True) is not None


@pytest.mark.parametrize("address", PUBLIC)
def test_a_webhook_may_be_sent_to_anybody_else(address: str) -> None:
    assert refusal(address, private_too=False) is None


@pytest.mark.parametrize("address", ["64:ff9b::7f00:1", "2002:7f00:1::1", "::ffff:127.0.0.1", "::ffff:7f00:1"])
def test_a_webhook_address_that_stands_for_a_private_one_is_judged_as_that_one(address: str) -> None:
    assert refusal(address, private_too=False) is not None
