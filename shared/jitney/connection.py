"""The one place where Redis clients are made, so that every reply has the same shape and every wait a bound."""

from __future__ import annotations

import inspect
import random
from typing import Any

import redis.asyncio as aredis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff

Redis = aredis.Redis
"""An asyncio client made by this module: bytes in, bytes out."""

BLOCK_MARGIN_S = 5.0
MAX_PAUSE_S = 2.0
POOL_WAIT_S = 20.0

# redis-py 8 changes the shape of replies with the protocol unless told not to; older ones have no such switch.
_ONE_SHAPE: dict[str, Any] = (
    {"legacy_responses": False} if "legacy_responses" in inspect.signature(aredis.Redis.__init__).parameters else {}
)


def pause_s(num_failures: int) -> float:
    """Seconds before Redis is asked again, at random, so that a thousand of us do not come back at once.

    Doubles with every failure in a row, up to MAX_PAUSE_S; an outage may last for any number of them.
    """
    return min(MAX_PAUSE_S, 0.05 * 2.0 ** min(num_failures, 16)) * random.uniform(0.5, 1.0)


def connect(url: str, *, name: str = "jitney", timeout_s: float = 5.0, max_connections: int = 32) -> Redis:
    """A client for short calls: a lost connection is tried again three times, then the error is the caller's.

    More calls at once than `max_connections` wait for a free one: the plain pool would refuse them.
    """
    pool = aredis.BlockingConnectionPool.from_url(
        url,
        timeout=POOL_WAIT_S,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        socket_keepalive=True,
        health_check_interval=15,
        client_name=name,
        max_connections=max_connections,
        retry=Retry(ExponentialWithJitterBackoff(base=0.02, cap=0.5), 3),
        **_ONE_SHAPE,
    )
    client: Redis = aredis.Redis.from_pool(pool)
    return client


def connect_once(url: str, *, name: str = "jitney-once", timeout_s: float = 5.0) -> Redis:
    """A client that never sends a command twice: for `claim`, whose second sending would take other jobs."""
    client: Redis = aredis.Redis.from_url(
        url,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        socket_keepalive=True,
        health_check_interval=0,
        client_name=name,
        retry=Retry(ExponentialWithJitterBackoff(base=0.02, cap=0.5), 0),
        **_ONE_SHAPE,
    )
    return client


def connect_blocking(url: str, *, block_s: float, name: str = "jitney-wait") -> Redis:
    """A client for one blocking call at a time.

    Its socket waits longer than the call, and it never repeats one: a repeated blocking read can take
    an element for a connection that is already dead.
    """
    return connect_once(url, name=name, timeout_s=block_s + BLOCK_MARGIN_S)
