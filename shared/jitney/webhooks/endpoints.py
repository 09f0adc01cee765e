"""Where an announcement goes: an address that was taken apart once, and found to be allowed. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from jitney.errors import InvalidJob
from jitney.webhooks.wish import MAX_URL_CHARS

DEFAULT_PORTS: Final = {"https": 443, "http": 80}

# No other characters than RFC 3986 allows, no user, no fragment: what two parsers could read in two ways is refused.
_URL = re.compile(
    r"(?P<scheme>https?)://(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::(?P<port>[0-9]{1,5}))?"
    r"(?P<target>(?:[/?][A-Za-z0-9._~:/?\[\]@!$&'()*+,;=%-]*)?)",
    re.IGNORECASE,
)
_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")


class Allowing(Protocol):
    """What an operator allows: see `WebhookSettings`."""

    @property
    def allowed_hosts(self) -> Sequence[str]: ...
    @property
    def private_hosts(self) -> Sequence[str]: ...
    @property
    def allow_http(self) -> bool: ...


class RefusedEndpoint(InvalidJob):
    """No announcement is sent there. The message says why, and what to change."""

    code = "webhook_refused"

    def __init__(self, message: str) -> None:
        super().__init__(message, param="webhook.url")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An address that may be called, in parts; nobody takes its text apart a second time.

    host: lower case; an IPv6 address without brackets. target: path and query, as they were given.
    private_too: the operator has named this host as one of the private network.
    """

    scheme: str
    host: str
    port: int
    target: str
    private_too: bool

    @classmethod
    def parse(cls, url: str, allowing: Allowing) -> Endpoint:
        """The endpoint that `url` names. Raises RefusedEndpoint."""
        if len(url) > MAX_URL_CHARS:
            raise RefusedEndpoint(f"webhook.url has {len(url)} characters; at most {MAX_URL_CHARS} are allowed")
        found = _URL.fullmatch(url)
        if found is None:
            raise RefusedEndpoint(
                f"webhook.url {url[:80]!r} is not https://host[:port][/path]: in ASCII (an international name as "
                "xn--…), without user, password and fragment"
            )
        scheme, host = found["scheme"].lower(), _host(found["host"].lower())
        port = int(found["port"]) if found["port"] else DEFAULT_PORTS[scheme]
        if scheme == "http" and not allowing.allow_http:
            raise RefusedEndpoint(
                "webhook.url begins with http://; it must be https:// (JITNEY_WEBHOOKS__ALLOW_HTTP=1)"
            )
        if not any(_covers(allowed, host, port, scheme) for allowed in allowing.allowed_hosts):
            raise RefusedEndpoint(
                f"webhook.url names {_shown(host)} at port {port}, which is none of the hosts that this deployment "
                "calls: ask its operator (JITNEY_WEBHOOKS__ALLOWED_HOSTS)"
            )
        target = found["target"]
        return cls(
            scheme,
            host,
            port,
            target if target.startswith("/") else f"/{target}",
            any(_is_named(name, host) for name in allowing.private_hosts),
        )

    @property
    def authority(self) -> str:
        """As it stands in the header `Host`."""
        is_usual = self.port == DEFAULT_PORTS[self.scheme]
        return _shown(self.host) if is_usual else f"{_shown(self.host)}:{self.port}"


def allowed_host(text: str) -> str:
    """An entry of an allow-list: `host`, `*.domain`, each with `:port` where it is not the usual one. ValueError."""
    host, port = split_port(text.strip().lower())
    if port is not None and not 0 < port < 65_536:
        raise ValueError(f"{text[:80]!r}: ports are 1 to 65535")
    try:
        _host(host.removeprefix("*."))
    except RefusedEndpoint:
        raise ValueError(f"{text[:80]!r} is no host: write example.com, *.example.com, or example.com:8443") from None
    if host.startswith("*.") and "." not in host[2:]:
        raise ValueError(f"{text[:80]!r} would allow a whole top-level domain")
    return text.strip().lower()


def split_port(entry: str) -> tuple[str, int | None]:
    """Host and port of an entry; None: the usual one of the scheme."""
    host, colon, port = entry.rpartition(":")
    if colon and port.isdecimal() and (":" not in host or host.endswith("]")):
        return host, int(port)
    return entry, None


def _host(host: str) -> str:
    """The host as it is compared and connected to. Raises RefusedEndpoint."""
    if host.startswith("["):
        return _literal(host[1:-1], host)
    labels = host.split(".")
    last = next((label for label in reversed(labels) if label), "")
    if _NUMBER.fullmatch(last):
        # 0x7f000001, 2130706433, 127.1 and 0177.0.0.1 are addresses to some and names to others.
        return _literal(host, host)
    if len(host) > 253 or not all(map(_LABEL.fullmatch, labels)):
        raise RefusedEndpoint(f"webhook.url names {host[:80]!r}, which is no host name (no dot at its end, either)")
    return host


def _literal(text: str, shown: str) -> str:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise RefusedEndpoint(
            f"webhook.url names {shown[:80]!r}: an address is written as 192.0.2.1 or [2001:db8::1]"
        ) from None


def _covers(allowed: str, host: str, port: int, scheme: str) -> bool:
    name, only_port = split_port(allowed)
    if port != (DEFAULT_PORTS[scheme] if only_port is None else only_port):
        return False
    return _is_named(name, host)


def _is_named(name: str, host: str) -> bool:
    return host.endswith(name[1:]) if name.startswith("*.") else host == _host(name)


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host
