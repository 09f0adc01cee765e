"""The one place where Redis clients are made, so that every reply has the same shape and every wait a bound."""

from __future__ import annotations

import contextvars
import inspect
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import hiredis
import redis.asyncio as aredis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff
from redis.exceptions import ClusterDownError, DataError, ReadOnlyError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

T = TypeVar("T")

Redis = aredis.Redis
"""An asyncio client made by this module: bytes in, bytes out."""

BLOCK_MARGIN_S = 5.0
MAX_PAUSE_S = 2.0
POOL_WAIT_S = 20.0

# redis-py 8 changes the shape of replies with the protocol unless told not to; older ones have no such switch.
_ONE_SHAPE: dict[str, Any] = (
    {"legacy_responses": False} if "legacy_responses" in inspect.signature(aredis.Redis.__init__).parameters else {}
)


_ELSEWHERE = (ReadOnlyError, ClusterDownError)
"""READONLY and MASTERDOWN: this server is no primary any more. After a failover the address may lead to another one
already, but an open connection stays with the old one for as long as that lives: it is given up, and made anew."""


def pause_s(num_failures: int) -> float:
    """Seconds before Redis is asked again, at random, so that a thousand of us do not come back at once.

    Doubles with every failure in a row, up to MAX_PAUSE_S; an outage may last for any number of them.
    """
    return min(MAX_PAUSE_S, 0.05 * 2.0 ** min(num_failures, 16)) * random.uniform(0.5, 1.0)


def connect(url: str, *, name: str = "jitney", timeout_s: float = 5.0, max_connections: int = 32) -> Redis:
    """A client for short calls, each of which has ended after about `timeout_s`, with or without an answer.

    A lost connection is tried again three times, at once; a call that was not answered in time is not: it had its
    time, and the server may still carry it out. More calls at once than `max_connections` wait for a free one.
    """
    silence = _Silence()
    pool = _Places.from_url(
        url,
        timeout=POOL_WAIT_S,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        socket_keepalive=True,
        health_check_interval=15,
        client_name=name,
        max_connections=max_connections,
        retry=_RetryAtOnce(silence),
        retry_on_error=list(_ELSEWHERE),
        **_ONE_SHAPE,
    )
    pool.silence = silence
    return _with_packing(aredis.Redis.from_pool(pool))


class _Packing:
    """Commands put together by hiredis: redis-py's own packing is Python, and most of what an append of 64 jobs cost.

    (Its connections for threads do it so by themselves; those for asyncio do not.)
    """

    def pack_command(self, *args: Any) -> list[bytes]:
        name, *rest = args
        words = (name.encode() if isinstance(name, str) else name).split()  # `CLIENT SETINFO` is two words
        try:
            return [hiredis.pack_command((*words, *rest))]
        except TypeError as error:
            raise DataError(str(error)) from error


def _with_packing(client: Redis) -> Redis:
    """The client, whose pool has made no connection yet."""
    pool = client.connection_pool
    kind = pool.connection_class
    pool.connection_class = type(kind.__name__, (_Packing, kind), {})
    return client


class _Silence:
    """When a call of one client was last left without an answer."""

    since = 0.0

    def __deepcopy__(self, _memo: object) -> _Silence:
        return self  # each connection copies its retry policy, and all of them speak of one server


class _RetryAtOnce(Retry):
    """Three more tries after what failed at once; none after a silence, which is noted."""

    def __init__(self, silence: _Silence) -> None:
        super().__init__(ExponentialWithJitterBackoff(base=0.02, cap=0.5), 3, (RedisConnectionError,))
        self._silence = silence

    def __deepcopy__(self, memo: object) -> _RetryAtOnce:
        other = _RetryAtOnce(self._silence)
        other.update_supported_errors(self._supported_errors)
        return other

    async def call_with_retry(self, do: Callable[[], Awaitable[T]], *args: Any, **kwargs: Any) -> T:
        try:
            return await super().call_with_retry(lambda: _noticing_the_loss(do), *args, **kwargs)
        except RedisTimeoutError:
            self._silence.since = time.monotonic()
            raise


class _NoRetry(Retry):
    """One try, and no new connection after it.

    redis-py's pub/sub makes one within the call that failed: whoever listens and whoever subscribes would both
    make one, and one of the two would be left open.
    """

    def __init__(self) -> None:
        super().__init__(NoBackoff(), 0, (RedisConnectionError, RedisTimeoutError))

    def __deepcopy__(self, _memo: object) -> _NoRetry:
        return _NoRetry()

    async def call_with_retry(
        self,
        do: Callable[[], Awaitable[T]],
        fail: Callable[..., Any],
        is_retryable: Any = None,
        with_failure_count: bool = False,
    ) -> T:
        try:
            return await _noticing_the_loss(do)
        except _ELSEWHERE as error:  # the connection works, but leads to the wrong server
            await (fail(error, 1) if with_failure_count else fail(error))
            raise


async def _noticing_the_loss(do: Callable[[], Awaitable[T]]) -> T:
    """uvloop has an error of its own for writing to a connection that is gone, which redis-py lets through."""
    try:
        return await do()
    except RuntimeError as error:
        if "handler is closed" not in str(error):
            raise
        raise RedisConnectionError("the connection was lost") from error


class _Places(aredis.BlockingConnectionPool):
    """Waits for a free connection, but not behind calls that turn out to be waiting in vain.

    Whoever got the place of one that was not answered would be silent for as long again, and so would the next.
    """

    silence = _Silence()

    async def get_connection(self, *args: Any, **kwargs: Any) -> Any:
        _asked_at.set(time.monotonic())
        return await super().get_connection(*args, **kwargs)  # type: ignore[no-untyped-call]

    async def ensure_connection(self, connection: Any) -> None:
        if self.silence.since > _asked_at.get():
            raise RedisTimeoutError("Redis did not answer those who were first")
        await super().ensure_connection(connection)


_asked_at = contextvars.ContextVar("_asked_at", default=0.0)


def connect_once(url: str, *, name: str = "jitney-once", timeout_s: float = 5.0) -> Redis:
    """A client that never sends a command twice: for `claim`, whose second sending would take other jobs."""
    client = aredis.Redis.from_url(
        url,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        socket_keepalive=True,
        health_check_interval=0,
        client_name=name,
        retry=_NoRetry(),
        retry_on_error=list(_ELSEWHERE),
        **_ONE_SHAPE,
    )
    return _with_packing(client)


def connect_blocking(url: str, *, block_s: float, name: str = "jitney-wait") -> Redis:
    """A client for one blocking call at a time.

    Its socket waits longer than the call, and it never repeats one: a repeated blocking read can take
    an element for a connection that is already dead.
    """
    return connect_once(url, name=name, timeout_s=block_s + BLOCK_MARGIN_S)
