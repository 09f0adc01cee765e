"""Who records how a task ended, when its message was handed out twice: one of them, and the other one if that dies.

A broker that heard nothing for its visibility timeout hands a message out again. Both find the same job, and see it
end at the same moment. Recording it twice would send a chain's next task, or a callback, twice.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Final

from redis.exceptions import RedisError, ResponseError

from jitney.connection import Redis, pause_s
from jitney.keys import settled_key
from jitney.logs import logger

CLAIM_S: Final = 60.0
"""Recording takes milliseconds. Whoever is dead, or hangs for so long, has somebody else do it."""

REMEMBER_S: Final = 86_400.0
ASK_AGAIN_S: Final = 0.25
_DONE: Final = b"done"

_log = logger(part="celery")


class Settlement:
    """One attempt of one task, seen by one of those who were handed it."""

    def __init__(self, redis: Redis, key: str) -> None:
        self._redis = redis
        self._key = settled_key(key)
        self._mine = secrets.token_hex(8)

    async def is_over(self, *, redelivered: bool) -> bool:
        """Whether it was recorded before. A message that is no redelivery begins anew: somebody sent it again."""
        num_failures = 0
        while True:
            try:
                if await self._read() != _DONE:
                    return False
                if redelivered:
                    return True
                await self._redis.delete(self._key)
                return False
            except ResponseError:
                return False
            except (RedisError, OSError):
                await asyncio.sleep(pause_s(num_failures))
                num_failures += 1

    async def claim(self) -> bool:
        """True: record it, and say so with `done`. False: it has been recorded."""
        num_failures = 0
        while True:
            try:
                if await self._redis.set(self._key, self._mine, nx=True, px=round(CLAIM_S * 1e3)):
                    return True
                if await self._read() == _DONE:
                    return False
                await asyncio.sleep(ASK_AGAIN_S)
            except ResponseError as error:
                _log.warning("settlement_unguarded", error=type(error).__name__)  # no memory: once too often, then
                return True
            except (RedisError, OSError):
                await asyncio.sleep(pause_s(num_failures))
                num_failures += 1

    async def done(self) -> None:
        """It is recorded: nobody else does it. Left out on an error: the message is acknowledged all the same."""
        try:
            await self._redis.set(self._key, _DONE, px=round(REMEMBER_S * 1e3))
        except (RedisError, OSError) as error:
            _log.warning("settlement_not_noted", error=type(error).__name__)

    async def _read(self) -> bytes | None:
        value = await self._redis.get(self._key)
        return value.encode() if isinstance(value, str) else value
