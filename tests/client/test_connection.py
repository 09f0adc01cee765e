"""How long everybody waits for Redis, and before it is asked again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import pytest
from redis.asyncio.retry import Retry
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import DataError
from redis.exceptions import TimeoutError as RedisTimeoutError
from tests.faults.proxy import Proxy

from jitney.connection import MAX_PAUSE_S, Redis, _NoRetry, _RetryAtOnce, _Silence, connect, pause_s
from jitney.embedded import EmbeddedServer

TIMEOUT_S = 0.5


def test_the_pause_grows_and_stays_bounded_however_long_the_outage() -> None:
    assert 0.025 <= pause_s(0) <= 0.05
    assert all(MAX_PAUSE_S / 2 <= pause_s(failures) <= MAX_PAUSE_S for failures in (10, 2_000, 10**9))


@pytest.fixture
async def proxy(server: EmbeddedServer) -> AsyncIterator[Proxy]:
    async with Proxy(server.port) as proxy:
        yield proxy


@pytest.fixture
async def behind(server: EmbeddedServer, proxy: Proxy) -> AsyncIterator[Redis]:
    """A client with two connections through the proxy."""
    url = server.url.replace(f":{server.port}/", f":{proxy.port}/")
    client = connect(url, name="jitney-test", timeout_s=TIMEOUT_S, max_connections=2)
    yield client
    await client.aclose()


async def seconds_of(call: object) -> float:
    began = time.monotonic()
    with pytest.raises(RedisTimeoutError):
        await call  # type: ignore[misc]
    return time.monotonic() - began


@pytest.mark.parametrize("was_connected", [False, True])
async def test_a_call_that_is_not_answered_has_ended_after_one_timeout(
    proxy: Proxy, behind: Redis, was_connected: bool
) -> None:
    """Four tries of five seconds would be told to an HTTP client after twenty."""
    if was_connected:
        await behind.ping()
    proxy.hang()
    assert TIMEOUT_S * 0.9 < await seconds_of(behind.get("x")) < TIMEOUT_S * 1.9
    proxy.reset()


async def test_calls_that_waited_for_a_connection_do_not_wait_for_the_server_as_long_again(
    proxy: Proxy, behind: Redis
) -> None:
    """Ten calls on two connections: one timeout for all of them, not five in a row."""
    await behind.ping()
    proxy.hang()
    waits = await asyncio.gather(*(seconds_of(behind.get("x")) for _ in range(10)))
    assert max(waits) < TIMEOUT_S * 1.9
    proxy.reset()
    proxy.heal()
    assert await asyncio.gather(*(behind.ping() for _ in range(10))) == [True] * 10


async def test_a_connection_that_was_lost_is_made_again_within_the_call(proxy: Proxy, behind: Redis) -> None:
    await behind.set("jitney-test:lost", "1", px=1_000)
    for _ in range(5):
        proxy.reset()
        assert await behind.get("jitney-test:lost") == b"1"


@pytest.mark.parametrize("make", [lambda: _RetryAtOnce(_Silence()), _NoRetry])
async def test_a_closed_transport_of_uvloop_is_a_lost_connection(make: Callable[[], Retry]) -> None:
    """As under uvicorn: a RuntimeError would be an internal error, a 500, and never tried again."""
    failures: list[Exception] = []

    async def write() -> None:
        raise RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed")

    async def note(error: Exception) -> None:
        failures.append(error)

    with pytest.raises(RedisConnectionError, match="the connection was lost"):
        await make().call_with_retry(write, note)
    assert len(failures) == (4 if make is not _NoRetry else 0)


async def test_another_runtime_error_stays_what_it_is() -> None:
    async def stumble() -> None:
        raise RuntimeError("event loop is closed")

    with pytest.raises(RuntimeError, match="event loop is closed"):
        await _NoRetry().call_with_retry(stumble, lambda error: None)


async def test_commands_arrive_as_they_were_given(server: EmbeddedServer) -> None:
    """Text, bytes that are no text, numbers, what is longer than a buffer, and names of two words."""
    client = connect(server.url)
    words = ["é", b"\xff\r\n\0", 7, 1.5, b"x" * 100_000, ""]
    await client.rpush("packed", *words)
    assert await client.lrange("packed", 0, -1) == ["é".encode(), b"\xff\r\n\0", b"7", b"1.5", b"x" * 100_000, b""]
    assert await client.execute_command("CONFIG GET", "port") == {"port": str(server.port)}
    with pytest.raises(DataError):
        await client.set("packed", None)
    await client.delete("packed")
    await client.aclose()
