"""One POST to an endpoint: its name is looked up once, what comes of that is judged, and that is connected to.

Below the level of redirects, cookies and proxies of the environment: there are none here.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import httpcore2
import httpx2

from jitney.webhooks.addresses import refusal
from jitney.webhooks.endpoints import Endpoint, RefusedEndpoint

Resolver = Callable[[str, int], Awaitable[Sequence[str]]]
"""Host and port to addresses. Raises OSError."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What an endpoint answered. Its body is not read: whatever it says, nothing is done with it."""

    status: int
    retry_after: str | None


async def system_resolver(host: str, port: int) -> Sequence[str]:
    """As every program of this machine looks names up."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))


@cache
def trust(ca_file: Path | None) -> ssl.SSLContext:
    """The certificates to trust. `SSL_CERT_FILE` and its kin are not looked at. Made once: it reads files."""
    if ca_file is not None:
        return ssl.create_default_context(cafile=str(ca_file))
    return httpx2.create_ssl_context(trust_env=False)


async def post(
    endpoint: Endpoint,
    body: bytes,
    headers: Mapping[str, str],
    *,
    context: ssl.SSLContext,
    resolver: Resolver,
    timeout_s: float,
) -> Answer:
    """Send `body`. timeout_s: for all of it, from the look-up to the answer's head.

    Raises RefusedEndpoint when the name leads where nothing is sent, TimeoutError, OSError, and httpcore2's errors.
    """
    url = httpcore2.URL(scheme=endpoint.scheme, host=endpoint.host, port=endpoint.port, target=endpoint.target)
    own = {"host": endpoint.authority, "content-type": "application/json", "user-agent": "jitney"}
    sent = [*own.items(), *headers.items()]
    backend = _Judging(endpoint, resolver)
    async with (
        asyncio.timeout(timeout_s),
        httpcore2.AsyncConnectionPool(ssl_context=context, network_backend=backend, max_connections=1) as pool,
        pool.stream("POST", url, headers=sent, content=body) as response,
    ):
        given = {name.lower(): value for name, value in response.headers}
        retry_after = given.get(b"retry-after")
        return Answer(response.status, None if retry_after is None else retry_after.decode("latin-1"))


class _Judging(httpcore2.AsyncNetworkBackend):
    """Connects to the addresses that were judged, and asks nobody for the name again.

    The name itself stays what TLS asks for, and what the certificate must be made out to.
    """

    def __init__(self, endpoint: Endpoint, resolver: Resolver) -> None:
        self._endpoint = endpoint
        self._resolver = resolver
        self._network = httpcore2.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 (the interface is httpcore2's)
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        assert (host, port) == (self._endpoint.host, self._endpoint.port)
        *others, last = await self._judged()
        for address in others:
            try:
                return await self._network.connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout):
                continue
        return await self._network.connect_tcp(last, port, timeout, local_address, socket_options)

    async def _judged(self) -> Sequence[str]:
        """All addresses of the host. One that is refused refuses them all: no honest name has such company."""
        host = self._endpoint.host
        addresses = await self._resolver(host, self._endpoint.port)
        if not addresses:
            raise OSError(f"{host} has no address")
        for address in addresses:
            if why := refusal(address, private_too=self._endpoint.private_too):
                raise RefusedEndpoint(
                    f"webhook.url names {host}, which leads to {address}: that {why} "
                    "(JITNEY_WEBHOOKS__PRIVATE_HOSTS names hosts of the own network)"
                )
        return addresses
